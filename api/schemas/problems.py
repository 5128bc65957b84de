"""Errors as RFC 9457 problem documents, for replies and for the client."""

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples
from ratchet.configs.load import Problem

SHOWN_CHARACTERS = 200


class FieldError(BaseModel):
    """One mistake in the request."""

    pointer: str = Field(description="JSON pointer (RFC 6901) into the body; '' is the whole body.")
    key: str = Field(description="The same place as a dotted key.", examples=["train.batch_size"])
    value: Any = Field(default=None, description="The value received, shortened if long.")
    message: str = Field(description="What is wrong and what is allowed.")


class ProblemDocument(BaseModel):
    """An RFC 9457 problem."""

    model_config = examples(
        {
            "type": "urn:ratchet:problem:invalid-config",
            "title": "The run config cannot be used",
            "status": 422,
            "detail": "max_steps: must be at least 1",
            "errors": [
                {
                    "pointer": "/max_steps",
                    "key": "max_steps",
                    "value": 0,
                    "message": "must be at least 1",
                }
            ],
        }
    )
    type: str = Field(
        description="A URN that names the kind of problem and never changes.",
        examples=["urn:ratchet:problem:invalid-config"],
    )
    title: str = Field(
        description="The kind of problem, for people.", examples=["The run config cannot be used"]
    )
    status: int = Field(description="The reply's status.", examples=[422])
    detail: str = Field(description="What is wrong and how to fix it.")
    errors: list[FieldError] | None = Field(default=None, description="All mistakes.")
    run_status: str | None = Field(
        default=None, description="On a conflict (409): the run's current status."
    )


class ApiProblem(Exception):
    """Raised anywhere in a request; becomes a problem document."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        *,
        errors: Sequence[FieldError] | None = None,
        run_status: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.document = ProblemDocument(
            type=f"urn:ratchet:problem:{kind}",
            title=title,
            status=status,
            detail=detail,
            errors=list(errors) if errors is not None else None,
            run_status=run_status,
        )
        self.retry_after_s = retry_after_s


def printable(text: str) -> str:
    """`text` as it may appear in a reply: what UTF-8 can carry, shortened if long."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def shown(value: Any) -> Any:
    """`value` as it may appear in a reply: a short scalar that JSON can carry, else None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, dict | list):
        return None
    if isinstance(value, int):
        return "(a huge number)"
    return printable(str(value))


def field_errors(problems: Sequence[Problem]) -> list[FieldError]:
    """Config problems as they appear in a reply."""
    return [
        FieldError(
            pointer=printable(p.pointer),
            key=printable(p.key),
            value=shown(p.value),
            message=printable(p.message),
        )
        for p in problems
    ]


def joined(errors: Sequence[FieldError]) -> str:
    """All mistakes in one line."""
    return "; ".join(f"{error.key}: {error.message}" for error in errors)


def unknown_cursor(detail: str) -> ApiProblem:
    """404: an `after` that no list gave, or that leads nowhere any more."""
    return ApiProblem(404, "unknown-cursor", "Nothing is known by this cursor", detail)


def invalid_config(errors: Sequence[FieldError], source: str = "") -> ApiProblem:
    """422: the config was parsed, from the file `source` if there was one, and has mistakes."""
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    detail = joined(errors[:3]) + more
    title = f"The run config {source} cannot be used" if source else "The run config cannot be used"
    return ApiProblem(422, "invalid-config", title, detail, errors=errors)
