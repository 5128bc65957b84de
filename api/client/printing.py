"""What the command line prints: tables and sparklines, for people.

Text of runs, servers and policies is never trusted: control characters are replaced, so that no
model output can control a terminal, and markup is not interpreted.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.schemas.artifacts import Batch, Checkpoint
from ratchet.api.schemas.events import Event, LogLine
from ratchet.api.schemas.health import HealthFinding, RunHealth
from ratchet.api.schemas.machines import Engine, WorkerItem
from ratchet.api.schemas.metrics import EvalRecord, MetricsRow
from ratchet.api.schemas.rollouts import RolloutFull, RolloutItem
from ratchet.api.schemas.run import EvalSummary, ResolvedConfig, Run

Item = TypeVar("Item")
BARS = "▁▂▃▄▅▆▇█"
PIPE_WIDTH = 200
STYLES = {
    "running": "green",
    "succeeded": "bold green",
    "failed": "bold red",
    "error": "red",
    "warning": "yellow",
    "paused": "yellow",
}
ENGINE_STYLES = {"up": "green", "starting": "yellow", "restarting": "yellow"}


def console(*, stderr: bool = False) -> Console:
    """A console without markup; wide where output is not a terminal, so that nothing is cut."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


def clean(text: str) -> str:
    """`text` without characters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def one_line(text: str, most: int = 200) -> str:
    """The beginning of `text` in one line."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def number(value: float | None) -> str:
    """A measured value, '-' for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def amount(size: int | None) -> str:
    """A size with its unit, '-' if unknown."""
    if size is None:
        return "-"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def moment(value: datetime | None, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time on this machine's clock, '-' for None."""
    return value.astimezone().strftime(pattern) if value is not None else "-"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from the lowest value to the highest; each is the mean of its slice."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    shares = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    if high <= low:
        return BARS[0] * count
    top = len(BARS) - 1
    return "".join(BARS[round((mean - low) / (high - low) * top)] for mean in means)


def print_json(value: Any) -> None:
    """JSON for programs, all of it ASCII; indented on a terminal."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None), flush=True)


# -- runs -------------------------------------------------------------------------------------


def pairs_table(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Names and values; rows without a value are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value is not None and value != "":
            table.add_row(name, value)
    return table


def listing(
    names: Sequence[str],
    items: Iterable[Item],
    cells: Callable[[Item], Sequence[RenderableType]],
    failed: Callable[[Item], object] = lambda item: False,
) -> Table:
    """A table with one line per item, whose first column is never cut."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(names):
        table.add_column(name, no_wrap=i == 0, overflow="fold")
    for item in items:
        table.add_row(*cells(item), style=STYLES["error"] if failed(item) else "")
    return table


def _steps(run: Run) -> str:
    if run.kind == "eval":
        return "eval"
    return f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step)


def evals_line(run: Run) -> str:
    """The latest eval of each env."""
    return ", ".join(
        f"{env} {number(result.reward)} at step {result.step}{_failed(result)}"
        for env, result in run.eval.items()
    )


def _failed(result: EvalSummary) -> str:
    """' (16 of 16 failed: …)', '' if none did."""
    if not result.failed:
        return ""
    return clean(f" ({result.failed} of {result.of} failed: {result.error})")


def error_line(run: Run) -> str:
    """Why a run failed, '' if it did not."""
    if run.error is None:
        return ""
    if run.error.role == "preflight":
        return clean(f"the check before the start found: {run.error.message}")
    where = f" in {run.error.role}" if run.error.role else ""
    key = f" ({run.error.param})" if run.error.param else ""
    return clean(f"{run.error.code}{where}{key}: {run.error.message}")


def waits_line(run: Run) -> str:
    """What a run waits for, and for how long; '' for nothing."""
    waiting = run.waiting_for
    return one_line(waiting.message.removeprefix("waiting for ")) if waiting else ""


def pending_line(run: Run) -> str:
    """Changes of the config that have not taken effect yet; '' for none."""
    return clean(", ".join(f"{key} = {json.dumps(value)}" for key, value in run.pending.items()))


def silent_line(run: Run) -> str:
    """Which workers are missing, and for how long; '' for none."""
    return ", ".join(f"no {role} worker for {s:.0f} s" for role, s in run.silent.items())


