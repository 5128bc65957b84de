"""What happened to a run: a paged list, a live stream, and the same as a log.

The source is Temporal's history of the run's workflow, which is durable, ordered and immutable, so
that a cursor means the same to every API process, before and after a restart
(`ratchet.api.temporal.event_log`).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field

from ratchet.api.http.problems import documented
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.events import EVENT_TYPES, Event, Level, LogLine
from ratchet.api.schemas.problems import ApiProblem, unknown_cursor
from ratchet.api.services.core import RunId, Served, Services
from ratchet.api.services.process_logs import log_of, missing_log
from ratchet.api.services.run_view import OPEN
from ratchet.api.store import logs
from ratchet.api.store.logs import LEVELS
from ratchet.api.temporal.client import Execution
from ratchet.api.temporal.event_log import LoggedEvent
from ratchet.api.temporal.histories import Page, Wanted, everything

router = APIRouter(prefix="/v1/runs", tags=["events"])

SSE = "text/event-stream"
EXAMPLE_SSE = (
    "id: 0195a3c2-7d1e-7b1a-9c55-0d6f6a3c1b2e.118.0\n"
    'event: run.step\ndata: {"type":"run.step","message":"step 12 is done with reward 0.581"}\n\n'
)
EXAMPLE_TEXT = "2026-01-01T12:01:00.250Z info    run: step 12 is done with reward 0.581\n"
Cursor = Annotated[
    str | None,
    Query(description="Cursor: only events after the one with this id.", max_length=120),
]
NEXT_AFTER = Field(
    default=None,
    description="Pass it as `after` to get the next page; null on the last page. A filtered page "
    "may be empty although more pages follow.",
)


class EventPage(ListOf[Event]):
    """A page of events. While `has_more` is true, pass `next_after` as `after`."""

    next_after: str | None = NEXT_AFTER


class LogPage(ListOf[LogLine]):
    """A page of a log. While `has_more` is true, pass `next_after` as `after`; later, too, for what
    a process has written since.
    """

    next_after: str | None = NEXT_AFTER


def _of_types(types: str | None) -> Wanted:
    if types is None:
        return everything
    named = {name.strip() for name in types.split(",")}
    short = sorted({known.partition(".")[0] for known in EVENT_TYPES})
    if unknown := sorted(named.difference(EVENT_TYPES, short)):
        raise ApiProblem(
            422,
            "invalid-request",
            "The request has invalid parameters",
            f"types: there is no {' or '.join(map(repr, unknown))}; events are of the types "
            f"{', '.join(EVENT_TYPES)}; {', '.join(short)} stand for all of theirs",
        )
    return lambda event: event.type in named or event.type.partition(".")[0] in named


def _answer(page: Page, show: Callable[[LoggedEvent], dict[str, Any]]) -> JSONResponse:
    return JSONResponse(
        {
            "object": "list",
            "data": [show(event) for event in page.events],
            "has_more": page.next_after is not None,
            "next_after": page.next_after,
        }
    )


@router.get(
    "/{run_id}/events",
    response_model=EventPage,
    responses={
        200: {
            "description": "A page of events, or with `Accept: text/event-stream` the live stream.",
            "content": {SSE: {"schema": {"type": "string"}, "example": EXAMPLE_SSE}},
        },
        204: {"description": "The stream is over: the run has ended and all events were sent."},
        **documented(404, 410, 422, 503),
    },
)
async def list_events(
    run_id: RunId,
    services: Served,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most events in a page.")] = 100,
    order: Annotated[
        Literal["asc", "desc"],
        Query(
            description="`desc`: the newest first; with `after`, the events before the one with "
            "that id. An event's id is a cursor in both directions."
        ),
    ] = "asc",
    types: Annotated[
        str | None,
        Query(
            max_length=1000,
            description="Only events of these types, separated by commas; `server` is short for "
            f"all that begin with `server.`. Types: {', '.join(f'`{it}`' for it in EVENT_TYPES)}.",
            examples=["run.ended,server"],
        ),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[
        str | None,
        Header(description="Where to continue a stream; an EventSource sends it on its own."),
    ] = None,
) -> Response:
    """What happened, oldest first: steps, evals, checkpoints, signals, servers, activities that
    completed or failed, and changes of status.

    A stream begins with the first event, or after `Last-Event-ID` or `after`; with `after=latest`
    it sends only new events. It ends when the run has ended; the next request is then answered with
    204, which stops an EventSource. Streams are always oldest first.
    """
    execution = await services.execution(run_id)
    if not execution.run:
        if SSE in accept:
            return Response(status_code=204)
        raise _forgotten(run_id)
    histories = services.histories
    wanted = _of_types(types)
    cursor = (last_event_id or after) if SSE in accept else after
    if order == "desc" and (SSE in accept or cursor == "latest"):
        raise ApiProblem(
            422,
            "invalid-request",
            "The request has invalid parameters",
            "order: a stream, and events after the latest one, are always oldest first.",
        )
    hello = b"retry: 1000\n\n"
    if cursor == "latest":
        cursor = await histories.latest(execution)
        hello = f"retry: 1000\nid: {cursor}\nevent: ready\ndata: {{}}\n\n".encode()
    if SSE not in accept:
        page = await histories.page(execution, cursor, limit, desc=order == "desc", wanted=wanted)
        return _answer(page, LoggedEvent.as_json)
    if cursor is not None and execution.state not in OPEN:
        left = await histories.page(execution, cursor, 1, wanted=wanted)
        if not left.events and left.next_after is None:
            return Response(status_code=204)
    elif cursor is not None and await histories.ends_at(execution, cursor):
        # The run ended a moment ago. What is cached of it does not know that yet, and must not be
        # the answer to whoever looks at the run next.
        services.touched(run_id)
        return Response(status_code=204)
    # An invalid cursor is refused here, while the reply can still be a problem.
    stream = await histories.stream(execution, cursor, hello=hello, wanted=wanted)
    return StreamingResponse(
        stream,
        media_type=SSE,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


def _forgotten(run_id: str) -> ApiProblem:
    detail = (
        f"Temporal no longer keeps the history of run {run_id}, which its events and log are read "
        "from. What the run stored is still there: its metrics, evals, rollouts, checkpoints."
    )
    return ApiProblem(410, "history-forgotten", "The run's history is gone", detail)


def _line(event: LoggedEvent) -> dict[str, Any]:
    whole = event.as_json()
    return {key: whole[key] for key in ("id", "created_at", "level", "source", "message")}


@router.get(
    "/{run_id}/logs",
    response_model=LogPage,
    responses={
        200: {
            "description": "A page of the log, or the same as text.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE_TEXT}},
        },
        **documented(404, 410, 422, 503),
    },
)
async def list_logs(
    run_id: RunId,
    request: Request,
    services: Served,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most lines in a page.")] = 200,
    level: Annotated[Level, Query(description="Only lines of this level or worse.")] = "debug",
    source: Annotated[
        str | None,
        Query(
            max_length=120,
            description="The log of one process of the run, if it is on the API's machine: "
            "`orchestrator`, or `env:NAME` for an env's server (`env:train/NAME` and "
            "`env:eval/NAME` if its sections have one each). By default the run's own log.",
            examples=["env:reverse-text"],
        ),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """The run's log, oldest first: what it did, what failed and why, and what was retried.

    With `Accept: text/plain` one line of text each, and a `Link` of `rel="next"` while there are
    more. With `source` it is what one process wrote; other processes' logs stay on their machines,
    and the last output of a server that went down is part of its line. For a process the newest
    lines are shown unless `after` is `start` or the `next_after` of a page, which is always
    present; a request reads at most 256 KiB of its log.
    """
    execution = await services.execution(run_id)
    if source is not None:
        return await _of_process(services, request, execution, source, after, limit, level, accept)
    if not execution.run:
        raise _forgotten(run_id)
    lowest = LEVELS.index(level)
    page = await services.histories.page(
        execution, after, limit, wanted=lambda event: LEVELS.index(event.level) >= lowest
    )
    if "text/plain" not in accept:
        return _answer(page, _line)
    lines = [LogLine.model_validate(_line(event)) for event in page.events]
    return _as_text(request, lines, page.next_after)


def _as_text(request: Request, lines: Sequence[LogLine], following: str | None) -> Response:
    text = []
    for line in lines:
        moment = line.created_at.isoformat(timespec="milliseconds") if line.created_at else "-"
        moment = moment.replace("+00:00", "Z")
        text.append(f"{moment} {line.level:7} {line.source}: {line.message}\n")
    headers = {}
    if following is not None:
        query = request.url.include_query_params(after=following).query
        headers["Link"] = f'<?{query}>; rel="next"'
    return PlainTextResponse("".join(text), headers=headers)


async def _of_process(
    services: Services,
    request: Request,
    execution: Execution,
    source: str,
    after: str | None,
    limit: int,
    level: Level,
    accept: str,
) -> Response:
    config = await asyncio.to_thread(services.current_config, execution)
    log = log_of(config, execution.id, source)
    try:
        page = await asyncio.to_thread(
            logs.read_page,
            services.settings.home / log.path,
            source,
            after,
            limit,
            LEVELS.index(level),
        )
    except FileNotFoundError:
        raise await missing_log(services, log) from None
    except ValueError as error:
        raise unknown_cursor(str(error)) from None
    if "text/plain" in accept:
        return _as_text(request, page.lines, page.cursor if page.more else None)
    whole = LogPage(data=page.lines, has_more=page.more, next_after=page.cursor)
    return JSONResponse(whole.model_dump(mode="json"))
