"""Group-relative advantages, with optional control of length.

Source: DeepSeekMath (arXiv:2402.03300) without the division by the standard deviation, as argued
in Dr. GRPO (arXiv:2503.20783).
"""

from collections.abc import Mapping, Sequence

from ratchet.activities.scoring.algorithms import length
from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView, credits_of
from ratchet.activities.scoring.algorithms.exact import rationals, rounded
from ratchet.configs.algorithm import (
    EchoConfig,
    GroupMaxPenaltyConfig,
    GrpoConfig,
    LinearPenaltyConfig,
    TokensPenaltyConfig,
    TurnsPenaltyConfig,
)


class Grpo(Algorithm):
    """A_i = r_i - B(r), where B is the group's mean, weighted by length if the config says so."""

    name = "grpo"

    def __init__(self, config: GrpoConfig | EchoConfig, seq_len: int) -> None:
        """`seq_len`: longest training sample in tokens, the unit of the linear penalty."""
        self._config = config
        self._seq_len = seq_len

    def advantages(self, rollouts: Sequence[RolloutView]) -> list[float]:
        """Advantages [n] of the n rollouts of one group, each rounded once from its exact value.

        The linear penalty is a second term next to the first, (r_i - B(r)) + (B(p) - p_i). It is
        the same number as the folded form (r_i - p_i) - B(r - p), because B is linear and no
        rounding comes between (`exact`).
        """
        if not rollouts:
            return []
        config, penalty = self._config, self._config.length_penalty
        rewards = rationals(rollout.reward for rollout in rollouts)
        lengths = [rollout.sampled_tokens for rollout in rollouts]
        turns = [rollout.turns for rollout in rollouts]
        match penalty:
            case TokensPenaltyConfig():
                output, tool = rationals([penalty.output_weight, penalty.tool_weight])
                costs = [output * r.sampled_tokens + tool * r.tool_tokens for r in rollouts]
                return rounded(length.efficiency(rewards, costs), rewards)
            case TurnsPenaltyConfig():
                return rounded(length.efficiency(rewards, rationals(turns)), rewards)
            case GroupMaxPenaltyConfig():
                inputs = [rollout.input_tokens for rollout in rollouts]
                weights = (penalty.output_weight, penalty.input_weight, penalty.turns_weight)
                credit = length.group_max(rewards, lengths, inputs, turns, weights)
                return rounded(credit, rewards)
        by_length = lengths if config.length_weighted_baseline and any(lengths) else None
        credit = length.centred(rewards, by_length)
        if isinstance(penalty, LinearPenaltyConfig):
            terms = length.linear_term(
                rewards,
                lengths,
                coef=penalty.coef,
                seq_len=self._seq_len,
                gate_by_correctness=penalty.gate_by_correctness,
                weights=by_length,
            )
            credit = [own + term for own, term in zip(credit, terms, strict=True)]
        return rounded(credit, rewards)

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """The advantages as credit."""
        return credits_of(self.advantages(rollouts))
