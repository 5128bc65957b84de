"""Curricula: which example of a training env comes next, and which of its groups may train.

A `sampler` chooses examples, `gates` judge finalized groups; both are an env's own.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.configs.base import Section, choose_by_type


class StandardSamplerConfig(Section):
    """Cycles through the shuffled dataset: every example once per epoch."""

    type: Literal["standard"] = "standard"


class DifficultyPoolConfig(Section):
    """Draws examples with replacement, each as often as the weight of its pool.

    An example is in the pool of the lowest threshold that its latest group's mean reward does not
    exceed (all three are inclusive); before its first group it is unseen.
    """

    type: Literal["difficulty_pool"] = "difficulty_pool"
    hard_below: float = Field(
        default=0.25, allow_inf_nan=False, description="Highest mean reward of a hard example."
    )
    normal_below: float = Field(
        default=0.75, allow_inf_nan=False, description="Highest mean reward of a normal example."
    )
    easy_below: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Highest mean reward expected of an easy example; since no pool lies above, "
        "higher ones are easy too.",
    )
    hard_weight: float = Field(default=0.2, ge=0, le=1000, description="Weight of a hard example.")
    normal_weight: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of a normal example."
    )
    easy_weight: float = Field(default=0.2, ge=0, le=1000, description="Weight of an easy example.")
    unseen_weight: float = Field(
        default=1.0, ge=0, le=1000, description="Weight of an example without a finalized group."
    )

    @model_validator(mode="after")
    def _check(self) -> "DifficultyPoolConfig":
        if not self.hard_below < self.normal_below < self.easy_below:
            raise ValueError(
                f"hard_below ({self.hard_below}), normal_below ({self.normal_below}) and "
                f"easy_below ({self.easy_below}) must increase in this order; to leave a pool out, "
                "set its weight to 0"
            )
        if not self.unseen_weight:
            raise ValueError(
                "unseen_weight is 0, but every example is unseen until it has been drawn; set a "
                "weight, however small, or use sampler 'standard'"
            )
        return self


class AdvantageRangeConfig(Section):
    """Rejects a group whose sampled tokens all have an advantage within a closed range."""

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: float = Field(
        default=0.0, allow_inf_nan=False, description="Lowest advantage of the range."
    )
    reject_max: float = Field(
        default=0.0, allow_inf_nan=False, description="Highest advantage of the range."
    )

    @model_validator(mode="after")
    def _check(self) -> "AdvantageRangeConfig":
        if self.reject_min > self.reject_max:
            raise ValueError(
                f"reject_min ({self.reject_min}) is above reject_max ({self.reject_max}), so that "
                "nothing would be rejected; swap them, or remove the gate"
            )
        return self


SamplerConfig = Annotated[
    StandardSamplerConfig | DifficultyPoolConfig,
    Field(discriminator="type"),
    BeforeValidator(choose_by_type("sampler", StandardSamplerConfig, DifficultyPoolConfig)),
]

# A union of one has no discriminator: choose_by_type handles the gates.
GateConfig = Annotated[
    AdvantageRangeConfig, BeforeValidator(choose_by_type("gate", AdvantageRangeConfig))
]


class CurriculumConfig(Section):
    """The curriculum of a training env; by default every example in turn, and every group."""

    sampler: SamplerConfig = Field(
        default_factory=StandardSamplerConfig, description="Chooses the examples."
    )
    gates: list[GateConfig] = Field(
        default_factory=list,
        description="A group trains if all of them admit it; more groups are dispatched to "
        "replace rejected ones.",
    )
