"""How long rollouts have executed, by the clock of the engine that they run on.

The clock stops while the engine is paused for new weights, and runs slower while requests queue
inside it: if it runs R requests and W wait, it executes each of them for R / (R + W) of the time,
on average. Waits for a permit come before a rollout begins.

Invariant: a rollout times out only upon a reading of its engine that is not older than the limit.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from ratchet.activities.inference.load import READ_LIMIT_S, executing_share
from ratchet.activities.runtime.tls import shared_context

READINGS = 24
"""How often an engine is read until a rollout has used up its limit: a pause or queue between two
readings counts as the later one saw it.
"""
TICK_S = 1.0
"""Least time between two readings for this."""
SHORTEST_TICK_S = 0.25
"""Least time between two readings, so that a rollout near its limit does not flood its engine."""


@dataclass(eq=False)
class _Rollout:
    limit: float
    deadline: asyncio.Timeout
    read: float
    executed: float = 0.0

    def advance(self, now: float, share: float) -> None:
        """Counts `share` of the time since the last reading; ends the rollout at its limit."""
        self.executed += share * (now - self.read)
        self.read = now
        if self.executed >= self.limit and not self.deadline.expired():
            self.deadline.reschedule(now)

    @property
    def due(self) -> float:
        """When its engine is to be read again: it may have reached its limit then."""
        tick = max(TICK_S, self.limit / READINGS)
        return self.read + min(tick, max(self.limit - self.executed, SHORTEST_TICK_S))


class EngineClock:
    """The clock of the engine at `url`, read only for rollouts that last longer than a tick."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport
        self._rollouts: set[_Rollout] = set()
        self._ticking: asyncio.Task[None] | None = None
        # When `_rest` looks again, and whether a rollout has come that it is to look for before.
        self._due = math.inf
        self._sooner = asyncio.Event()

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError in a block that has executed for `seconds`."""
        async with asyncio.timeout(None) as deadline:
            rollout = _Rollout(seconds, deadline, asyncio.get_running_loop().time())
            self._rollouts.add(rollout)
            if self._ticking is None:
                self._ticking = asyncio.create_task(self._tick())
            if rollout.due < self._due:
                self._sooner.set()
            try:
                yield
            finally:
                self._rollouts.remove(rollout)
                if not self._rollouts:
                    self._ticking.cancel()
                    self._ticking = None

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        await self._rest()
        async with httpx.AsyncClient(
            base_url=self._url,
            timeout=READ_LIMIT_S,
            transport=self._transport,
            verify=shared_context(),
            trust_env=False,
        ) as client:
            while True:
                share = await executing_share(client)
                for rollout in self._rollouts:
                    rollout.advance(loop.time(), share)
                await self._rest()

    async def _rest(self) -> None:
        """Waits until the engine is to be read for a rollout that still executes."""
        loop = asyncio.get_running_loop()
        while (due := min(rollout.due for rollout in self._rollouts)) > loop.time():
            self._due = due
            self._sooner.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._sooner.wait()