def runs_table(runs: Iterable[Run]) -> Table:
    """Runs, one line each; `eval` is the latest reward of each env, `why` what the run waits for or
    why it ended.
    """
    return listing(
        (
            "id",
            "status",
            "env",
            "model",
            "step",
            "reward",
            "eval",
            "took",
            "disk",
            "created",
            "why",
        ),
        runs,
        lambda run: (
            run.id,
            Text(run.status, STYLES.get(run.status, "")),
            clean(" + ".join(run.envs)),
            clean(run.model or ""),
            _steps(run),
            number(run.reward),
            " ".join(number(result.reward) for result in run.eval.values()),
            lasting(took) if (took := run.took_s) is not None else "-",
            amount(run.disk),
            moment(run.created_at, "%m-%d %H:%M"),
            error_line(run)
            or clean(run.paused_because or run.pause_reason or "")
            or one_line(run.waiting_for.name if run.waiting_for else "")
            or clean(run.end_reason or ""),
        ),
    )


HEALTH_STYLES = {"healthy": "green", "attention": "yellow", "paused": "yellow", "failed": "red"}


def lasting(seconds: float) -> str:
    """A time span in its two largest units."""
    # Rounded before it is split, so that no part of it is rounded up to 60.
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


STOPS = ("paused", "held", "failed", "failed_early")
"""Rules of health that say why a run stands still, or ended."""


def _guide(address: str, help_: str) -> str:
    """Where the API at `address` serves the section of the docs that a finding names."""
    page, _, section = help_.removeprefix("docs/").partition("#")
    return f"{address}/dashboard/help/{page.removesuffix('.md')}.html#{section}"


def _since(finding: HealthFinding) -> str:
    """Since which step there is a finding, or since when; a stop happened at one."""
    if finding.since_step is not None and finding.rule in STOPS:
        return f" at step {finding.since_step}"
    if finding.since_step is not None:
        return f" since step {finding.since_step}{' or before' if finding.since_earlier else ''}"
    return f" since {moment(finding.since)}" if finding.since else ""


def health_rows(health: RunHealth, address: str) -> list[tuple[str, RenderableType | None]]:
    """A run's health: the verdict, the figures, and what to do about each finding, with the page of
    the API at `address` that says more.
    """
    style = HEALTH_STYLES.get(health.verdict, "")
    message = health.message.removeprefix(f"{health.verdict} ")
    pace, left = health.seconds_per_step, health.seconds_left
    stale = health.worst_staleness
    figures = (
        ("", f"{lasting(pace)} a step" if pace is not None else ""),
        ("", f"{lasting(left)} left" if left is not None else ""),
        ("errors ", _share(health.errors)),
        ("without signal ", _share(health.without_signal)),
        ("stale by at most ", f"{stale:.0f}" if stale is not None else ""),
        ("", health.waits or ""),
    )
    found: list[tuple[str, RenderableType | None]] = [
        (
            "do" if i == 0 else "",
            clean(f"{item.title}{_since(item)}: {item.advice} {_guide(address, item.help)}"),
        )
        for i, item in enumerate(health.findings)
    ]
    return [
        ("health", Text(clean(f"{health.verdict}: {message}"), style)),
        ("lately", ", ".join(f"{name}{value}" for name, value in figures if value)),
        *found,
    ]


def _newest(warnings: Sequence[str], most: int = 3) -> str:
    """The newest warnings in one line, and how many came before them."""
    earlier = len(warnings) - most
    more = f" (and {earlier} earlier: `ratchet runs events`)" if earlier > 0 else ""
    return "; ".join(warnings[-most:]) + more


def run_table(run: Run, address: str, health: RunHealth | None = None) -> Table:
    """One run of the API at `address` in full, headed by its health."""
    lineage = run.lineage
    servers = ", ".join(f"{role} {count}" for role, count in run.restarts.items() if count)
    return pairs_table(
        [
            *(health_rows(health, address) if health is not None else ()),
            ("id", run.id),
            ("status", run.status),
            ("waits for", waits_line(run)),
            ("no worker", silent_line(run)),
            ("paused because", clean(run.paused_because or run.pause_reason or "")),
            ("error", error_line(run)),
            ("warned", "" if run.status in ENDED else clean(_newest(run.warnings))),
            ("ended", clean(run.end_reason or "")),
            ("env", clean(" + ".join(run.envs))),
            ("model", clean(run.model or "")),
            ("step", _steps(run)),
            ("policy version", str(run.policy_version) if run.policy_version is not None else ""),
            ("reward", number(run.reward)),
            ("eval", evals_line(run)),
            ("checkpoint", f"step {run.checkpoint.step}" if run.checkpoint else None),
            ("attempt", str(run.attempt)),
            ("from", f"{lineage.kind} of {lineage.source} at {lineage.step}" if lineage else None),
            ("restarts", servers),
            ("config", f"revision {run.config_revision}" if run.config_revision else None),
            ("changed", clean(json.dumps(run.config_changes)) if run.config_changes else None),
            ("from the next step on", pending_line(run)),
            ("metadata", clean(", ".join(f"{k}={v}" for k, v in run.metadata.items()))),
            ("note", clean(run.note)),
            ("disk", amount(run.disk) if run.disk is not None else None),
            ("archived", "yes" if run.archived else None),
            ("created", moment(run.created_at)),
            ("started", moment(run.started_at) if run.started_at else None),
            ("finished", moment(run.finished_at) if run.finished_at else None),
            ("Temporal", run.links.temporal_ui),
        ]
    )


