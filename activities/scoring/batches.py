"""Rollout-side metrics of one training batch.

Where a key ends in a statistic, that is the mean, max or min over groups of each group's own mean,
so that every problem weighs the same. Shares of rollouts weigh every rollout the same. Keys are
'<metric>/<scope>/<statistic>', where scope is 'all' or an env's name. `subsets.py` has the same
families over single rollouts.

All metrics count every rollout that did not err, also those that filters remove. Only 'filters' and
'off_policy' omit what pre-batch filters removed, which never reached the batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ratchet.activities.contracts.rollouts import FilterTally
from ratchet.activities.scoring.filters import Verdict

PROMPT_TOO_LONG = "prompt_too_long"
"""The stop condition of a rollout that was cut off by its prompt, not by its sampled tokens."""

SCORING = "time/scoring"
"""Seconds in which the slowest of a batch's groups was scored, including by its teacher."""
HEADLINE = (
    SCORING,
    "reward/all/mean",
    "progress/tokens",
    "progress/samples",
    "progress/problems",
    "batch/trainable",
    "staleness/mean",
    "staleness/max",
)
"""The metrics of a batch that workflows get; the store has all of them."""


@dataclass(frozen=True)
class BatchRollout:
    """What metrics need of one rollout that did not err. Lengths are in tokens, times in seconds.

    `advantage`: the one farthest from 0; None if its algorithm gives none. `versions`: lowest and
    highest that sampled its tokens; None if unknown.
    `pre_batch` and `post_batch`: the verdicts of each slot; post-batch filters do not see
    what was removed before.
    """

    reward: float
    seq_len: int
    decode_len: int
    turns: int
    truncated: bool
    samples: int
    advantage: float | None
    versions: tuple[int, int] | None = None
    stop: str | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    pre_batch: Verdict = field(default_factory=Verdict)
    post_batch: Verdict = field(default_factory=Verdict)

    @property
    def collected(self) -> bool:
        """Whether the rollout reached the batch."""
        return not self.pre_batch.removed

    @property
    def shipped(self) -> bool:
        """Whether the rollout trains."""
        return self.collected and not self.post_batch.removed


@dataclass(frozen=True)
class BatchGroup:
    """One group of a batch: its rollouts that did not err, and how many of its `size` did."""

    env: str
    size: int
    errored: int
    version_start: int
    rollouts: Sequence[BatchRollout]


def _group_means(groups: Sequence[BatchGroup]) -> dict[str, list[float]]:
    """For each metric the mean of each group that has it; timing only where it was measured."""
    means = {
        "reward": [fmean(r.reward for r in group.rollouts) for group in groups],
        "seq_len": [fmean(r.seq_len for r in group.rollouts) for group in groups],
        "prefill_len": [
            fmean(r.seq_len - r.decode_len for r in group.rollouts) for group in groups
        ],
        "decode_len": [fmean(r.decode_len for r in group.rollouts) for group in groups],
        "num_turns": [fmean(r.turns for r in group.rollouts) for group in groups],
        "is_truncated": [fmean(r.truncated for r in group.rollouts) for group in groups],
        "samples_per_rollout": [fmean(r.samples for r in group.rollouts) for group in groups],
    }
    return means | {
        f"timing/{phase}": values
        for phase, values in _own_means([[r.timing for r in g.rollouts] for g in groups]).items()
    }


