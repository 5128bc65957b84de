"""Rollout-side metrics of one training batch.

A statistic is the mean, max or min over groups of each group's own mean, so that every problem
weighs the same. Keys are '<metric>/<scope>/<statistic>', where scope is 'all' or an env's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class BatchRollout:
    """What a batch counts of one rollout that can train. Lengths are in tokens."""

    reward: float
    seq_len: int
    decode_len: int
    turns: int
    truncated: bool
    samples: int
    advantage: float


@dataclass(frozen=True)
class BatchGroup:
    """One group of a batch: its survivors, and how many of `size` erred."""

    env: str
    size: int
    errored: int
    version_start: int
    rollouts: Sequence[BatchRollout]


def _scope(groups: Sequence[BatchGroup], scope: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    full = [group for group in groups if group.rollouts]
    size = sum(group.size for group in groups)
    metrics[f"errored/{scope}/mean"] = sum(group.errored for group in groups) / size
    if not full:
        return metrics
    means = {
        "reward": [fmean(r.reward for r in group.rollouts) for group in full],
        "seq_len": [fmean(r.seq_len for r in group.rollouts) for group in full],
        "decode_len": [fmean(r.decode_len for r in group.rollouts) for group in full],
        "num_turns": [fmean(r.turns for r in group.rollouts) for group in full],
        "is_truncated": [fmean(r.truncated for r in group.rollouts) for group in full],
        "samples_per_rollout": [fmean(r.samples for r in group.rollouts) for group in full],
    }
    for name, values in means.items():
        metrics[f"{name}/{scope}/mean"] = fmean(values)
        metrics[f"{name}/{scope}/max"] = max(values)
        metrics[f"{name}/{scope}/min"] = min(values)
    sums = [sum(r.reward for r in group.rollouts) for group in full]
    none = fmean(total == 0 for total in sums)
    solved = fmean(total == group.size for total, group in zip(sums, full, strict=True))
    metrics[f"solve_none/{scope}"] = none
    metrics[f"solve_all/{scope}"] = solved
    metrics[f"effective_batch_size/{scope}"] = 1.0 - none - solved
    rollouts = [rollout for group in full for rollout in group.rollouts]
    metrics[f"zero_advantage/{scope}"] = fmean(r.advantage == 0.0 for r in rollouts)
    return metrics


def summarize(groups: Sequence[BatchGroup], step: int) -> dict[str, float]:
    """Metrics of the batch of `step`.

    staleness/{mean,max}: versions between what sampled a group's oldest token and version
    `step - 1`, which the batch trains on top of.
    """
    metrics = _scope(groups, "all")
    for env in sorted({group.env for group in groups}):
        own = [group for group in groups if group.env == env]
        metrics |= _scope(own, env)
        metrics[f"batch/{env}"] = len(own) / len(groups)
    stale = [float(max(0, step - 1 - group.version_start)) for group in groups]
    metrics["staleness/mean"] = fmean(stale)
    metrics["staleness/max"] = max(stale)
    return metrics
