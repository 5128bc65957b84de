"""Numbers of one eval epoch, over the rollouts that did not err.

pass@k is the unbiased estimator of Codex (arXiv:2107.03374, section 2.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Chance that one of k attempts drawn from `attempts` is among the `correct` ones.

    1 - C(n - c, k) / C(n, k). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= attempts and 1 <= k <= attempts):
        raise ValueError(f"pass@{k} of {correct} correct in {attempts} attempts is undefined")
    return 1.0 - math.comb(attempts - correct, k) / math.comb(attempts, k)


@dataclass(frozen=True)
class EvalRollout:
    """What an eval counts of one rollout. `example` is the group it belongs to."""

    example: str
    reward: float
    sampled_tokens: int
    turns: int
    truncated: bool
    responded: bool


def pass_rates(rollouts: Sequence[EvalRollout]) -> dict[str, float]:
    """'pass@k' for k = 1, 2, 4, … up to the attempts there are, as a mean over examples.

    An example counts for the k that its valid attempts allow. {} unless every reward is 0 or 1.
    """
    if any(rollout.reward not in (0.0, 1.0) for rollout in rollouts):
        return {}
    by_example: dict[str, list[float]] = {}
    for rollout in rollouts:
        by_example.setdefault(rollout.example, []).append(rollout.reward)
    values: dict[str, list[float]] = {}
    for rewards in by_example.values():
        k = 1
        while k <= len(rewards):
            rate = pass_at_k(len(rewards), rewards.count(1.0), k)
            values.setdefault(f"pass@{k}", []).append(rate)
            k *= 2
    return {name: fmean(result) for name, result in values.items()}


def summarize(
    rollouts: Sequence[EvalRollout], errored: int, cancelled: int, group_size: int
) -> dict[str, float]:
    """Metrics over the valid `rollouts`; with none of them only the counts.

    Keys: avg@<group_size>, pass@k, completion_len/{mean,max,min} (sampled tokens of a rollout),
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
    metrics[f"avg@{group_size}"] = fmean(rollout.reward for rollout in rollouts)
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
