"""Connections that cost nothing to open: they end, and there are only so many."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from ratchet.api.app import create_app
from ratchet.api.http import bodies, connections, security
from ratchet.api.http.connections import BoundedProtocol
from ratchet.api.http.keyring import Keyring
from ratchet.api.http.security import Guard
from ratchet.api.schemas import keys as api_keys
from tests.unit.api.http.test_security import AWAY, settings

SOON_S = 20.0
MIB = 1024 * 1024


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """The port where an app is served."""
    async with server_of(app) as server:
        yield port_of(server)


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


@asynccontextmanager
async def server_of(app: Any) -> AsyncIterator[uvicorn.Server]:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            port=0,
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await task


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """An event stream that says something now and then, until its client goes."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(6):
        await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
        await asyncio.sleep(0.1)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_half_sent_heads_are_closed_and_streams_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.1)
    async with serving(stream) as port:

        async def closed(sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), SOON_S)
            writer.close()
            return answer

        whole = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        kept = closed(whole + b"GET / HTTP")
        heads = (closed(head) for head in (b"", b"GET /", b"GET / HTTP/1.1\r\nhost: a\r\nx: "))
        stream_of, *nothing = await asyncio.gather(kept, *heads)
        # The stream took six times as long as a head may.
        assert nothing == [b"", b"", b""] and b"end" in stream_of


async def asked(port: int, *sent: bytes, last: bool = False) -> tuple[int, dict[str, Any]]:
    """Status and body of the reply to what is sent.

    The `last` of a connection has to say so, and what is sent after it has to be read.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(SOON_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            if last:
                assert "connection: close" in head and await reader.read() == b""
                # More than sockets buffer. It would fail if the server had closed.
                writer.write(get() * (8 * MIB // len(get())))
                await writer.drain()
            return int(head.split()[1]), body
    finally:
        writer.close()


def get(path: str = "/healthz", headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()


def away(folder: Path) -> Any:
    """An API without Temporal."""
    return create_app(settings(folder, RATCHET_STORE=f"file://{folder}/store"), AWAY)


async def refusals(port: int, kind: str) -> float:
    """How many requests were refused for this kind of problem, by `/metrics`."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return float(text.partition(f'ratchet_api_refused_total{{problem="{kind}"}} ')[2].split()[0])


