"""Metrics of a batch's rollouts, in which each rollout weighs the same: of all, and of those that
train.

Keys are 'train/<scope>/<subset>/<metric>/<statistic>'. A scope is 'agg', all envs together, or an
env's name. The subset 'all' holds every rollout of the batch's groups that did not err, also those
that filters removed; 'effective' holds those that train. A subset without rollouts has no keys.
Statistics are mean, max, min, p10 and p90; rates and shares have none.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from ratchet.activities.contracts.quantiles import quantile
from ratchet.activities.scoring.batches import BatchGroup, BatchRollout, solve_rates, stop_shares

AGGREGATE = "agg"
"""The scope of all envs together; no env may have this name."""

_SUBSETS: dict[str, Callable[[BatchRollout], bool]] = {
    "all": lambda _: True,
    "effective": lambda rollout: rollout.shipped,
}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": fmean(values),
        "max": float(max(values)),
        "min": float(min(values)),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
    }


def _values(rollouts: Sequence[BatchRollout]) -> dict[str, list[float]]:
    """For each metric the values of the rollouts that have it; only timing may be missing in some.

    Lengths are in tokens, times in seconds.
    """
    values: dict[str, list[float]] = {
        "reward": [r.reward for r in rollouts],
        "seq_len": [float(r.seq_len) for r in rollouts],
        "prefill_len": [float(r.seq_len - r.decode_len) for r in rollouts],
        "decode_len": [float(r.decode_len) for r in rollouts],
        "num_turns": [float(r.turns) for r in rollouts],
        "is_truncated": [float(r.truncated) for r in rollouts],
        "samples_per_rollout": [float(r.samples) for r in rollouts],
    }
    for rollout in rollouts:
        for phase, seconds in rollout.timing.items():
            values.setdefault(f"timing/{phase}", []).append(seconds)
    return values


def _subset(
    groups: Sequence[BatchGroup], belongs: Callable[[BatchRollout], bool]
) -> dict[str, float]:
    """Metrics of one subset, without the keys' first parts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts if belongs(rollout)]
    if not rollouts:
        return {}
    metrics = {
        f"{name}/{statistic}": value
        for name, values in _values(rollouts).items()
        for statistic, value in _spread(values).items()
    }
    shares = stop_shares(rollouts)
    metrics |= {f"stop_condition/{condition}": share for condition, share in shares.items()}
    return metrics | solve_rates([g for g in groups if any(belongs(r) for r in g.rollouts)])


def summarize(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """Metrics of a batch's groups, in every scope and subset.

    stop_condition/<condition>: share of the subset's rollouts. solve_none, solve_all and
    effective_batch_size: shares of the groups that have a rollout in the subset, each group judged
    by all its rollouts that did not err.
    """
    scopes = {AGGREGATE: list(groups)}
    for group in groups:
        assert group.env != AGGREGATE
        scopes.setdefault(group.env, []).append(group)
    return {
        f"train/{scope}/{subset}/{name}": value
        for scope, own in scopes.items()
        for subset, belongs in _SUBSETS.items()
        for name, value in _subset(own, belongs).items()
    }


_REWARDS = re.compile(r"train/(?P<env>[^/]+)/all/reward/min")


def rewards_outside(
    metrics: Mapping[str, float], low: float, high: float
) -> dict[str, tuple[float, float]]:
    """Lowest and highest reward of each env in which one of them is outside of [low, high], from
    the result of `summarize`.
    """
    result = {}
    for name, least in metrics.items():
        if (found := _REWARDS.fullmatch(name)) and found["env"] != AGGREGATE:
            most = metrics[name.removesuffix("min") + "max"]
            if least < low or most > high:
                result[found["env"]] = (least, most)
    return result
