"""Heartbeats of long activities, from the side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from temporalio import activity

HEARTBEAT_S = 1.0


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Heartbeats every HEARTBEAT_S for as long as the block runs.

    It shows that the event loop is alive, not that the block makes progress: bound every wait.
    """

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
