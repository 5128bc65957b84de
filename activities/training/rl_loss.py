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
"""Where the sequences of a micro-batch lie: (row, start, stop)."""

RlLoss = Callable[[LossInputs, Spans], LossTerms]
"""The terms of a micro-batch, given its inputs [B, T] and spans."""


def build(config: LossConfig) -> RlLoss:
    """The component that a config section names; raises ValueError if it cannot be had."""
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
