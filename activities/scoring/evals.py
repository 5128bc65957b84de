"""Metrics of one eval epoch, over the rollouts that did not err."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ratchet.activities.contracts.eval_stats import Estimate, estimate, pass_at_k


@dataclass(frozen=True)
class EvalRollout:
    """What metrics need of one rollout. `example` is its group."""

    example: str
    reward: float
    sampled_tokens: int
    turns: int
    truncated: bool
    responded: bool


def by_example(rollouts: Sequence[EvalRollout]) -> dict[str, list[float]]:
    """The rewards of each example that has one."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.example, []).append(rollout.reward)
    return rewards


def _named(name: str, value: Estimate) -> dict[str, float]:
    bounds = {"low": value.low, "high": value.high}
    known = {f"{name}/{end}": bound for end, bound in bounds.items() if bound is not None}
    return {name: value.mean, **known}


def pass_rates(rollouts: Sequence[EvalRollout]) -> dict[str, float]:
    """'pass@k' for k = 1, 2, 4, … up to the number of attempts, as a mean over examples, with the
    bounds of its interval.

    An example counts for the k that its valid attempts allow. {} unless every reward is 0 or 1.
    """
    if any(rollout.reward not in (0.0, 1.0) for rollout in rollouts):
        return {}
    values: dict[str, list[list[float]]] = {}
    for rewards in by_example(rollouts).values():
        k = 1
        while k <= len(rewards):
            rate = pass_at_k(len(rewards), rewards.count(1.0), k)
            values.setdefault(f"pass@{k}", []).append([rate])
            k *= 2
    named = [_named(name, estimate(rates)) for name, rates in values.items()]
    return {name: value for metrics in named for name, value in metrics.items()}


def summarize(
    rollouts: Sequence[EvalRollout], errored: int, cancelled: int, group_size: int
) -> dict[str, float]:
    """Metrics over the valid `rollouts`; with none of them only the counts.

    Keys: avg@<group_size>, pass@k, each with /low and /high where its 95 % interval is known
    (`contracts.eval_stats`), completion_len/{mean,max,min} (sampled tokens of a rollout),
    num_turns/{mean,max,min}, is_truncated/mean, no_response/mean, valid_count, errored_count,
    cancelled_count, valid_rate (of all rollouts of the eval).
    """
    metrics = {
        "valid_count": float(len(rollouts)),
        "errored_count": float(errored),
        "cancelled_count": float(cancelled),
        "valid_rate": len(rollouts) / max(len(rollouts) + errored + cancelled, 1),
    }
    if not rollouts:
        return metrics
    metrics |= _named(f"avg@{group_size}", estimate([*by_example(rollouts).values()]))
    metrics |= pass_rates(rollouts)
    lengths = [float(rollout.sampled_tokens) for rollout in rollouts]
    turns = [float(rollout.turns) for rollout in rollouts]
    for name, values in (("completion_len", lengths), ("num_turns", turns)):
        metrics[f"{name}/mean"] = fmean(values)
        metrics[f"{name}/max"] = max(values)
        metrics[f"{name}/min"] = min(values)
    metrics["is_truncated/mean"] = fmean(rollout.truncated for rollout in rollouts)
    metrics["no_response/mean"] = fmean(not rollout.responded for rollout in rollouts)
    return metrics
