"""Role-conditioned advantage estimation: each agent against its own past (arXiv:2506.24119)."""

from collections.abc import Mapping, Sequence

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView, per_agent
from ratchet.configs.algorithm import START, RaeConfig


class Rae(Algorithm):
    """A = r - b, where b is a moving average of the agent's rewards before this one.

    Within a group the average moves from rollout to rollout, in order. It starts from a snapshot:
    groups that are scored at the same time do not see each other's rewards.
    """

    name = "rae"

    def __init__(self, config: RaeConfig) -> None:
        self._config = config

    def observed(self, rollouts: Sequence[RolloutView]) -> dict[str, list[float]]:
        """Rewards by agent, in rollout order."""
        result: dict[str, list[float]] = {}
        for rollout in rollouts:
            for trace in rollout.agents:
                result.setdefault(trace.agent, []).append(trace.reward)
        return result

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """Advantages of each agent's rewards, one after the other."""
        left = {
            agent: iter(self._config.advance(state.get(agent, START), rewards)[0])
            for agent, rewards in self.observed(rollouts).items()
        }
        return [
            Credit(per_agent(rollout, [next(left[trace.agent]) for trace in rollout.agents]))
            for rollout in rollouts
        ]
