"""Assigns tokens of a rollout to components of the loss."""

from collections.abc import Sequence
from typing import Literal

from ratchet.activities.scoring.algorithms.base import Credit, RolloutView, Streams

Component = Literal["rl", "ce", "ref_kl"]


def on_sampled(weight: float, loss_masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """`weight` on sampled tokens and 0.0 elsewhere; one list [T] per mask [T]."""
    return [[weight if on else 0.0 for on in mask] for mask in loss_masks]


def routed(component: Component, rollout: RolloutView, ce_weights: Streams | None = None) -> Credit:
    """Credit that puts the sampled tokens of a rollout into one component, with weight 1.

    `ce_weights` are those of tokens that the policy did not sample; they are kept as well.
    """
    masks = rollout.loss_masks
    if component == "rl":
        return Credit(ce_weights=ce_weights)
    own = on_sampled(1.0, masks)
    if component == "ref_kl":
        return Credit(rl=False, ref_kl_weights=own, ce_weights=ce_weights)
    if ce_weights is None:
        return Credit(rl=False, ce_weights=own)
    merged = [
        [1.0 if on else weight for on, weight in zip(mask, weights, strict=True)]
        for mask, weights in zip(masks, ce_weights, strict=True)
    ]
    return Credit(rl=False, ce_weights=merged)
