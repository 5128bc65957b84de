"""Heartbeats of long activities, sent in the background."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from temporalio import activity

HEARTBEAT_S = 2.0
"""A fifth of what counts as lost. Servers send them for as long as their run lives."""


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Sends a heartbeat every HEARTBEAT_S, with its time, for as long as the block runs: none for a
    short one, since the server writes each to its database.

    It shows that the event loop is alive, not that the block makes progress: bound every wait.
    """

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            activity.heartbeat(datetime.now(UTC).isoformat(timespec="milliseconds"))

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


def last_beat() -> str:
    """When the previous attempt was last known to be alive (ISO 8601); '' without one, and for one
    of an older build, which reported no time.
    """
    details = activity.info().heartbeat_details
    return str(details[0]) if details else ""
