"""Streams of events of the Python client: cut, broken, refused and withheld ones."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.api.client import Ratchet, Refused, Unreachable
from ratchet.api.client.streams import MEDIA, EventStream
from ratchet.api.schemas.events import Event
from tests.unit.api.client.support import (
    all_events,
    breaking,
    make_steps,
    on_server,
    serving,
)
from tests.unit.api.conftest import (
    WITHIN_S,
    Served,
    eventually,
    listening,
)

# -- what has no server ---------------------------------------------------------------------------


class Pieces:
    """A transport whose streams come in the pieces given, one stream after the other."""

    address = "http://pieces"
    closed = False

    def __init__(self, *streams: list[bytes]) -> None:
        self.streams = [*streams]
        self.begun: list[str | None] = []

    @contextmanager
    def stream(self, path: str, params: Any, headers: Any, silence_s: float) -> Iterator[Any]:
        self.begun.append(headers.get("Last-Event-ID"))
        if self.streams:
            pieces = iter(self.streams.pop(0))
            yield httpx.Response(200, headers={"content-type": MEDIA}, content=pieces)
        else:
            yield httpx.Response(204)


def event(number: int, message: str = "said") -> Event:
    return Event(
        id=f"e.{number}",
        type="run.step",
        created_at=datetime.fromtimestamp(number, UTC),
        level="info",
        source="run",
        message=message,
        data={},
    )


def on_the_wire(result: Event, end: str = "\n") -> bytes:
    data = json.dumps(result.model_dump(mode="json"), ensure_ascii=False)
    text = f": hello{end}{end}id: {result.id}{end}event: {result.type}{end}data: {data}{end}{end}"
    return text.encode()


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_a_stream_reads_the_same_however_it_is_cut(
    messages: list[str], end: str, sizes: list[int]
) -> None:
    result = [event(number, message) for number, message in enumerate(messages)]
    whole, pieces, place = b"".join(on_the_wire(item, end) for item in result), [], 0
    while place < len(whole):
        pieces.append(whole[place : place + sizes[place % len(sizes)]])
        place += len(pieces[-1])
    assert [*EventStream(Pieces(pieces), "", None, 1.0, lambda why: None)] == result  # type: ignore[arg-type]


def test_half_a_message_is_none() -> None:
    whole = on_the_wire(event(2))
    way = Pieces([on_the_wire(event(1)), whole[:-1]], [whole])
    assert [*EventStream(way, "", None, 1.0, lambda why: None)] == [event(1), event(2)]  # type: ignore[arg-type]
    assert way.begun == [None, "e.1", "e.2"]


def test_patience_counts_from_the_last_sign_of_life_between_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None)
    monkeypatch.setattr("ratchet.api.client.streams.time", clock)

    def quiet() -> Iterator[bytes]:
        yield b"retry: 1000\n\n"
        for _ in range(100):
            now[0] += 15.0
            yield b": still here\n\n"
        raise httpx.ReadError("cut")

    way = Pieces([on_the_wire(event(1))], quiet())  # type: ignore[arg-type]
    assert [*EventStream(way, "", None, 60.0, lambda why: None)] == [event(1)]  # type: ignore[arg-type]
    assert way.begun == [None, "e.1", "e.1"]


# -- streams --------------------------------------------------------------------------------------


@on_server
async def test_a_stream_that_breaks_loses_and_repeats_nothing(served: Served) -> None:
    run_id = (await served.start("breaks"))["id"]
    await served.until(run_id, step=3)
    troubles: list[str] = []
    # Connections break before anything was said, in the headers, and in the middle of events.
    async with serving(served) as address, breaking(address, 0, 90, 777, 1500, 901, 2222) as way:
        watching = asyncio.create_task(
            asyncio.to_thread(all_events, way.address, run_id, on_trouble=troubles.append)
        )
        await make_steps(served, run_id, *range(4, 24))
        await served.http.post(f"/v1/runs/{run_id}/stop")
        found = await asyncio.wait_for(watching, WITHIN_S)
        assert way.broken == 6
        with Ratchet(address) as client:
            expected = await asyncio.to_thread(lambda: [*client.runs.list_events(run_id, limit=7)])
    assert found == expected and found[-1].type == "run.ended"
    assert [e.data["step"] for e in found if e.type == "run.step"] == [*range(3, 24)]
    assert troubles[0] and troubles[-1] == ""
    # For any number of tries, a loss is reported once, and so is its end.
    assert [bool(why) for why in troubles] == [True, False] * (len(troubles) // 2)


def refusing(app: ASGIApp) -> ASGIApp:
    """An API behind something that lets no stream pass."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if (b"accept", b"text/event-stream") in scope.get("headers", ()):
            await PlainTextResponse("no streams here", 406)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return wrapped


