"""Drives an algorithm's hooks by barrier, and lays credit out over tokens.

The caller decides when a barrier is reached: `before_filters` when a group is complete,
`after_filters` once the filters have chosen.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from ratchet.activities.scoring.algorithms.base import (
    Advantage,
    Algorithm,
    Credit,
    CreditError,
    RolloutView,
    TraceView,
)


def _merged(old: Sequence[Credit], new: Sequence[Credit | None] | None) -> list[Credit]:
    """Credit [n] of `old`, with the fields that `new` sets replaced."""
    if new is None:
        return list(old)
    merged = []
    for was, now in zip(old, new, strict=True):
        said = {} if now is None else {each.name: getattr(now, each.name) for each in fields(now)}
        merged.append(replace(was, **{name: v for name, v in said.items() if v is not None}))
    return merged


async def before_filters(
    algorithm: Algorithm,
    rollouts: Sequence[RolloutView],
    state: Mapping[str, float] | None = None,
) -> list[Credit]:
    """Credit [n] of a group's rollouts [n] from `score_rollout` and then `score_group`.

    `state` is the snapshot for `score_group`; none: nothing was observed yet. Raises CreditError if
    an advantage is too large for a float.
    """
    if not rollouts:
        return []
    try:
        own = await asyncio.gather(*(algorithm.score_rollout(rollout) for rollout in rollouts))
        credit = _merged([Credit()] * len(rollouts), own)
        return _merged(credit, await algorithm.score_group(rollouts, state or {}))
    except OverflowError:
        rewards = [rollout.reward for rollout in rollouts]
        raise CreditError(
            f"algorithm {algorithm.name!r} has no finite advantages for the rewards {rewards}; "
            "use rewards of moderate size"
        ) from None


async def after_filters(
    algorithm: Algorithm, rollouts: Sequence[RolloutView], credit: Sequence[Credit]
) -> list[Credit]:
    """Credit [n] of the rollouts that the filters left, from their credit before.

    Raises CreditError if a rollout is a member of the rl component and has no advantage: 0.0 would
    silently train nothing.
    """
    if not rollouts:
        return []
    final = _merged(credit, await algorithm.score_survivors(rollouts))
    for rollout, own in zip(rollouts, final, strict=True):
        if own.advantage is None and own.rl is not False and rollout.sampled_tokens:
            raise CreditError(
                f"algorithm {algorithm.name!r} gives rollout {rollout.index} no advantage, and its "
                "tokens are members of the rl component; return Credit(advantage=...), or "
                "Credit(rl=False) to keep them out of it"
            )
    return final


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


def lay_out(
    credit: Credit, loss_masks: Sequence[Sequence[bool]]
) -> list[dict[str, list[float] | None]]:
    """The streams of each sample of a rollout by name, one number per token; None: absent.

    `loss_masks` has one mask [T] per sample. Raises CreditError as `broadcast` does.
    """
    advantage = credit.advantage
    absent = [None] * len(loss_masks)
    off = [[0.0] * len(mask) for mask in loss_masks]
    streams: dict[str, Sequence[Sequence[float] | None]] = {
        "advantages": absent if advantage is None else broadcast(advantage, loss_masks),
        "rl_weights": off if credit.rl is False else absent,
        "ce_weights": credit.ce_weights or absent,
        "ref_kl_weights": credit.ref_kl_weights or absent,
        "ref_logprobs": credit.ref_logprobs or absent,
    }
    laid: list[dict[str, list[float] | None]] = [{} for _ in loss_masks]
    for name, lists in streams.items():
        assert len(lists) == len(loss_masks), f"{name} has not one list per sample"
        for out, values, mask in zip(laid, lists, loss_masks, strict=True):
            assert values is None or len(values) == len(mask), f"{name} is not aligned with tokens"
            out[name] = None if values is None else list(values)
    return laid


def view(
    index: int, rollout: Mapping[str, Any], task: Mapping[str, Any] | None = None
) -> RolloutView:
    """The view of a stored rollout that did not err; it copies no tokens."""
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
        prompts=rollout.get("prompts", ()),
        traces=[TraceView(**trace) for trace in rollout.get("traces", ())],
        task=task or {},
    )
