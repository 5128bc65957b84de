"""Replies shared by requests of about the same moment, so that many watchers cost one call.

Invariant: a reply is dropped once it is out of date, so that memory holds only those of the last
moment.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Callers that arrive during a call get its result, which is reused for `fresh_s` seconds."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._calls: dict[str, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """The shared answer for `key`; raises what the call raised."""
        now = time.monotonic()
        held = self._calls.get(key)
        if held is None or (held[1].done() and now - held[0] > self._fresh_s):
            task: asyncio.Task[T] = asyncio.ensure_future(call())  # type: ignore[arg-type]
            task.add_done_callback(lambda done: self._expire(key, done))
            held = self._calls[key] = (now, task)
        if held[1].done():
            return held[1].result()
        # Shielded: a caller that gives up must not cancel the call for the others.
        return await asyncio.shield(held[1])

    def forget(self, key: str) -> None:
        """The next caller gets a result of their own."""
        self._calls.pop(key, None)

    def _expire(self, key: str, task: asyncio.Task[T]) -> None:
        def drop() -> None:
            if key in self._calls and self._calls[key][1] is task:
                del self._calls[key]

        asyncio.get_running_loop().call_later(self._fresh_s, drop)