def withholding(app: ASGIApp) -> ASGIApp:
    """An API behind something that waits for the end of a stream before it passes it on."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if (b"accept", b"text/event-stream") in scope.get("headers", ()):
            await receive()
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            await app(scope, receive, send)

    return wrapped


@pytest.mark.parametrize("wrap", [refusing, withholding])
@on_server
async def test_where_no_stream_passes_pages_have_the_same_events(
    served: Served, wrap: Callable[[ASGIApp], ASGIApp]
) -> None:
    run_id = (await served.start("polls"))["id"]
    await served.until(run_id, step=3)
    pages = 0

    def counting(app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal pages
            streams = (b"accept", b"text/event-stream") in scope.get("headers", ())
            pages += scope.get("path", "").endswith("/events") and not streams
            await wrap(app)(scope, receive, send)

        return counted

    async with serving(served, counting) as address:
        watching = asyncio.create_task(
            asyncio.to_thread(all_events, address, run_id, silence_s=0.3)
        )
        await make_steps(served, run_id, 4, 5)
        # Every event was sent, and the client asks for what follows.
        asked = pages
        await eventually(lambda: asyncio.sleep(0, pages), lambda now: now >= asked + 3)
        await make_steps(served, run_id, 6)
        await served.http.post(f"/v1/runs/{run_id}/stop")
        found = await asyncio.wait_for(watching, WITHIN_S)
        with Ratchet(address) as client:
            expected = await asyncio.to_thread(lambda: [*client.runs.list_events(run_id)])
    assert found == expected and found[-1].type == "run.ended"


@pytest.mark.parametrize("wrap", [lambda app: app, refusing], ids=["stream", "pages"])
@on_server
async def test_latest_begins_with_what_is_still_to_come(
    served: Served, wrap: Callable[[ASGIApp], ASGIApp]
) -> None:
    run_id = (await served.start("late"))["id"]
    await served.until(run_id, step=3)
    async with serving(served, wrap) as address:
        with Ratchet(address) as client:
            before = await asyncio.to_thread(lambda: [*client.runs.list_events(run_id)])
            stream = client.runs.stream_events(run_id, after="latest", patience_s=WITHIN_S)
            watching = asyncio.create_task(asyncio.to_thread(lambda: [*stream]))
            while stream.cursor != before[-1].id:
                await asyncio.sleep(0.02)
            await make_steps(served, run_id, 4)
            await served.http.post(f"/v1/runs/{run_id}/stop")
            found = await asyncio.wait_for(watching, WITHIN_S)
            whole = await asyncio.to_thread(lambda: [*client.runs.list_events(run_id)])
            assert before + found == whole and found
            # Nothing is left, and that is soon known.
            assert await asyncio.to_thread(all_events, address, run_id, after=whole[-1].id) == []


@on_server
async def test_a_stream_gives_up_with_its_patience_and_at_a_refusal(served: Served) -> None:
    def stream(address: str, **options: Any) -> list[Event]:
        with Ratchet(address) as client:
            return [*client.runs.stream_events("nope", **options)]

    async with serving(served) as address:
        with pytest.raises(Refused, match="no run 'nope'"):
            await asyncio.to_thread(stream, address)
    with pytest.raises(Unreachable, match="refused"):
        await asyncio.to_thread(stream, "http://127.0.0.1:1", patience_s=0.5)


@on_server
async def test_a_stream_that_breaks_after_its_hello_leads_to_a_page_and_its_refusal() -> None:
    async def hello(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (b"accept", b"text/event-stream") in scope["headers"]:
            await PlainTextResponse("retry: 1000\n\n", media_type=MEDIA)(scope, receive, send)
        else:
            kind, said = "urn:ratchet:problem:unknown-cursor", "No event 'nope' is kept."
            problem = {"type": kind, "title": "No such event", "status": 404, "detail": said}
            await JSONResponse(problem, 404)(scope, receive, send)

    async with listening(hello) as http:
        with Ratchet(str(http.base_url)) as client, pytest.raises(Refused, match="'nope'"):
            stream = client.runs.stream_events("x", after="nope")
            await asyncio.wait_for(asyncio.to_thread(lambda: [*stream]), WITHIN_S)


@on_server
async def test_closing_the_client_ends_its_streams(served: Served) -> None:
    run_id = (await served.start("closes"))["id"]
    await served.until(run_id, step=3)
    async with serving(served) as address:
        client = Ratchet(address)
        stream = client.runs.stream_events(run_id, patience_s=WITHIN_S)
        reading = asyncio.create_task(asyncio.to_thread(lambda: [*stream]))
        while stream.cursor is None:
            await asyncio.sleep(0.02)
        client.close()
        await make_steps(served, run_id, 4)
        assert (await asyncio.wait_for(reading, WITHIN_S))[0].type == "run.created"
