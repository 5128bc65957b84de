"""Errors as RFC 9457 problem documents: one shape for every reply that is not a success.

`type` is a URN that names the kind of problem and never changes; `detail` tells a person what is
wrong and how to mend it. Internals and secrets never appear.

A store that cannot be reached (503) and an artifact that is damaged (500) can meet any request that
reads the store (`ratchet.api.http.store_errors`), so that every route documents both.
"""

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ratchet.configs.load import Problem

MEDIA = "application/problem+json"
SHOWN_CHARACTERS = 200
ANYWHERE = (500, 503)
"""Statuses that every route may answer with."""


class FieldError(BaseModel):
    """One mistake in the request."""

    pointer: str = Field(description="JSON pointer (RFC 6901) into the body; '' is all of it.")
    key: str = Field(description="The same place as a dotted key.", examples=["train.batch_size"])
    value: Any = Field(default=None, description="What was given, shortened if long.")
    message: str = Field(description="What is wrong and what is allowed.")


class ProblemDocument(BaseModel):
    """An RFC 9457 problem."""

    type: str = Field(examples=["urn:ratchet:problem:invalid-config"])
    title: str = Field(examples=["The run config cannot be used"])
    status: int = Field(examples=[422])
    detail: str
    errors: list[FieldError] | None = Field(default=None, description="Every mistake found.")
    run_status: str | None = Field(
        default=None, description="On a conflict (409): the status the run is in."
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


def invalid_config(errors: Sequence[FieldError]) -> ApiProblem:
    """422: the config was read, and these are its mistakes."""
    detail = "; ".join(f"{error.key}: {error.message}" for error in errors[:3])
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    return ApiProblem(
        422, "invalid-config", "The run config cannot be used", detail + more, errors=errors
    )


def reply(problem: ApiProblem) -> JSONResponse:
    """The problem as a response."""
    headers = {"Retry-After": str(problem.retry_after_s)} if problem.retry_after_s else None
    members = problem.document.model_dump().items()
    return JSONResponse(
        {name: value for name, value in members if value is not None},
        status_code=problem.document.status,
        media_type=MEDIA,
        headers=headers,
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI `responses` entries of these problem statuses, and of those of any route."""
    schema = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    told = {s: HTTPStatus(s).phrase for s in sorted({*statuses, *ANYWHERE})}
    told[500] = "An artifact in the store is damaged (`damaged-artifact`), or the API failed"
    told[503] = "Temporal or the artifact store (`store-unavailable`) cannot be reached now"
    return {s: {"description": text, "content": {MEDIA: schema}} for s, text in told.items()}


async def _on_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiProblem)
    return reply(error)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    details = {
        404: f"Nothing is served at {printable(request.url.path)}; see /docs.",
        405: f"{request.method} is not offered at {printable(request.url.path)}; see /docs.",
    }
    problem = ApiProblem(
        error.status_code,
        phrase.lower().replace(" ", "-"),
        phrase,
        details.get(error.status_code, str(error.detail)),
    )
    response = reply(problem)
    response.headers.update(error.headers or {})
    return response


async def _on_parameters(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldError(
            pointer="",
            key=printable(".".join(str(part) for part in item["loc"])),
            value=shown(item.get("input")),
            message=printable(item["msg"]),
        )
        for item in error.errors()
    ]
    detail = "; ".join(f"{item.key}: {item.message}" for item in errors)
    return reply(
        ApiProblem(
            422, "invalid-request", "The request has invalid parameters", detail, errors=errors
        )
    )


async def _on_fault(_: Request, error: Exception) -> JSONResponse:
    return reply(
        ApiProblem(
            500,
            "internal-error",
            "The API failed",
            f"An unexpected {type(error).__name__}; the API's log has the traceback.",
        )
    )


def install(app: FastAPI) -> None:
    """Makes every error of `app` a problem document."""
    app.add_exception_handler(ApiProblem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(Exception, _on_fault)