def _own_means(groups: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    """For each name the means of the groups [of rollouts] in which any rollout has it."""
    result: dict[str, list[float]] = {}
    for rollouts in groups:
        values: dict[str, list[float]] = {}
        for rollout in rollouts:
            for name, value in rollout.items():
                values.setdefault(name, []).append(value)
        for name, own in values.items():
            result.setdefault(name, []).append(fmean(own))
    return result


def _key(metric: str, scope: str) -> str:
    """'timing/model' in scope 'all' is 'timing/all/model'; 'reward' is 'reward/all'."""
    family, _, name = metric.partition("/")
    return f"{family}/{scope}/{name}" if name else f"{family}/{scope}"


def _scope(groups: Sequence[BatchGroup], scope: str, post_batch: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    full = [group for group in groups if group.rollouts]
    size = sum(group.size for group in groups)
    metrics[f"errored/{scope}/mean"] = sum(group.errored for group in groups) / size
    if not full:
        return metrics
    for name, values in _group_means(full).items():
        key = _key(name, scope)
        metrics[f"{key}/mean"] = fmean(values)
        metrics[f"{key}/max"] = max(values)
        metrics[f"{key}/min"] = min(values)
    metrics |= {f"{name}/{scope}": rate for name, rate in solve_rates(full).items()}
    rollouts = [rollout for group in full for rollout in group.rollouts]
    metrics[f"zero_advantage/{scope}"] = fmean(r.advantage == 0.0 for r in rollouts)
    shares = stop_shares(rollouts)
    metrics |= {f"stop_condition/{scope}/{name}": share for name, share in shares.items()}
    collected = [rollout for rollout in rollouts if rollout.collected]
    if collected:
        metrics[f"filters/{scope}/is_filtered"] = fmean(r.post_batch.removed for r in collected)
        for name in post_batch:
            metrics[f"filters/{scope}/{name}"] = fmean(name in r.post_batch.hits for r in collected)
    return metrics


def solve_rates(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """Shares of groups with at least one rollout: solve_none, whose rewards add up to 0; solve_all,
    whose rewards add up to the group's size; effective_batch_size, all others.
    """
    sums = [sum(rollout.reward for rollout in group.rollouts) for group in groups]
    none = fmean(total == 0 for total in sums)
    solved = fmean(total == group.size for total, group in zip(sums, groups, strict=True))
    return {
        "solve_none": none,
        "solve_all": solved,
        "effective_batch_size": 1.0 - none - solved,
    }


def stop_shares(rollouts: Sequence[BatchRollout]) -> dict[str, float]:
    """Shares of rollouts by what stopped them; one that was never stopped counts as 'none'.

    'generation_truncated' counts those cut off while the policy sampled, for any stop condition.
    """
    cut = fmean(r.truncated and r.stop != PROMPT_TOO_LONG for r in rollouts)
    conditions = [rollout.stop or "none" for rollout in rollouts]
    shares = {
        condition: conditions.count(condition) / len(conditions)
        for condition in sorted(set(conditions))
    }
    return {**shares, "generation_truncated": cut}


def _pre_filters(
    groups: Sequence[BatchGroup], names: Sequence[str], filtered_out: FilterTally
) -> dict[str, float]:
    """Shares of the rollouts that did not err, over the batch's groups and those that never made
    it into a batch.
    """
    tally = tally_of([r.pre_batch for group in groups for r in group.rollouts]).plus(filtered_out)
    if not tally.rollouts:
        return {}
    counts = {f"{name}/rate": tally.hits.get(name, 0) for name in names}
    counts = {"dropped_rate": tally.dropped, **counts}
    return {f"pre_filters/all/{name}": count / tally.rollouts for name, count in counts.items()}


def tally_of(verdicts: Sequence[Verdict]) -> FilterTally:
    """Counts the verdicts of a slot."""
    hits = Counter(name for verdict in verdicts for name in verdict.hits)
    return FilterTally(len(verdicts), sum(verdict.removed for verdict in verdicts), dict(hits))


def off_policy(step: int, first: int, last: int) -> tuple[int, int]:
    """Versions that passed while a rollout was in flight and while it was in the queue.

    `first` and `last` sampled its oldest and newest token, and batch `step` trains on top of
    version `step - 1`. total = max(0, step - 1 - first); in flight = min(total, last - first).
    """
    total = max(0, step - 1 - first)
    in_flight = min(total, max(0, last - first))
    return in_flight, total - in_flight


def _off_policy(rollouts: Sequence[BatchRollout], step: int) -> dict[str, float]:
    lags = [off_policy(step, *rollout.versions) for rollout in rollouts if rollout.versions]
    families = {
        "off_policy": [float(in_flight + in_queue) for in_flight, in_queue in lags],
        "off_policy/in_flight": [float(in_flight) for in_flight, _ in lags],
        "off_policy/in_queue": [float(in_queue) for _, in_queue in lags],
    }
    return {
        f"{name}/{statistic}": of(values)
        for name, values in families.items()
        if values
        for statistic, of in (("mean", fmean), ("max", max))
    }


def summarize(
    groups: Sequence[BatchGroup],
    step: int,
    *,
    pre_batch: Sequence[str] = (),
    post_batch: Sequence[str] = (),
    filtered_out: FilterTally | None = None,
) -> dict[str, float]:
    """Metrics of the batch of `step`.

    `pre_batch` and `post_batch` name the filters of each slot, so that those without hits appear
    as 0. `filtered_out` are groups from which filters removed every rollout: they are in no batch.

    staleness/{mean,max}: versions between the one that sampled a group's oldest token and version
    `step - 1`, on top of which the batch trains, over groups with any token of the policy; without
    such a group the keys are absent. off_policy/…: the same for each rollout, split
    at its newest token. batch/trainable: share of the rollouts in the batch that train;
    batch/empty: 1 if none does.
    """
    metrics = _scope(groups, "all", post_batch)
    for env in sorted({group.env for group in groups}):
        own = [group for group in groups if group.env == env]
        metrics |= _scope(own, env, post_batch)
        metrics[f"batch/{env}"] = len(own) / len(groups)
        by_name = _own_means([[r.metrics for r in group.rollouts] for group in own])
        metrics |= {f"metrics/{env}/{name}": fmean(values) for name, values in by_name.items()}
    stale = [
        float(max(0, step - 1 - group.version_start))
        for group in groups
        if any(rollout.versions for rollout in group.rollouts)
    ]
    if stale:
        metrics["staleness/mean"] = fmean(stale)
        metrics["staleness/max"] = max(stale)
    metrics |= _pre_filters(groups, pre_batch, filtered_out or FilterTally())
    collected = [r for group in groups for r in group.rollouts if r.collected]
    metrics |= _off_policy(collected, step)
    shipped = sum(rollout.shipped for rollout in collected)
    metrics["batch/trainable"] = shipped / len(collected) if collected else 0.0
    metrics["batch/empty"] = float(shipped == 0)
    return metrics
