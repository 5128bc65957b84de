"""Bodies of requests that change a run or fork it; verbs have theirs in `CONTROLS`."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ConfigPatch(BaseModel):
    """A change to the config of a running run: sections as in a config, holding only what changes;
    train envs are keyed by name (`{"train": {"env": {"reverse-text": {"ratio": 2}}}}`). A refusal
    lists the keys that may change.
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
        default=None, description="Pairs to add or change; null removes a pair."
    )


class ForkBody(BaseModel):
    """Body of a fork."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"step": 10, "config": {"trainer": {"optim": {"lr": 3e-5}}}}]
        },
    )
    step: int | None = Field(
        default=None, ge=1, description="The checkpoint's step; null: the newest sound one."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Sections as in a config, holding only what differs."
    )
    name: str | None = Field(default=None, description="Name of the new run; null: the same name.")
    metadata: dict[str, str] | None = Field(
        default=None, description="Metadata of the new run; null: the same metadata."
    )
