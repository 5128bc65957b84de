"""Drives an algorithm's hooks by barrier, and lays advantages out over tokens.

The caller decides when a barrier is reached: `before_filters` when a group is complete,
`after_filters` once the filters have chosen.
"""

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any

from activities.scoring.algorithms.base import (
    Advantage,
    Algorithm,
    Credit,
    CreditError,
    RolloutView,
)


def _merged(old: Sequence[Credit], new: Sequence[Credit | None] | None) -> list[Credit]:
    if new is None:
        return list(old)
    return [
        was if now is None or now.advantage is None else now
        for was, now in zip(old, new, strict=True)
    ]


async def before_filters(algorithm: Algorithm, rollouts: Sequence[RolloutView]) -> list[Credit]:
    """Credit [n] of a group's rollouts [n] from `score_rollout` and then `score_group`.

    Raises CreditError if an advantage is too large for a float.
    """
    if not rollouts:
        return []
    try:
        own = await asyncio.gather(*(algorithm.score_rollout(rollout) for rollout in rollouts))
        credit = _merged([Credit()] * len(rollouts), own)
        return _merged(credit, await algorithm.score_group(rollouts))
    except OverflowError:
        rewards = [rollout.reward for rollout in rollouts]
        raise CreditError(
            f"algorithm {algorithm.name!r} has no finite advantages for the rewards {rewards}; "
            "rewards should be of moderate size"
        ) from None


async def after_filters(
    algorithm: Algorithm, rollouts: Sequence[RolloutView], credit: Sequence[Credit]
) -> list[Credit]:
    """Credit [n] of those that the filters left, given what they had before."""
    if not rollouts:
        return []
    return _merged(credit, await algorithm.score_survivors(rollouts))


def broadcast(advantage: Advantage, loss_masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """One advantage per token of each sample of a rollout; 0.0 where the policy did not sample.

    `loss_masks` has one mask [T] per sample, and the result one list [T]. A list of advantages
    has one for each sampled token, in the order of the samples. Raises CreditError if not.
    """
    if isinstance(advantage, int | float):
        return [[float(advantage) if on else 0.0 for on in mask] for mask in loss_masks]
    sampled = sum(sum(mask) for mask in loss_masks)
    if len(advantage) != sampled:
        raise CreditError(f"{len(advantage)} advantages for {sampled} sampled tokens")
    values = iter(advantage)
    streams = []
    for mask in loss_masks:
        own = islice(values, sum(mask))
        streams.append([next(own) if on else 0.0 for on in mask])
    return streams


def view(index: int, rollout: dict[str, Any]) -> RolloutView:
    """The view of a stored rollout that did not err; it copies nothing."""
    return RolloutView(
        index=index,
        reward=rollout["reward"],
        sampled_tokens=rollout["sampled_tokens"],
        turns=rollout["turns"],
        input_tokens=rollout["tokens"] - rollout["sampled_tokens"],
        rewards=rollout["rewards"],
        metrics=rollout["metrics"],
        messages=rollout["messages"],
        samples=rollout["samples"],
    )
