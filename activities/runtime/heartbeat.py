"""Heartbeats of long activities, from the side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from temporalio import activity

HEARTBEAT_S = 1.0


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Heartbeats every HEARTBEAT_S for as long as the block runs, with the time of each.

    It shows that the event loop is alive, not that the block makes progress: bound every wait.
    """

    async def beat() -> None:
        while True:
            activity.heartbeat(datetime.now(UTC).isoformat(timespec="milliseconds"))
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


def last_beat() -> str:
    """When the attempt before this one was last known to be alive (ISO 8601); '' without one, and
    for one of an older build, which says no time.
    """
    told = activity.info().heartbeat_details
    return str(told[0]) if told else ""
