"""Proxies of the environment: for what is outside, and not for our own servers."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from ratchet.activities.inference.engine import engine_healthy
from ratchet.activities.runtime.children import reach_own_machine
from ratchet.activities.scoring.references import Endpoint, ReferenceLost, References
from ratchet.worker.stack import _healthy

DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "corp, 127.0.0.1"}, "corp,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_this_machine_needs_no_proxy(before: dict[str, str], after: str) -> None:
    env = {**before, "HTTP_PROXY": DEAD}
    reach_own_machine(env)
    assert env == {"NO_PROXY": after, "no_proxy": after, "HTTP_PROXY": DEAD}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[int, list[str]]]:
    """Answers any request with 200, and keeps the targets that it was asked for."""
    targets: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        targets.append(head.split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1], targets


def through(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)


async def test_a_teacher_may_be_behind_a_proxy_only(
    server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, targets = server
    through(monkeypatch, f"http://127.0.0.1:{port}")
    references = References()
    references.bind()
    teacher = Endpoint("http://teacher.invalid", "m")
    answer = await references.ask(teacher, "GET", "/v1/models")
    assert answer.status_code == 200 and targets == ["http://teacher.invalid/v1/models"]
    # The policy's engine is asked itself.
    engine = Endpoint(f"http://127.0.0.1:{port}", "m", live=True)
    await references.ask(engine, "GET", "/v1/models")
    assert targets[1:] == ["/v1/models"]
    monkeypatch.setenv("NO_PROXY", "teacher.invalid")
    inside = References()
    inside.bind()
    with pytest.raises(ReferenceLost):
        await inside.ask(teacher, "GET", "/v1/models")
    assert len(targets) == 2
    await references.close()
    await inside.close()


async def test_our_own_servers_are_reached_under_a_dead_proxy(
    server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, targets = server
    through(monkeypatch, DEAD)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")
    assert await engine_healthy(f"http://127.0.0.1:{port}")
    assert await asyncio.to_thread(_healthy, port)
    assert targets == ["/health", "/is_paused", "/healthz"]
