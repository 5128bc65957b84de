"""Group-relative advantages for several agents: each is compared with its own kind."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, RolloutView, per_agent
from ratchet.activities.scoring.algorithms.exact import rounded
from ratchet.activities.scoring.algorithms.length import centred
from ratchet.configs.algorithm import HierarchicalGrpoConfig


class HierarchicalGrpo(Algorithm):
    """A = r - mean(r), over the agent's traces in the whole group, or for `episode_agents` in the
    episode. With a single agent, which is not among those, it is plain grpo.
    """

    name = "hierarchical_grpo"

    def __init__(self, config: HierarchicalGrpoConfig) -> None:
        self._episode_agents = frozenset(config.episode_agents)

    def advantages(self, rollouts: Sequence[RolloutView]) -> list[list[float]]:
        """Advantages of the agents of each of n rollouts [n], each rounded once."""
        peers: dict[tuple[str, int | None], list[Fraction]] = {}
        for rollout in rollouts:
            for trace in rollout.agents:
                peers.setdefault(self._key(rollout, trace.agent), []).append(Fraction(trace.reward))
        # In order of the traces, as `peers` was filled.
        left = {key: iter(rounded(centred(own), own)) for key, own in peers.items()}
        return [
            [next(left[self._key(rollout, trace.agent)]) for trace in rollout.agents]
            for rollout in rollouts
        ]

    def _key(self, rollout: RolloutView, agent: str) -> tuple[str, int | None]:
        """The peers of an agent: its role in this episode, or (None) in the group."""
        return agent, rollout.index if agent in self._episode_agents else None

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """The advantages as credit."""
        result = self.advantages(rollouts)
        return [Credit(per_agent(r, own)) for r, own in zip(rollouts, result, strict=True)]
