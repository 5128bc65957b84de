"""Connections that cost nothing to open: they end, and there are only so many."""

import asyncio
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
            app, http=BoundedProtocol, port=0, log_level="error", timeout_graceful_shutdown=1
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


async def test_a_body_that_does_not_come_is_408(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_WITHIN_S", 0.05)
    app = create_app(settings(tmp_path, RATCHET_STORE=f"file://{tmp_path}/store"), AWAY)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(SOON_S)

    async with serving(app) as port, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"http://127.0.0.1:{port}/v1/runs",
            content=slow(),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 408 and answer.json()["type"].endswith("body-too-slow")


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
