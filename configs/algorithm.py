"""Algorithms: how the rewards of a group become credit for its sampled tokens.

One class per `type`, whose defaults are its vetted setting. An env's `algo` replaces the run's as
a whole. What a section holds that only makes sense together is checked here; what needs other
sections (group sizes) is checked by `RunConfig`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from configs.base import FunctionSection, Section, choose_by_type


def _not_all_zero(weights: dict[str, float]) -> None:
    if not any(weights.values()):
        named = " and ".join(weights)
        raise ValueError(f"{named} are all 0, which penalizes nothing; leave length_penalty out")


class TokensPenaltyConfig(Section):
    """Efficiency shaping by tokens: of the best rollouts, the cheaper ones earn up to double."""

    type: Literal["tokens"] = "tokens"
    output_weight: float = Field(default=1.0, ge=0, description="Cost of one sampled token.")
    tool_weight: float = Field(
        default=1.0,
        ge=0,
        description="Cost of one token of a tool's response, as counted by the env's metric "
        "whose name ends with 'total_tool_response_tokens'.",
    )

    @model_validator(mode="after")
    def _check(self) -> "TokensPenaltyConfig":
        _not_all_zero({"output_weight": self.output_weight, "tool_weight": self.tool_weight})
        return self


class TurnsPenaltyConfig(Section):
    """Efficiency shaping by turns: of the best rollouts, the shorter ones earn up to double."""

    type: Literal["turns"] = "turns"


class LinearPenaltyConfig(Section):
    """A penalty that grows with the sampled tokens and with how well the group did."""

    type: Literal["linear"] = "linear"
    coef: float = Field(
        default=0.25,
        gt=0,
        le=100,
        description="Penalty of a rollout as long as trainer.seq_len in a group of mean reward 1.",
    )
    gate_by_correctness: bool = Field(
        default=False, description="Multiply a rollout's penalty by its reward."
    )


class GroupMaxPenaltyConfig(Section):
    """Sampled tokens, input tokens and turns, each relative to the group's largest."""

    type: Literal["group_max"] = "group_max"
    output_weight: float = Field(default=0.25, ge=0, description="Weight of sampled tokens.")
    input_weight: float = Field(default=0.1, ge=0, description="Weight of tokens not sampled.")
    turns_weight: float = Field(default=0.1, ge=0, description="Weight of turns.")

    @model_validator(mode="after")
    def _check(self) -> "GroupMaxPenaltyConfig":
        names = ("output_weight", "input_weight", "turns_weight")
        _not_all_zero({name: getattr(self, name) for name in names})
        return self


LengthPenaltyConfig = Annotated[
    TokensPenaltyConfig | TurnsPenaltyConfig | LinearPenaltyConfig | GroupMaxPenaltyConfig,
    Field(discriminator="type"),
    BeforeValidator(
        choose_by_type(
            "length penalty",
            TokensPenaltyConfig,
            TurnsPenaltyConfig,
            LinearPenaltyConfig,
            GroupMaxPenaltyConfig,
        )
    ),
]


class GrpoConfig(Section):
    """Reward minus the group's mean (arXiv:2402.03300, without the division by the deviation)."""

    group_relative: ClassVar[bool] = True

    type: Literal["grpo"] = "grpo"
    length_penalty: LengthPenaltyConfig | None = Field(
        default=None, description="Makes long rollouts earn less; none: length does not matter."
    )
    length_weighted_baseline: bool = Field(
        default=False, description="The group's mean weighs each rollout by its sampled tokens."
    )

    @model_validator(mode="after")
    def _check(self) -> "GrpoConfig":
        penalty = self.length_penalty
        replaces = penalty is not None and not isinstance(penalty, LinearPenaltyConfig)
        if self.length_weighted_baseline and replaces:
            assert penalty is not None
            raise ValueError(
                f"length_penalty {penalty.type!r} brings its own baseline, so that "
                "length_weighted_baseline would not be heard; drop one of them, or use "
                "length_penalty 'linear'"
            )
        return self


class MaxRlConfig(Section):
    """Reward minus the group's mean, divided by that mean (arXiv:2602.02710)."""

    group_relative: ClassVar[bool] = True

    type: Literal["max_rl"] = "max_rl"


class RewardConfig(Section):
    """The reward as it is; rollouts are not compared with each other."""

    group_relative: ClassVar[bool] = False

    type: Literal["reward"] = "reward"


class CustomConfig(FunctionSection):
    """A function of yours that is given a group's rollouts and returns their advantages."""

    group_relative: ClassVar[bool] = False

    type: Literal["custom"] = "custom"
    function: str = Field(
        description="'module:function'; it takes a list of rollout views, and `kwargs`, and "
        "returns for each rollout one number or a list with one number per sampled token."
    )


AlgorithmConfig = Annotated[
    GrpoConfig | MaxRlConfig | RewardConfig | CustomConfig,
    Field(discriminator="type"),
    BeforeValidator(
        choose_by_type("algorithm", GrpoConfig, MaxRlConfig, RewardConfig, CustomConfig)
    ),
]
