"""Supervised fine-tuning: another model samples the rollouts, and the policy learns from them."""

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView
from ratchet.activities.scoring.algorithms.streams import routed


class Sft(Algorithm):
    """All sampled tokens in ce with weight 1; no advantages, rewards are only recorded."""

    name = "sft"

    async def score_rollout(self, rollout: RolloutView) -> Credit:
        """Puts the sampled tokens into ce."""
        return routed("ce", rollout)
