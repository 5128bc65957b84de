"""MaxRL (arXiv:2602.02710): the rarer success is, the more it counts."""

from collections.abc import Mapping, Sequence

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView, credits_of
from ratchet.activities.scoring.algorithms.exact import mean, rationals, rounded
from ratchet.activities.scoring.algorithms.length import centred


class MaxRl(Algorithm):
    """A_i = (r_i - mean(r)) / mean(r); 0 for all if the mean is not positive."""

    name = "max_rl"

    def advantages(self, rollouts: Sequence[RolloutView]) -> list[float]:
        """Advantages [n] of the n rollouts of one group, each rounded once from its exact value."""
        if not rollouts:
            return []
        rewards = rationals(rollout.reward for rollout in rollouts)
        middle = mean(rewards)
        if middle <= 0:
            return [0.0] * len(rewards)
        relative = [reward / middle for reward in rewards]
        return rounded(centred(relative), relative)

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """The advantages as credit."""
        return credits_of(self.advantages(rollouts))
