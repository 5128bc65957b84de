"""Whether a run is healthy, judged from what its steps measured. Pure functions of step metrics.

`RULES` names every rule, with advice; `docs/reading-a-run.md` has a section on each, whose anchor
is the rule's name with dashes. A rule is silent if its metrics are missing or there are too few
steps to judge by. Rows are the metrics of one step each, ascending, at most WINDOW.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

PAGE = "docs/reading-a-run.md"
WINDOW = 50
"""Steps that the slowest rule reads."""
LATELY = 10
"""Steps that count as 'now', over which noise of single batches averages out."""
ENDS_AFTER = 10
"""A finding that was absent for fewer steps than this has not begun a second time."""

ZERO_ADVANTAGE = "zero_advantage/all"
HIT_BEFORE, REMOVED_BEFORE = "pre_filters/all/zero_advantage/rate", "pre_filters/all/dropped_rate"
REWARD = "reward/all/mean"
TRUNCATED = "is_truncated/all/mean"
STEP_TIME = "time/step"
WAITS = {
    "time/wait_for_batch": "the trainer waits for rollouts",
    "time/scoring": "the trainer waits for scoring",
    "time/train": "the engines run ahead while the trainer trains",
    "time/sync_weights": "the engines load new weights",
}
"""What the time of a step is spent on, by metric."""
NAMES = (
    ZERO_ADVANTAGE,
    HIT_BEFORE,
    REMOVED_BEFORE,
    REWARD,
    TRUNCATED,
    STEP_TIME,
    *WAITS,
    "entropy/all/mean",
    "entropy",
    "solve_none/all",
    "solve_all/all",
    "errors/all/rate",
    "staleness/max",
)
ERRORS, RATE = "errors/", "/rate"

Row = Mapping[str, float]
Level = Literal["warning", "info"]


@dataclass(frozen=True)
class Rule:
    """A rule with its title and advice. 'info': worth knowing, but the run is healthy.

    The advice has {run} and {subject} in place of the run's id and the finding's subject.
    """

    title: str
    advice: str
    level: Level = "warning"


RULES: dict[str, Rule] = {
    "no_variance": Rule(
        "Groups without signal",
        "Make examples easier or harder so that some rollouts of a group succeed and some fail: "
        "another difficulty, more rollouts a group, a curriculum, or a reward with partial credit.",
    ),
    "flat_reward": Rule(
        "The reward does not move",
        "Check that rollouts get the rewards that they should (read some), then the learning rate, "
        "groups without signal and the gradient norm.",
    ),
    "entropy_collapse": Rule(
        "The entropy collapsed",
        "The policy samples nearly the same text every time. Fork from a checkpoint before the "
        "collapse with a lower learning rate or a stronger KL term.",
    ),
    "mismatch": Rule(
        "Trainer and engines drift apart",
        "They assign different probabilities to the same tokens. Look at the panel Mismatch KL, "
        "the dtypes of both sides, and staleness.",
    ),
    "truncation": Rule(
        "Rollouts are cut off",
        "Replies reach a limit and are scored as cut off. Raise sampling.max_tokens and "
        "trainer.seq_len, or penalise length.",
    ),
    "env_failing": Rule(
        "An environment fails",
        "Read the errors of failed rollouts (filter Errors: failed) and the env's log: "
        "`ratchet runs logs {run} --env {subject}`.",
    ),
    "trainer_idle": Rule(
        "The trainer is idle",
        "Rollouts are the bottleneck: more engines, more permits "
        "(dispatch.max_inflight_rollouts), shorter replies, or a faster environment.",
        "info",
    ),
    "engines_idle": Rule(
        "The engines wait for the trainer",
        "The trainer is the bottleneck: a faster trainer, smaller batches or packing. "
        "train.max_lag only lets engines run further ahead, with more staleness.",
        "info",
    ),
    "no_worker": Rule(
        "No worker for a role",
        "Start a worker of that role: `make status` shows what runs on this machine, `ratchet "
        "workers` which workers poll.",
    ),
    "paused": Rule(
        "The run paused itself",
        "Fix what it names, then resume the run: the button Resume, or `ratchet runs resume "
        "{run}`. Nothing that it has done is lost. If it names a key of the config that `ratchet "
        "runs set` cannot change, cancel the run and create a new one, or fork it if it has a "
        "checkpoint.",
    ),
    "held": Rule(
        "The run is on hold",
        "Fix what it names: the run tries again at intervals of at most five minutes, and goes on "
        "by itself. Nothing that it has done is lost.",
    ),
    "failed": Rule(
        "The run failed",
        "Fix what it names, then resume the run from its last checkpoint (`ratchet runs resume "
        "{run}`), or fork it with another config.",
    ),
    "failed_early": Rule(
        "The run failed before its first checkpoint",
        "Fix what it names, then create a new run: there is nothing to resume or to fork.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A problem with a run; `subject` is the env or role, if it concerns one."""

    rule: str
    message: str
    subject: str = ""

    @property
    def level(self) -> Level:
        """Its severity."""
        return RULES[self.rule].level

    @property
    def help(self) -> str:
        """The section of the documentation with advice."""
        return f"{PAGE}#{self.rule.replace('_', '-')}"

    @property
    def pointer(self) -> dict[str, str]:
        """How an event names its rule and that section."""
        return {"rule": self.rule, "subject": self.subject, "help": self.help}


