"""Algorithms: a group's rollouts in, credit for their sampled tokens out.

One module and one class each; `build` makes the one that a config section names.
"""

from activities.scoring.algorithms.base import (
    Advantage,
    Algorithm,
    Credit,
    CreditError,
    RolloutView,
)
from activities.scoring.algorithms.custom import Custom
from activities.scoring.algorithms.driver import after_filters, before_filters, broadcast, view
from activities.scoring.algorithms.grpo import Grpo
from activities.scoring.algorithms.max_rl import MaxRl
from activities.scoring.algorithms.reward import Reward
from configs.algorithm import AlgorithmConfig, CustomConfig, GrpoConfig, MaxRlConfig

__all__ = [
    "Advantage",
    "Algorithm",
    "Credit",
    "CreditError",
    "Custom",
    "Grpo",
    "MaxRl",
    "Reward",
    "RolloutView",
    "after_filters",
    "before_filters",
    "broadcast",
    "build",
    "default",
    "view",
]


def default() -> Algorithm:
    """Plain group-relative advantages."""
    return Grpo(GrpoConfig(), seq_len=1)


def build(config: AlgorithmConfig, *, seq_len: int) -> Algorithm:
    """The algorithm of a config section. `seq_len`: longest training sample in tokens.

    Raises CreditError if a user's function cannot be had.
    """
    match config:
        case GrpoConfig():
            return Grpo(config, seq_len)
        case MaxRlConfig():
            return MaxRl()
        case CustomConfig():
            return Custom(config)
        case _:
            return Reward()
