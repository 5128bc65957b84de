"""What handlers share: small JSON bodies, conflicts, and answering a request once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request, Response
from pydantic import BaseModel, ValidationError

from ratchet.api.http.audit import Caller
from ratchet.api.http.bodies import optional_json, read_bytes
from ratchet.api.http.idempotency import Once, replied
from ratchet.api.schemas.problems import ApiProblem, FieldError, joined, shown
from ratchet.api.schemas.run import Run
from ratchet.api.services.core import JSON, Services
from ratchet.api.services.launch import Start, launch, planned
from ratchet.api.services.run_view import status_of
from ratchet.api.temporal.client import Execution
from ratchet.configs.load import MOST_REPORTED
from ratchet.configs.pointers import pointer

Body = TypeVar("Body", bound=BaseModel)
MAX_BODY = 64 * 1024


def optional_body(model: type[BaseModel], example: dict[str, Any], *further: str) -> dict[str, Any]:
    """The OpenAPI entry of an optional JSON body; `further`: its other media types."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    entry = {"schema": schema, "example": example}
    content = {media: entry for media in ("application/json", *further)}
    return {"requestBody": {"required": False, "content": content}}


def required_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI entry of a JSON body that must be there."""
    entry = optional_body(model, example)["requestBody"]
    return {"requestBody": {**entry, "required": True}}


def invalid(errors: list[FieldError]) -> ApiProblem:
    """422: the request was parsed, and has these mistakes."""
    title = "The request is invalid"
    return ApiProblem(422, "invalid-request", title, joined(errors), errors=errors)


def read_as(model: type[Body], data: dict[str, Any]) -> Body:
    """`data` as a body; raises 422 with every mistake."""
    if unknown := [key for key in data if key not in model.model_fields]:
        valid = ", ".join(model.model_fields)
        raise invalid(
            [
                FieldError(
                    pointer=pointer(key),
                    key=shown(key),
                    value=shown(data[key]),
                    message=f"unknown key; valid keys: {valid}",
                )
                for key in unknown[:MOST_REPORTED]
            ]
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise invalid(
            [
                FieldError(
                    pointer=pointer(*e["loc"]),
                    key=".".join(str(part) for part in e["loc"]),
                    value=shown(e.get("input")),
                    message=e["msg"],
                )
                for e in error.errors(include_url=False)[:MOST_REPORTED]
            ]
        ) from None


async def claimed(services: Services, once: Once, run_id: str) -> None:
    """Claims the key before a run is signalled; raises 409 if another request has claimed it. An
    unavailable store keeps nobody from ending a run.
    """
    with suppress(OSError):
        await asyncio.to_thread(once.claim, services.records.store, run_id)


async def answer_once(
    services: Services,
    request: Request,
    run_id: str,
    act: Callable[[dict[str, Any], Once | None], Awaitable[Run]],
    status: int = 202,
) -> Run | Response:
    """What `act` answers to the request's body, or what the same request was answered before.

    Raises 400, 409, 413 or 415, and what `act` raises.
    """
    data = await read_bytes(request, MAX_BODY)
    once, store = Once.of(request, data), services.records.store
    if once is None:
        return await act(optional_json(request, data), None)
    with suppress(OSError):
        if input := await asyncio.to_thread(once.reply, store):
            return replied(input, status)
    run = await act(optional_json(request, data), once)
    with suppress(OSError):
        kept = await asyncio.to_thread(once.keep, store, run_id, run.model_dump(mode="json"))
        return replied(kept, status)
    return run


DryRun = Annotated[bool, Query(description="Check and plan; start nothing.")]
Preflight = Annotated[
    bool,
    Query(
        description="With `dry_run`: also have workers check the config, as at a start, which "
        "takes some seconds. If that is left out, or no worker answers, `unchecked` says what was "
        "not checked.",
    ),
]


async def answer_start(
    services: Services,
    request: Request,
    data: bytes,
    dry_run: bool,
    preflight: bool,
    prepare: Callable[[], Awaitable[Start]],
) -> Response:
    """The reply to a request for a run: the run, the reply that the same request got before, or for
    a dry run the plan. Raises what `prepare` and `launch` raise.
    """
    once, store = Once.of(request, data) if not dry_run else None, services.records.store
    if once is not None and (input := await asyncio.to_thread(once.reply, store)):
        return replied(input, 201, located=True)
    start = await prepare()
    if dry_run:
        answer = await planned(services, start, preflight=preflight)
        return Response(answer.model_dump_json(), media_type=JSON)
    run_id = await launch(services, start, Caller.of(request), once)
    run = (await services.show(await newest(services, run_id))).model_dump(mode="json")
    kept = {"run_id": run_id, "run": run}
    if once is not None:
        kept = await asyncio.to_thread(once.keep, store, run_id, run)
    return replied(kept, 201, located=True)


async def newest(services: Services, run_id: str) -> Execution:
    """The run's execution as it is now; raises 404."""
    services.touched(run_id)
    return await services.execution(run_id)


def conflict(verb: str, execution: Execution, why: str = "") -> ApiProblem:
    """409: the run's status rules out `verb`."""
    status = status_of(execution)
    return ApiProblem(
        409,
        "run-conflict",
        "The run's status does not allow this",
        f"Cannot {verb} run {execution.id}: its status is {status}{f'; {why}' if why else '.'}",
        run_status=status,
    )
