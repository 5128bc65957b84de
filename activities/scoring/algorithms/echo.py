"""Group-relative advantages, plus cross-entropy on the env's messages.

A policy that can predict its env's replies models the env. Such tokens are present in every
rollout, whatever its reward. They weigh little, so that they do not dominate the rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.activities.scoring.algorithms.base import Credit, CreditError, RolloutView
from ratchet.activities.scoring.algorithms.grpo import Grpo
from ratchet.activities.scoring.algorithms.streams import routed
from ratchet.configs.algorithm import EchoConfig


class Echo(Grpo):
    """grpo's advantages; ce_weights are alpha on the text of messages of a learned role.

    Only messages after the policy's first reply are learned, and only their text, without the
    template around it.
    """

    name = "echo"

    def __init__(self, config: EchoConfig, seq_len: int) -> None:
        """`seq_len`: longest training sample in tokens, the unit of the linear penalty."""
        super().__init__(config, seq_len)
        self._alphas = {role: about.alpha for role, about in config.roles.items()}

    def _weights(self, sample: Mapping[str, Any]) -> list[float]:
        """alpha on the tokens [T] of a sample that are learned, else 0.0."""
        spans = sample.get("observations")
        if spans is None:
            raise CreditError(
                "algorithm 'echo' learns from the env's messages, and the renderer does not "
                "distinguish them from the template around them; set model.renderer to one made "
                "for the model, such as 'ratchet-chatml' for ChatML tokenizers"
            )
        weights = [0.0] * len(sample["token_ids"])
        for role, start, stop in spans:
            weights[start:stop] = [self._alphas.get(role, 0.0)] * (stop - start)
        return weights

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """Advantages, and weights on the env's messages."""
        credit = []
        for rollout, own in zip(rollouts, await super().score_group(rollouts, state), strict=True):
            weights = [self._weights(sample) for sample in rollout.samples]
            learned = weights if any(map(any, weights)) else None
            credit.append(replace(routed("rl", rollout, learned), advantage=own.advantage))
        return credit