@dataclass(frozen=True)
class HealthReport:
    """A signal to the run from the worker that records its steps: `finding` began at `step`."""

    step: int
    finding: Finding


HEALTH_REPORT = "health_report"
"""The name of that signal."""


@dataclass(frozen=True)
class Figures:
    """The figures of a run's last steps; None: not measured.

    `errors` and `without_signal` are shares, `waits` shares of a step's time by metric.
    """

    errors: float | None
    without_signal: float | None
    worst_staleness: float | None
    waits: dict[str, float]


def relevant(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that the rules read."""
    return {
        name: value
        for name, value in metrics.items()
        if name in NAMES or (name.startswith(ERRORS) and name.endswith(RATE))
    }


def figures(rows: Sequence[Row]) -> Figures:
    """The figures of the newest of some rows."""
    lately = rows[-LATELY:]
    stale = _values(lately, "staleness/max")
    return Figures(
        errors=_mean(lately, "errors/all/rate"),
        without_signal=fmean(shares) if (shares := _without_signal(lately)) else None,
        worst_staleness=max(stale, default=None),
        waits=_waits(lately),
    )


def findings(rows: Sequence[Row]) -> list[Finding]:
    """The findings for a run with these newest rows, in the order of `RULES`."""
    return [finding for judge in _JUDGES for finding in judge(rows[-WINDOW:])]


def begun(rows: Sequence[Row]) -> list[Finding]:
    """Current findings that were absent in the ENDS_AFTER steps before; of rows that may include
    older ones than WINDOW.
    """
    before = {
        (finding.rule, finding.subject)
        for back in range(1, min(ENDS_AFTER, len(rows)) + 1)
        for finding in findings(rows[: len(rows) - back])
    }
    return [found for found in findings(rows) if (found.rule, found.subject) not in before]


def find_begins(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Where in `rows` each current finding began, by rule and subject; it looks back WINDOW rows.

    As for `begun`, an absence of fewer steps than ENDS_AFTER does not count.
    """
    places: dict[tuple[str, str], int] = {}
    for place in range(len(rows) - 1, max(len(rows) - WINDOW, 0) - 1, -1):
        there = {(found.rule, found.subject) for found in findings(rows[: place + 1])}
        if place == len(rows) - 1:
            places = dict.fromkeys(there, place)
        held = {key for key, begin in places.items() if begin - place < ENDS_AFTER}
        if not held:
            break
        places |= dict.fromkeys(held & there, place)
    return places


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(rows: Sequence[Row], name: str, at_least: int = 1) -> float | None:
    values = _values(rows, name)
    return fmean(values) if len(values) >= at_least else None


def _without_signal(rows: Sequence[Row]) -> list[float]:
    """Shares of rollouts without signal, of the rows that tell.

    Groups that pre-batch filters removed whole are in no batch, and only the filters' own shares
    count them. Hits of a filter that removes nothing do not count: survivors may get other credit.
    """
    shares = []
    for row in rows:
        removed = min(row.get(HIT_BEFORE, 0.0), row.get(REMOVED_BEFORE, 0.0))
        if ZERO_ADVANTAGE in row or removed:
            shares.append(max(row.get(ZERO_ADVANTAGE, 0.0), removed))
    return shares


def _waits(rows: Sequence[Row]) -> dict[str, float]:
    total = sum(_values(rows, STEP_TIME))
    if total <= 0:
        return {}
    return {name: sum(_values(rows, name)) / total for name in WAITS}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


GOOD_REWARD = 0.95
"""A reward that stays above this means that the task is solved."""
MOST_WITHOUT_SIGNAL = 0.8


def _no_variance(rows: Sequence[Row]) -> Iterator[Finding]:
    lately = rows[-LATELY:]
    shares = _without_signal(lately)
    solved_all = (_mean(lately, REWARD) or 0.0) >= GOOD_REWARD
    if len(shares) < LATELY or solved_all or (share := fmean(shares)) < MOST_WITHOUT_SIGNAL:
        return
    none, solved = (_mean(lately, name) or 0.0 for name in ("solve_none/all", "solve_all/all"))
    why = ""
    if max(none, solved) >= 0.5:
        why = "; most groups earn no reward" if none > solved else "; most groups solve all"
    text = f"{_percent(share)} of the rollouts of the last {LATELY} steps carry no signal{why}"
    yield Finding("no_variance", text)


def _flat_reward(rows: Sequence[Row]) -> Iterator[Finding]:
    values = _values(rows, REWARD)
    if len(values) < WINDOW:
        return
    half = WINDOW // 2
    first, last = values[:half], values[-half:]
    gain, noise = fmean(last) - fmean(first), ((variance(first) + variance(last)) / half) ** 0.5
    if abs(gain) <= 2 * noise and fmean(last) < GOOD_REWARD:
        text = f"the reward has stayed at {fmean(values):.3g} for {WINDOW} steps, within its noise"
        yield Finding("flat_reward", text)


COLLAPSED_SHARE, COLLAPSED_NATS = 0.1, 0.01
NEARLY_SOLVED = 0.85


def _entropy_collapse(rows: Sequence[Row]) -> Iterator[Finding]:
    name = "entropy/all/mean" if _values(rows, "entropy/all/mean") else "entropy"
    before, now = (_mean(part, name, 5) for part in (rows[:LATELY], rows[-5:]))
    reward = _mean(rows[-5:], REWARD)
    if len(rows) < 2 * LATELY or before is None or now is None:
        return
    # A solved task needs no finding about its entropy.
    solved = reward is not None and reward >= NEARLY_SOLVED
    if not solved and (now < COLLAPSED_SHARE * before or now < COLLAPSED_NATS):
        text = f"the policy's entropy fell from {before:.2g} to {now:.2g} nats"
        yield Finding("entropy_collapse", f"{text} within {len(rows)} steps")


MANY_TRUNCATED, RISE = 0.5, 0.1


def _truncation(rows: Sequence[Row]) -> Iterator[Finding]:
    now = _mean(rows[-LATELY:], TRUNCATED, LATELY)
    before = _mean(rows[:LATELY], TRUNCATED, LATELY) if len(rows) >= 2 * LATELY else None
    if now is None:
        return
    if before is not None and now >= before + RISE:
        text = f"rollouts cut off at a limit rose from {_percent(before)} to {_percent(now)}"
        yield Finding("truncation", text)
    elif now >= MANY_TRUNCATED:
        yield Finding("truncation", f"{_percent(now)} of the rollouts are cut off at a limit")


MANY_ERRORS = 0.2


def _env_failing(rows: Sequence[Row]) -> Iterator[Finding]:
    names = {name for row in rows[-5:] for name in row if name.startswith(ERRORS)}
    for name in sorted(names):
        env = name.removeprefix(ERRORS).removesuffix(RATE)
        share = _mean(rows[-5:], name, 3)
        if name.endswith(RATE) and env != "all" and share is not None and share >= MANY_ERRORS:
            yield Finding("env_failing", f"{_percent(share)} of the rollouts of {env} fail", env)


def eval_failing(
    env: str, failed: int | None, of: int | None, error: str | None
) -> Iterator[Finding]:
    """The finding that many rollouts of an env's last eval failed, if they did."""
    if failed and of and failed >= MANY_ERRORS * of:
        text = f"{failed} of {of} rollouts of the eval of {env} failed"
        yield Finding("env_failing", f"{text}: {error}" if error else text, env)


IDLE_SHARE, BUSY_SHARE, NO_WAIT = 0.8, 0.9, 0.02


def _idle(rows: Sequence[Row]) -> Iterator[Finding]:
    lately = rows[-LATELY:]
    if len(_values(lately, STEP_TIME)) < LATELY:
        return
    waits = _waits(lately)
    waiting = waits["time/wait_for_batch"]
    training = waits["time/train"] + waits["time/sync_weights"]
    if waiting >= IDLE_SHARE:
        text = f"the trainer waits for rollouts {_percent(waiting)} of the time"
        yield Finding("trainer_idle", text)
    elif waiting <= NO_WAIT and training >= BUSY_SHARE:
        text = f"the trainer is busy {_percent(training)} of the time, and the engines wait for it"
        yield Finding("engines_idle", text)


_JUDGES: Sequence[Callable[[Sequence[Row]], Iterator[Finding]]] = (
    _no_variance,
    _flat_reward,
    _entropy_collapse,
    _truncation,
    _env_failing,
    _idle,
)
