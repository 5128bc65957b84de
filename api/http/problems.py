"""Errors as RFC 9457 problem documents: one shape for every reply that is not a success.

`type` is a URN that names the kind of problem and never changes; `detail` says for people what is
wrong and how to fix it. Internals and secrets never appear.

An unavailable store (503) and a damaged artifact (500) can affect any request that reads the store
(`ratchet.api.http.store_errors`), so that every route documents both.
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ratchet.api.http.conventions import allowed
from ratchet.api.schemas.problems import (
    ApiProblem,
    FieldError,
    joined,
    printable,
    shown,
    unknown_cursor,
)

MEDIA = "application/problem+json"
ANYWHERE = (500, 503)
"""Statuses that every route may answer with."""


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
    """OpenAPI `responses` entries for these problem statuses, and for those of every route."""
    schema = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    reported = {s: HTTPStatus(s).phrase for s in sorted({*statuses, *ANYWHERE})}
    reported[500] = "An artifact in the store is damaged (`damaged-artifact`), or the API failed"
    reported[503] = "Temporal or the artifact store (`store-unavailable`) cannot be reached now"
    return {s: {"description": text, "content": {MEDIA: schema}} for s, text in reported.items()}


def install(app: FastAPI) -> None:
    """Makes every error of `app` a problem document."""

    @app.exception_handler(ApiProblem)
    async def _on_problem(_: Request, error: ApiProblem) -> JSONResponse:
        return reply(error)

    @app.exception_handler(HTTPException)
    async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
        status, path = HTTPStatus(error.status_code), printable(request.url.path)
        details = {
            404: f"Nothing is served at {path}; see /docs.",
            405: f"{path} does not support {request.method}; see /docs.",
        }
        kind = status.phrase.lower().replace(" ", "-")
        detail = details.get(status, str(error.detail))
        response = reply(ApiProblem(status, kind, status.phrase, detail))
        response.headers.update(error.headers or {})
        if status == 405:
            response.headers["Allow"] = allowed(app, request.scope)
        return response

    @app.exception_handler(RequestValidationError)
    async def _on_parameters(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = [
            FieldError(
                pointer="",
                key=printable(".".join(str(part) for part in item["loc"])),
                value=shown(item.get("input")),
                message=printable(item["msg"]),
            )
            for item in error.errors()
        ]
        if [item["loc"] for item in error.errors()] == [("query", "after")]:
            detail = f"{errors[0].value!r} is not a cursor of this list; use a page's `next_after`."
            return reply(unknown_cursor(detail))
        detail, title = joined(errors), "The request has invalid parameters"
        return reply(ApiProblem(422, "invalid-request", title, detail, errors=errors))

    @app.exception_handler(Exception)
    async def _on_fault(_: Request, error: Exception) -> JSONResponse:
        detail = f"Unexpected {type(error).__name__}; the API's log has the traceback."
        return reply(ApiProblem(500, "internal-error", "The API failed", detail))
