"""Bodies of requests that steer a run."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class StopBody(BaseModel):
    """Optional body of a stop."""

    reason: str = Field(default="", max_length=200, examples=["reward has converged"])


class PauseBody(BaseModel):
    """Optional body of a pause."""

    mode: Literal["drain", "cancel"] = Field(
        default="drain",
        description="What becomes of rollouts in flight: they end first, or they are given up and "
        "begin anew after the pause; what had ended is kept.",
    )
    reason: str = Field(default="", max_length=200, examples=["the GPUs are needed elsewhere"])


class ConfigPatch(BaseModel):
    """A change of a running run: sections like a config's own, with what is to change; train envs
    are named (`{"train": {"env": {"reverse-text": {"ratio": 2}}}}`). Refusals list the keys that
    may change.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {"dispatch": {"max_inflight_rollouts": 128}, "metadata": {"note": "halved"}}
            ]
        },
    )
    metadata: dict[str, str | None] | None = Field(
        default=None, description="Pairs to add or change; null takes one out."
    )


class ReasonBody(BaseModel):
    """Optional body of a verb that takes a reason, which is kept in the run's log."""

    reason: str = Field(default="", max_length=200, examples=["before the GPUs are taken"])


class EvalBody(BaseModel):
    """Optional body of an eval request; no envs means all of them."""

    envs: list[str] = Field(default_factory=list, examples=[["reverse-text"]])


class ForkBody(BaseModel):
    """Body of a fork."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"step": 10, "config": {"trainer": {"optim": {"lr": 3e-5}}}}]
        },
    )
    step: int | None = Field(
        default=None, ge=1, description="The checkpoint's step; none: the newest sound one."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Sections like a config's own, with what is to differ."
    )
    name: str | None = Field(default=None, description="Name of the new run; none: the same.")
    metadata: dict[str, str] | None = Field(
        default=None, description="Of the new run; none: the same."
    )