def estimate_line(parts: Mapping[str, int]) -> str:
    """An estimate: the total, and its parts, the largest first."""
    large = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])
    shown = ", ".join(f"{name} {amount(parts[name])}" for name in large)
    return clean(f"{amount(sum(parts.values()))} ({shown})")


def _planned_steps(steps: int | None) -> str:
    if steps == 0:
        return "none: an evaluation"
    return "until it is stopped" if steps is None else str(steps)


def plan_table(answer: ResolvedConfig) -> Table:
    """The result of a dry run."""
    plan = answer.plan
    groups = plan.groups_per_step or {}
    return pairs_table(
        [
            ("name", clean(str(answer.config.get("name", "")))),
            ("steps", _planned_steps(plan.steps)),
            ("rollouts", f"{plan.train_rollouts} at least" if plan.train_rollouts else None),
            ("a step", f"{plan.rollouts_per_step} rollouts" if plan.rollouts_per_step else None),
            ("groups", ", ".join(f"{env} {count:g}" for env, count in groups.items())),
            ("at once", f"{plan.permits} rollouts" if plan.permits else None),
            ("algorithms", ", ".join(f"{e} {a}" for e, a in plan.algorithms.items())),
            *(
                (
                    "eval",
                    f"{e.env}: {f'{e.count} of ' if e.count is not None else ''}"
                    f"{e.rollouts or 'all'} rollouts"
                    + (f", each {e.interval} steps" if plan.steps != 0 else ""),
                )
                for e in plan.evals
            ),
            ("checkpoints", str(plan.checkpoints) if plan.checkpoints else None),
            *(("servers", f"{role}: {', '.join(names)}") for role, names in plan.servers.items()),
            *((what, estimate_line(parts)) for what, parts in answer.estimates.items()),
            ("transfer", plan.transfer if plan.transfer != "store" else None),
            ("unverified", plan.unverified),
        ]
    )


def event_line(event: Event) -> str:
    """An event in one line, without the date."""
    mark = "" if event.level == "info" else f"{event.level}: "
    return f"{moment(event.created_at, '%H:%M:%S')} {mark}{one_line(event.message, 400)}"


def event_lines(events: Iterable[Event]) -> str:
    """Events, one line each."""
    return "\n".join(map(event_line, events))


def log_lines(lines: Iterable[LogLine]) -> str:
    """Lines of a log, with their source."""
    return "\n".join(
        f"{'-' if line.created_at is None else moment(line.created_at)} "
        f"{line.level:7} {clean(line.source)}: "
        f"{one_line(line.message, 400)}"
        for line in lines
    )


def metrics_table(rows: Sequence[MetricsRow], width: int = 40) -> Table:
    """Each metric over the selected steps, in the order in which they come."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            if value is not None:
                series.setdefault(name, []).append(value)
    return listing(
        ("metric", "first", "last", "lowest", "highest", "over the steps"),
        series.items(),
        lambda item: (
            clean(item[0]),
            *map(number, (item[1][0], item[1][-1], min(item[1]), max(item[1]))),
            sparkline(item[1], width),
        ),
    )


def _state(problem: str | None, error: str | None) -> str:
    """Why an eval's record is damaged, or why its rollouts failed."""
    return clean(f"damaged: {problem}" if problem else f"sound; {error}" if error else "sound")


def within(value: Mapping[str, Any] | None) -> str:
    """'0.61 [0.52, 0.7]': a mean with the bounds of its interval, where they are known."""
    if value is None:
        return "-"
    bounds = [value.get("low"), value.get("high")]
    known = f" [{', '.join(map(number, bounds))}]" if None not in bounds else ""
    return f"{number(value.get('mean'))}{known}"


def _scores(metrics: Any) -> str:
    """avg@n, the mean reward, and pass@k of an eval, with their intervals; '' of older builds."""
    if not isinstance(metrics, dict):
        return ""
    names = [name for name in metrics if name.startswith(("avg@", "pass@")) and "/" not in name]
    return ", ".join(
        f"{name} "
        + within(
            {
                "mean": metrics[name],
                "low": metrics.get(f"{name}/low"),
                "high": metrics.get(f"{name}/high"),
            }
        )
        for name in names
    )


