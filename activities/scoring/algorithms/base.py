"""What an algorithm is: a class with three hooks that turn rollouts into credit.

Each hook waits for more than the one before: `score_rollout` for one rollout, `score_group` for
all that its group will have, `score_survivors` for the filters. A hook returns credit, or None to
leave what is there; what a later one returns replaces it. To add an algorithm, write a module
here with one class, a config class in `configs/algorithm.py`, and a line in `build`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

TOOL_TOKENS = "total_tool_response_tokens"

Advantage = float | Sequence[float]
"""One number for a whole rollout, or one per token that its policy sampled."""


class CreditError(ValueError):
    """Credit cannot be had from these rollouts with this config; the message is for the user."""


@dataclass(frozen=True)
class RolloutView:
    """One rollout that did not err, as algorithms see it. Lengths are in tokens.

    `index` is its place in the group. `rewards` and `metrics` are the env's, by name; `reward` is
    what counts. A rollout may have several samples (branches): `sampled_tokens` (L) and
    `input_tokens` (the rest) are over all of them, as are `token_ids` and `logprobs` [L], which
    hold the sampled tokens alone, in sample order. `messages` are the last branch's.
    """

    index: int
    reward: float
    sampled_tokens: int
    turns: int = 1
    input_tokens: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @property
    def tool_tokens(self) -> int:
        """Tokens of tool responses, by the metric '…total_tool_response_tokens'; else 0."""
        for name, value in self.metrics.items():
            if name.endswith(TOOL_TOKENS) and math.isfinite(value):
                return int(value)
        return 0

    @property
    def token_ids(self) -> list[int]:
        """Ids of the sampled tokens [L]."""
        return cast("list[int]", self._sampled("token_ids"))

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities (nats) that the engine sampled them with [L]."""
        return cast("list[float]", self._sampled("logprobs"))

    def _sampled(self, stream: str) -> list[Any]:
        return [
            value
            for sample in self.samples
            for value, on in zip(sample[stream], sample["loss_mask"], strict=True)
            if on
        ]


@dataclass(frozen=True)
class Credit:
    """What a rollout gets; None: this hook says nothing about it."""

    advantage: Advantage | None = None


class Algorithm:
    """Credit for the rollouts of one env. Hooks do nothing unless overridden.

    Raises CreditError where credit cannot be had.
    """

    name: ClassVar[str]

    async def score_rollout(self, rollout: RolloutView) -> Credit | None:
        """Credit that needs nothing but the rollout itself."""
        return None

    async def score_group(self, rollouts: Sequence[RolloutView]) -> Sequence[Credit] | None:
        """Credit [n] from all n > 0 rollouts of a group that did not err, before filters."""
        return None

    async def score_survivors(self, rollouts: Sequence[RolloutView]) -> Sequence[Credit] | None:
        """Credit [n] of the n > 0 rollouts of a group that the filters left."""
        return None


def credits_of(advantages: Sequence[Advantage]) -> list[Credit]:
    """Credit [n] that consists of advantages [n]."""
    return [Credit(advantage) for advantage in advantages]
