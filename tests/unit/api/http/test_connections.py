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
from starlette.types import Message, Receive, Scope, Send

from ratchet.api.app import create_app
from ratchet.api.http import bodies, connections, security
from ratchet.api.http.connections import BoundedProtocol
from ratchet.api.http.keyring import Keyring
from ratchet.api.http.security import Guard
from ratchet.api.schemas import keys as api_keys
from tests.unit.api.http.test_security import AWAY, settings

SOON_S = 20.0


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
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
    yield server.servers[0].sockets[0].getsockname()[1]
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


async def asked(port: int, *sent: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the reply to what is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(SOON_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split()[0])
            return int(head.split()[1]), json.loads(await reader.readexactly(length))
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


MIB = 1024 * 1024
HEADS = {
    "a whole address": [get(f"/healthz?a={'x' * 40_000}")],
    "a whole address of 1 MiB": [get(f"/healthz?{'a=1&' * (MIB // 4)}")],
    "an address without end": [b"GET /" + b"x" * 40_000, b"x" * MIB],
    "whole headers": [get(headers=f"x: {'y' * 40_000}\r\n")],
    "many headers": [get(headers="a:b\r\n" * (MIB // 5))],
    "headers without end": [get()[:-2], *[b"a: b\r\n" * 4000] * 3],
    "a header without end": [get()[:-2] + b"x: ", b"y" * MIB],
}


async def test_a_large_head_is_431(tmp_path: Path) -> None:
    async with serving(away(tmp_path)) as port:
        for name, head in HEADS.items():
            status, problem = await asked(port, *head)
            assert (status, problem["type"]) == (431, "urn:ratchet:problem:head-too-large"), name
        assert await refusals(port, "head-too-large") == len(HEADS)
        # What is not too large, in however many parts, is read.
        large = get(headers=f"x: {'y' * 30_000}\r\n")
        assert await asked(port, large) == await asked(port, *large.partition(b"yy"))
        assert (await asked(port, large))[0] == 200


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
    async with serving(away(tmp_path)) as port, asyncio.timeout(SOON_S):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        status, problem = await asked(port, get())
        assert (status, problem["type"]) == (503, "urn:ratchet:problem:too-many-connections")
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
        while (await asked(port, get()))[0] != 200:
            await asyncio.sleep(0)
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
