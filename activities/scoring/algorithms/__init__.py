"""Algorithms: a group's rollouts in, credit for their sampled tokens out.

One module and one class each; `build` makes the one that a config section names.
"""

from ratchet.activities.scoring.algorithms.base import (
    Algorithm,
    Credit,
    CreditError,
    Reference,
    Render,
    RolloutView,
    TraceView,
)
from ratchet.activities.scoring.algorithms.custom import Custom
from ratchet.activities.scoring.algorithms.driver import (
    after_filters,
    before_filters,
    lay_out,
    view,
)
from ratchet.activities.scoring.algorithms.echo import Echo
from ratchet.activities.scoring.algorithms.grpo import Grpo
from ratchet.activities.scoring.algorithms.hierarchical_grpo import HierarchicalGrpo
from ratchet.activities.scoring.algorithms.max_rl import MaxRl
from ratchet.activities.scoring.algorithms.opd import Opd
from ratchet.activities.scoring.algorithms.opsd import Opsd
from ratchet.activities.scoring.algorithms.rae import Rae
from ratchet.activities.scoring.algorithms.reward import Reward
from ratchet.activities.scoring.algorithms.sft import Sft
from ratchet.configs.algorithm import (
    AlgorithmConfig,
    CustomConfig,
    EchoConfig,
    GrpoConfig,
    HierarchicalGrpoConfig,
    MaxRlConfig,
    OpdConfig,
    OpsdConfig,
    RaeConfig,
    RewardConfig,
    SftConfig,
)

__all__ = [
    "Algorithm",
    "Credit",
    "CreditError",
    "Echo",
    "Grpo",
    "HierarchicalGrpo",
    "MaxRl",
    "Rae",
    "Reference",
    "Render",
    "RolloutView",
    "TraceView",
    "after_filters",
    "before_filters",
    "build",
    "lay_out",
    "view",
]


def build(
    config: AlgorithmConfig,
    *,
    seq_len: int,
    reference: Reference | None = None,
    render: Render | None = None,
) -> Algorithm:
    """The algorithm of a config section. `seq_len`: longest training sample in tokens.

    `reference` is the model that `ratchet.configs.algorithm.teacher_of` names, required if it names
    one; `render` turns messages into the policy's prompts, required for 'opsd'. Raises CreditError
    if a user's function cannot be imported.
    """
    match config:
        case GrpoConfig():
            return Grpo(config, seq_len)
        case MaxRlConfig():
            return MaxRl()
        case HierarchicalGrpoConfig():
            return HierarchicalGrpo(config)
        case RewardConfig():
            return Reward()
        case RaeConfig():
            return Rae(config)
        case EchoConfig():
            return Echo(config, seq_len)
        case OpdConfig():
            assert reference is not None, "opd needs its teacher"
            return Opd(config, reference, seq_len)
        case OpsdConfig():
            assert reference is not None and render is not None, "opsd needs teacher and renderer"
            return Opsd(config, reference, render, seq_len)
        case SftConfig():
            return Sft()
        case CustomConfig():
            return Custom(config)