HEADS = {
    "a whole address": [get(f"/healthz?a={'x' * 40_000}")],
    "a whole address of 1 MiB": [get(f"/healthz?{'a=1&' * (MIB // 4)}")],
    "an address without end": [b"GET /" + b"x" * 40_000, b"x" * MIB],
    "whole headers": [get(headers=f"x: {'y' * 40_000}\r\n")],
    "many headers": [get(headers="a:b\r\n" * (MIB // 5))],
    "headers without end": [get()[:-2], *[b"a: b\r\n" * 4000] * 3],
    "a header without end": [get()[:-2] + b"x: ", b"y" * MIB],
}
READ = ("a whole address", "whole headers")
"""Those that are read to their end: their connections go on."""


async def test_a_large_head_is_431(tmp_path: Path) -> None:
    async with serving(away(tmp_path)) as port:
        for name, head in HEADS.items():
            status, problem = await asked(port, *head, last=name not in READ)
            assert (status, problem["type"]) == (431, "urn:ratchet:problem:head-too-large"), name
        assert await refusals(port, "head-too-large") == len(HEADS)
        # What is not too large, in however many parts, is read.
        large = get(headers=f"x: {'y' * 30_000}\r\n")
        assert await asked(port, large) == await asked(port, *large.partition(b"yy"))
        assert (await asked(port, large))[0] == 200


async def test_trailers_without_end_are_cut_off_and_few_are_dropped(tmp_path: Path) -> None:
    chunked = b"POST /v1/nothing HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(away(tmp_path)) as port, asyncio.timeout(SOON_S):
        for sent in (b"0\r\nx: ", b"0\r\n" + b"a: b\r\n" * 6000, b"1;x="):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chunked + sent)
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(b"y" * 4096)
                    await writer.drain()
            writer.close()
    async with serving(echo) as port:
        # More of a body than of a head, in chunks with extensions, and trailers.
        body = b"400;x=y\r\n" + b"z" * 1024 + b"\r\n"
        sent = chunked + body * 200 + b"0\r\nhost: b\r\nx: y\r\n\r\n"
        assert await asked(port, sent) == (200, {"bytes": 200 * 1024, "headers": 2})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """How many bytes the body has, and how many headers the request."""
    request = Request(scope, receive)
    size = len(await request.body())
    await JSONResponse({"bytes": size, "headers": len(request.headers)})(scope, receive, send)


@pytest.mark.parametrize("body", ["content-length: 17", "transfer-encoding: chunked"])
async def test_a_body_is_not_lost_to_an_upgrade(tmp_path: Path, body: str) -> None:
    # As curl --http2 and Java's HttpClient send it.
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    start = f"POST /v1/runs/r/pause HTTP/1.1\r\nhost: localhost\r\n{upgrade}"
    async with serving(away(tmp_path)) as port:
        sent = f'{start}{body}\r\n\r\n{{"mode":"cancel"}}'.encode()
        status, problem = await asked(port, sent, last=True)
        assert (status, problem["type"]) == (400, "urn:ratchet:problem:upgrade-with-body")
        # Nothing is lost without a body.
        assert (await asked(port, get(headers=upgrade)))[0] == 200
        assert (await asked(port, get(headers=f"{upgrade}content-length: 0\r\n")))[0] == 200


QUERIES = {
    "of 1 MiB": "a=1&" * (MIB // 4),
    "of many misspelled parameters": "&".join(f"statu{n}=1" for n in range(2900)),
    "of empty parameters": "&" * 30_000,
    "of as many as may be": "&".join(f"{'x' * 64}{n}=%41{'x' * 60}" for n in range(200)),
}


@pytest.mark.alone
async def test_no_query_keeps_anybody_waiting(tmp_path: Path) -> None:
    """By the CPU seconds of one request: another has to wait for as long."""
    async with serving(away(tmp_path)) as port:
        for name, query in QUERIES.items():
            for path in ("/healthz", "/readyz", "/v1/runs"):
                took = []
                for _ in range(2):
                    began = time.process_time()
                    assert (await asked(port, get(f"{path}?{query}")))[0] in (422, 431)
                    took.append(time.process_time() - began)
                assert min(took) < 0.1, (name, path)


async def test_connections_beyond_the_limit_are_refused_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    pool = httpx.AsyncClient(trust_env=False)
    async with server_of(away(tmp_path)) as server, asyncio.timeout(SOON_S), pool:
        port = port_of(server)

        async def only(most: int) -> None:
            while len(server.server_state.connections) > most:
                await asyncio.sleep(0)

        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        status, problem = await asked(port, get(), last=True)
        assert (status, problem["type"]) == (503, "urn:ratchet:problem:too-many-connections")
        address = f"http://127.0.0.1:{port}/healthz"
        assert (await pool.get(address)).status_code == 503
        await only(3)
        opened += [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        # No answer, and at once.
        reader, one_more = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        # One that was there before goes on.
        reader, writer = opened[0]
        writer.write(get())
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        for _, writer in [*opened, (reader, one_more)]:
            writer.close()
            await writer.wait_closed()
        await only(0)
        # A client that was refused has no more to do than to ask again.
        assert (await pool.get(address)).status_code == 200
        assert await refusals(port, "too-many-connections") >= 1


async def test_a_body_that_does_not_come_is_408(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_WITHIN_S", 0.05)
    start = b"POST /v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with serving(away(tmp_path)) as port:
        status, problem = await asked(port, start + b"content-length: 9\r\n\r\n{")
    assert status == 408 and problem["type"].endswith("body-too-slow")


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_key_has_so_many_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setattr(security, "MOST_STREAMS", 2)
    monkeypatch.setattr(security, "MOST_OPEN_STREAMS", 2)
    file = tmp_path / "api_keys.json"
    names = {name: api_keys.add(file, name, ["read"], 60_000) for name in ("a", "b")}
    over = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        await over.wait()

    guard = Guard(held, keyring=Keyring((), file) if keyed else None, hosts=())

    async def ask(name: str, accept: bytes = b"text/event-stream") -> list[int]:
        statuses: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"accept", accept), (b"authorization", f"Bearer {names[name]}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/v1/runs/r/events", "headers": headers}
        await guard(scope, lambda: asyncio.sleep(0), send)  # type: ignore[arg-type, return-value]
        return statuses

    first = [asyncio.create_task(ask("a")) for _ in range(2)]
    await asyncio.sleep(0)
    assert await ask("a") == [429]
    others = [asyncio.create_task(ask("a", b"application/json"))]
    if keyed:
        others.append(asyncio.create_task(ask("b")))
    await asyncio.sleep(0)
    over.set()
    assert await asyncio.gather(*first, *others) == [[] for _ in (*first, *others)]
    assert await ask("a") == []
