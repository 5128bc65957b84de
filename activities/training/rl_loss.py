"""The rl component of the loss that [trainer.loss] names.

`docs/extending.md` says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratchet.activities.training.custom_loss import load_function
from ratchet.activities.training.loss import LossInputs, LossTerms, custom_terms, rl_terms
from ratchet.configs.trainer import (
    CustomLossConfig,
    DefaultLossConfig,
    IpoLossConfig,
    LossConfig,
)

Spans = Sequence[tuple[int, int, int]]
"""The places of a micro-batch's sequences: (row, start, stop)."""

RlLoss = Callable[[LossInputs, Spans], LossTerms]
"""Computes the terms of a micro-batch from its inputs [B, T] and spans."""


def build(config: LossConfig) -> RlLoss:
    """The component that a config section names; raises ValueError if it cannot be imported."""
    match config:
        case DefaultLossConfig() | IpoLossConfig():
            return lambda inputs, spans: rl_terms(
                inputs.trainer_logprobs,
                inputs.engine_logprobs,
                inputs.advantages,
                inputs.loss_mask,
                config,
                inputs.rl_weights,
            )
        case CustomLossConfig():
            function = load_function(config)
            return lambda inputs, spans: custom_terms(inputs, function, config, spans)
