"""Plain policy gradient: the reward is the advantage, without a baseline."""

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView


class Reward(Algorithm):
    """A_i = r_i, known as soon as the rollout is."""

    name = "reward"

    async def score_rollout(self, rollout: RolloutView) -> Credit:
        """The reward as credit."""
        return Credit(rollout.reward)
