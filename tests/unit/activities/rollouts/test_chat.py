"""Labels of engines' weights: how often engines are asked, and that no reading is older than its
question.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from ratchet.activities.rollouts import chat


class Engine:
    """Answers with one label after the other."""

    def __init__(self) -> None:
        self.asked = 0
        self.refuses = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        body = f'{{"weight_version": "0.{self.asked}a"}}'.encode()
        status = b"500 no" if self.refuses else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Engine, str]]:
    """An engine and its address."""
    engine = Engine()
    server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
    async with server:
        yield engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_who_asks_at_the_same_time_shares_a_reading() -> None:
    async with served() as (engine, url), served() as (other, at):
        labels = chat.Labels()
        found = await asyncio.gather(*(labels.read(url) for _ in range(16)), labels.read(at))
        assert found == ["0.1a"] * 17 and (engine.asked, other.asked) == (1, 1)


async def test_a_reading_begins_after_its_question() -> None:
    async with served() as (engine, url):
        labels = chat.Labels()
        first = asyncio.create_task(labels.read(url))
        while not engine.asked:
            await asyncio.sleep(0.001)
        assert await labels.read(url) == "0.2a" and await first == "0.1a"


async def test_a_reading_outlives_one_who_asked_and_fails_for_all() -> None:
    async with served() as (engine, url):
        labels = chat.Labels()
        gone, stays = (asyncio.create_task(labels.read(url)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == "0.1a" and gone.cancelled()
        engine.refuses = True
        refused = await asyncio.gather(labels.read(url), labels.read(url), return_exceptions=True)
        assert all(isinstance(error, httpx.HTTPStatusError) for error in refused)
        engine.refuses = False
        assert await labels.read(url) == "0.3a", "the next one asks again"


@pytest.mark.parametrize("path", ["", "/"])
async def test_an_address_may_end_in_a_slash(path: str) -> None:
    async with served() as (_, url):
        assert await chat.read_label(url + path) == "0.1a"
