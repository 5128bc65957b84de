"""An API that listens, ways to it that break, and what is done to runs through it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import ASGIApp

from ratchet.api.app import create_app
from ratchet.api.client import Ratchet
from ratchet.api.schemas.events import Event
from tests.unit.api.conftest import (
    WITHIN_S,
    Served,
    connection,
    listening,
)

on_server = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def serving(served: Served, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> Any:
    """The address of an API of the same runs."""
    async with listening(wrap(create_app(served.settings, connection(served.env)))) as http:
        yield str(http.base_url).rstrip("/")


@dataclass
class Breaking:
    """A way to a server that breaks its connections after so many bytes of answers, in turn."""

    address: str
    cuts: list[int]
    broken: int = 0


@asynccontextmanager
async def breaking(address: str, *cuts: int) -> AsyncIterator[Breaking]:
    port = int(address.rpartition(":")[2])
    way = Breaking("", [*cuts])

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(65536):
            sink.write(chunk)
            await sink.drain()

    async def answers(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        left = 0
        begun = False
        while chunk := await source.read(65536):
            if not begun:
                begun, left = True, way.cuts.pop(0) if way.cuts else 2**60
            sink.write(chunk[:left])
            await sink.drain()
            left -= len(chunk)
            if left <= 0:
                way.broken += 1
                return

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer), closing(up_writer):
            asking = asyncio.create_task(pump(reader, up_writer))
            await answers(up_reader, writer)
            asking.cancel()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    way.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield way
    server.close()


async def make_steps(served: Served, run_id: str, *numbers: int) -> None:
    handle = served.env.client.get_workflow_handle(run_id)
    for number in numbers:
        await handle.signal("make_step", number)
        await served.until(run_id, step=number)


def all_events(address: str, run_id: str, **options: Any) -> list[Event]:
    with Ratchet(address) as client:
        return [*client.runs.stream_events(run_id, patience_s=WITHIN_S, **options)]
