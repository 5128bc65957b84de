"""Bodies of requests that change a run or fork it; verbs have theirs in `CONTROLS`."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

MERGE_PATCH = "application/merge-patch+json"
LONGEST_NOTE = 2000
CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
"""Control characters except line breaks and tabs, as a range of a regular expression."""


def _plain_text(text: str) -> str:
    """`text`, which has no control characters; raises a validation error."""
    if match := re.search(f"[{CONTROL}]", text):
        found = {"found": f"U+{ord(match[0]):04X}", "place": match.start()}
        raise PydanticCustomError(
            "control_character",
            "the control character {found} at position {place} is not allowed; of these only line "
            "breaks (U+000A) and tabs are",
            found,
        )
    return text


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


class NoteBody(BaseModel):
    """Body of a note."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"note": "lr halved after the jump at step 40"}]},
    )
    note: Annotated[
        str,
        StringConstraints(strip_whitespace=True, max_length=LONGEST_NOTE),
        AfterValidator(_plain_text),
    ] = Field(
        description="Plain text without control characters other than line breaks and tabs; white "
        "space around it is cut off. Empty: no note.",
        json_schema_extra={"pattern": f"^[^{CONTROL}]*$"},
    )
