"""Rollout filters: what makes a training rollout suspect, and whether it is removed for that.

Every filter of a slot is evaluated for every training rollout. A filter with `enforce` removes
the rollouts it hits; one without only counts them. Evals are never filtered.
"""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ratchet.configs.base import Section, choose_by_type


class GibberishConfig(Section):
    """A rare token was sampled although its probability was below chance.

    Hit: any sampled token with id > token_id_threshold and
    logprob < -ln(vocabulary size) - logprob_offset (arXiv:2510.02387, section 5.2).
    """

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(
        default=100_000, ge=0, description="Only tokens with a greater id can be gibberish."
    )
    logprob_offset: float = Field(
        default=2.0, ge=0.0, description="Nats below the log-probability of a uniform guess."
    )
    enforce: bool = Field(default=False, description="true: remove hits; false: only count them.")


class RepetitionConfig(Section):
    """The policy was nearly certain for too long, as in a loop.

    Hit: `window` consecutive sampled tokens, each with logprob > ln(prob_threshold); the sequence
    continues across turns (arXiv:2506.13585, section 3.2).
    """

    type: Literal["repetition"] = "repetition"
    window: int = Field(default=3000, ge=1, description="Consecutive sampled tokens.")
    prob_threshold: float = Field(
        default=0.99, gt=0.0, lt=1.0, description="Each has a greater probability than this."
    )
    enforce: bool = Field(default=False, description="true: remove hits; false: only count them.")


class ZeroAdvantageConfig(Section):
    """The advantage of every sampled token is 0, so the rewards carry no signal for the rollout.

    Rollouts without advantages (opd, opsd, sft) are never hit. Those of echo are, although their
    observations could still train: do not enforce the filter if you want to keep them.
    """

    type: Literal["zero_advantage"] = "zero_advantage"
    enforce: bool = Field(default=True, description="true: remove hits; false: only count them.")


class RewardFilterConfig(Section):
    """The reward is outside [min, max].

    Works with every algorithm. Enforced with 'sft' it is rejection sampling: the policy learns from
    those of the source's rollouts whose reward is high enough.
    """

    type: Literal["reward"] = "reward"
    min: float | None = Field(
        default=None, allow_inf_nan=False, description="Hit: a reward below this; none: no bound."
    )
    max: float | None = Field(
        default=None, allow_inf_nan=False, description="Hit: a reward above this; none: no bound."
    )
    enforce: bool = Field(default=False, description="true: remove hits; false: only count them.")

    @model_validator(mode="after")
    def _check(self) -> "RewardFilterConfig":
        if self.min is None and self.max is None:
            raise ValueError("a reward filter without min and max hits nothing; set one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"min ({self.min:g}) is above max ({self.max:g}), so that every reward is hit"
            )
        return self


AnyFilter = GibberishConfig | RepetitionConfig | ZeroAdvantageConfig | RewardFilterConfig

FilterConfig = Annotated[
    AnyFilter,
    Field(discriminator="type"),
    BeforeValidator(choose_by_type("filter", *get_args(AnyFilter))),
]


def _pre_batch() -> list[FilterConfig]:
    return [GibberishConfig(), RepetitionConfig(), ZeroAdvantageConfig(enforce=False)]


def _post_batch() -> list[FilterConfig]:
    return [GibberishConfig(), RepetitionConfig(), ZeroAdvantageConfig(enforce=True)]


class FiltersConfig(Section):
    """Filters of training rollouts. Setting a slot replaces its default as a whole."""

    pre_batch: list[FilterConfig] = Field(
        default_factory=_pre_batch,
        description="Applied to each group once it is scored; more rollouts are dispatched to "
        "replace removed ones. By default gibberish, repetition and zero_advantage, all of which "
        "only count their hits (`enforce = false`, which zero_advantage needs where you list it).",
    )
    post_batch: list[FilterConfig] = Field(
        default_factory=_post_batch,
        description="Applied to a full batch; it ships without the rollouts removed here, which "
        "are not replaced. By default the same three, with zero_advantage enforced.",
    )

    @field_validator("pre_batch", "post_batch")
    @classmethod
    def _one_of_a_type(cls, slot: list[FilterConfig]) -> list[FilterConfig]:
        types = [entry.type for entry in slot]
        double = sorted({kind for kind in types if types.count(kind) > 1})
        if double:
            raise ValueError(f"{double[0]!r} is set twice; a slot has at most one filter of a type")
        return slot
