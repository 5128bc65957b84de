"""What happened to a run: a cursor list, a live stream, and the same as a log.

The source is Temporal's history of the run's workflow, which is durable, ordered and immutable, so
that a cursor means the same to every API process, before and after a restart (`api.happenings`).
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from api.happenings import Happening
from api.histories import as_json
from api.models import ListOf
from api.observe import OPEN
from api.problems import documented
from api.resources import Event, LogLine
from api.services import RunId, Served

router = APIRouter(prefix="/v1/runs", tags=["events"])

SSE = "text/event-stream"
Cursor = Annotated[
    str | None,
    Query(description="Cursor: only what came after the event of this id.", max_length=120),
]
LEVELS = ("info", "warning", "error")


@router.get(
    "/{run_id}/events",
    response_model=ListOf[Event],
    responses={
        200: {
            "description": "A page of events, or with `Accept: text/event-stream` the live stream.",
            "content": {SSE: {"schema": {"type": "string"}}},
        },
        204: {"description": "The stream is over: the run has ended and all of it was told."},
        **documented(404, 422, 503),
    },
)
async def list_events(
    run_id: RunId,
    request: Request,
    services: Served,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most events in a page.")] = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[
        str | None,
        Header(description="Where a stream goes on; what an EventSource sends by itself."),
    ] = None,
) -> Response:
    """What happened, oldest first: steps, evals, checkpoints, signals, servers, work that was done
    or failed, and changes of status.

    As a stream it begins with the first event, or after `Last-Event-ID` or `after`; `after=latest`
    begins with what is still to come. It ends when the run has ended, and asking for more is then
    answered with 204, upon which an EventSource stops by itself.
    """
    execution = await services.execution(run_id)
    histories = services.histories
    if SSE not in accept:
        after = await histories.latest(execution) if after == "latest" else after
        found, more = await histories.page(execution, after, limit)
        return JSONResponse(
            {"object": "list", "data": [as_json(event) for event in found], "has_more": more}
        )
    cursor = last_event_id or after
    hello = b"retry: 1000\n\n"
    if cursor == "latest":
        cursor = await histories.latest(execution)
        if cursor is not None:
            hello = f"retry: 1000\nid: {cursor}\nevent: ready\ndata: {{}}\n\n".encode()
    if cursor is not None and execution.state not in OPEN:
        left, _ = await histories.page(execution, cursor, 1)
        if not left:
            return Response(status_code=204)
    stream = histories.stream(execution, cursor)
    return StreamingResponse(
        _with_hello(hello, stream),
        media_type=SSE,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _with_hello(hello: bytes, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield hello
    async for chunk in stream:
        yield chunk


def _line(event: Happening) -> dict[str, Any]:
    told = as_json(event)
    return {key: told[key] for key in ("id", "created_at", "level", "source", "message")}


@router.get(
    "/{run_id}/logs",
    response_model=ListOf[LogLine],
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **documented(404, 422, 503),
    },
)
async def list_logs(
    run_id: RunId,
    services: Served,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most lines in a page.")] = 200,
    level: Annotated[
        Literal["info", "warning", "error"], Query(description="Only lines of this level or worse.")
    ] = "info",
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """The run's log, oldest first: what it did, what failed and why, and what was tried again.

    With `Accept: text/plain` one line of text each. What single processes print stays on their
    machines; the last words of a server that went down are part of its line.
    """
    execution = await services.execution(run_id)
    found: list[Happening] = []
    cursor, more = after, True
    while more and len(found) < limit:
        page, more = await services.histories.page(execution, cursor, 1000)
        wanted = [e for e in page if LEVELS.index(e.level) >= LEVELS.index(level)]
        more = more or len(found) + len(wanted) > limit
        found += wanted[: limit - len(found)]
        cursor = page[-1].id if page else cursor
    if "text/plain" in accept:
        lines = [
            f"{line['created_at']} {line['level']:7} {line['source']}: {line['message']}"
            for line in map(_line, found)
        ]
        return PlainTextResponse("".join(f"{line}\n" for line in lines))
    data = [_line(event) for event in found]
    return JSONResponse({"object": "list", "data": data, "has_more": more})
