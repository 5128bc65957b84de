"""Moving averages of rewards, as the RAE algorithm and the workflow that keeps them fold them.

A baseline b begins at 0. A reward r gets the advantage r - b, and then moves the baseline to
decay * b + (1 - decay) * r. Pure functions: the activity that scores a group starts from a
snapshot, and the workflow folds the rewards of groups in the order in which they are delivered.
"""

from collections.abc import Mapping, Sequence

START = 0.0


def advance(baseline: float, rewards: Sequence[float], decay: float) -> tuple[list[float], float]:
    """Advantages [n] of rewards [n] in order, and the baseline after them; `decay` in [0, 1)."""
    advantages = []
    for reward in rewards:
        advantages.append(reward - baseline)
        baseline = decay * baseline + (1.0 - decay) * reward
    return advantages, baseline


def fold(
    baselines: Mapping[str, float], observed: Mapping[str, Sequence[float]], decay: float
) -> dict[str, float]:
    """The baselines, by agent, after the rewards that were observed of each agent, in order."""
    return {
        **baselines,
        **{
            agent: advance(baselines.get(agent, START), rewards, decay)[1]
            for agent, rewards in observed.items()
        },
    }