def evals_table(items: Iterable[EvalRecord]) -> Table:
    """Evals, one line each; of a damaged one, what is known."""

    def measured(item: EvalRecord, name: str) -> Any:
        return (item.model_extra or {}).get(name)

    return listing(
        ("step", "env", "reward", "rollouts", "failed", "versions", "state"),
        items,
        lambda item: (
            _or_dash(item.step),
            clean(item.env or "-"),
            _scores(measured(item, "metrics")) or number(measured(item, "reward_mean")),
            _or_dash(measured(item, "rollouts")),
            _or_dash(measured(item, "errored")),
            _versions(measured(item, "versions")),
            _state(item.problem, measured(item, "error")),
        ),
        failed=lambda item: item.problem,
    )


def batches_table(items: Iterable[Batch]) -> Table:
    """Batches, one line each, with the paths of their files in the store."""
    return listing(
        ("step", "MiB", "created", "attempt", "file"),
        items,
        lambda item: (
            str(item.step),
            f"{item.size / 2**20:.1f}",
            moment(item.created_at),
            item.attempt,
            clean(f"damaged: {item.problem}" if item.problem else item.path),
        ),
        failed=lambda item: item.problem,
    )


def checkpoints_table(items: Iterable[Checkpoint]) -> Table:
    """Checkpoints, one line each."""
    return listing(
        ("step", "MiB", "created", "attempt", "state"),
        items,
        lambda item: (
            str(item.step),
            f"{item.size / 2**20:.1f}",
            moment(item.created_at),
            item.attempt,
            "sound" if item.sound else clean(item.problem or "damaged"),
        ),
    )


def rollouts_table(items: Iterable[RolloutItem]) -> Table:
    """Rollouts, one line each."""
    return listing(
        ("id", "env", "step", "reward", "advantage", "tokens", "versions", "ended by", "prompt"),
        items,
        lambda item: (
            item.id,
            clean(item.env),
            _or_dash(item.step),
            number(None if item.error else item.reward),
            number(item.advantage),
            str(item.sampled_tokens),
            _versions(item.versions),
            one_line(str((item.error or {}).get("type", "")) or item.stop or "", 60)
            + (" (filtered)" if item.filtered else ""),
            one_line(item.prompt or "", 50),
        ),
        failed=lambda item: item.error,
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _versions(span: Sequence[int] | None) -> str:
    """The lowest and the highest policy version, once where they are the same."""
    return "-".join(str(version) for version in dict.fromkeys(span or ()))


def _named(values: Mapping[str, Any]) -> str:
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
    return clean(", ".join(f"{name} {number(value)}" for name, value in numbers.items()))


def rollout_text(rollout: RolloutFull) -> RenderableType:
    """A rollout: its figures, then all messages."""
    rows = [
        ("id", rollout.id),
        ("env", clean(rollout.env)),
        ("example", str(rollout.example)),
        ("reward", number(None if rollout.error else rollout.reward)),
        ("advantage", number(rollout.advantage)),
        ("rewards", _named(rollout.rewards)),
        ("metrics", _named(rollout.metrics)),
        ("tokens", str(rollout.sampled_tokens)),
        ("error", clean(json.dumps(rollout.error)) if rollout.error else None),
        ("group", ", ".join(f"{m.id} {number(m.reward)}" for m in rollout.members)),
    ]
    said: list[RenderableType] = []
    for message in rollout.messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        said += [Text(f"\n{clean(str(message.get('role', '?')))}", style="bold"), clean(text)]
    return Group(pairs_table(rows), *said)


# -- machines ---------------------------------------------------------------------------------


def engines_table(items: Iterable[Engine]) -> Table:
    """Engines, one line each."""
    return listing(
        ("id", "state", "starts", "since", "version", "worker", "last failure"),
        items,
        lambda item: (
            item.id,
            Text(item.state, ENGINE_STYLES[item.state]),
            str(item.attempt),
            moment(item.since),
            _or_dash(item.policy_version),
            clean(item.worker or "-"),
            one_line(item.last_failure or ""),
        ),
    )


def workers_table(items: Iterable[WorkerItem]) -> Table:
    """Worker processes, one line each, with the rollouts in flight that each last reported."""

    def in_flight(item: WorkerItem) -> str:
        counts = [gauge["worker_inflight"] for gauge in item.gauges if "worker_inflight" in gauge]
        return str(sum(counts)) if counts else "-"

    return listing(
        ("id", "role", "queue", "last seen", "in flight"),
        items,
        lambda item: (
            clean(item.id),
            item.role,
            clean(item.queue),
            moment(item.last_seen),
            in_flight(item),
        ),
    )
