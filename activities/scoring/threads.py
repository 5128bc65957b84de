"""Work that may block, in an event loop of its own on a thread of a bounded pool.

Invariant: work does not outlive whoever waits for it, except for the step in which it blocks.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _Stop:
    """Carries the wish to stop to a task of another thread, before, while or after it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wished = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def started(self, task: asyncio.Task[Any]) -> None:
        """The running event loop is to cancel `task` when it is wished for."""
        with self._lock:
            self._running = (asyncio.get_running_loop(), task)
            if self._wished:
                task.cancel()

    def ended(self) -> None:
        """Wishes are not heard any more; called before the loop closes."""
        with self._lock:
            self._running = None

    def wish(self) -> None:
        """From another thread."""
        with self._lock:
            self._wished = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)


async def aside(executor: Executor, work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns, awaited on a thread of `executor`; cancelling this cancels the work."""
    stop = _Stop()

    async def one() -> T:
        return await work()

    async def main() -> T:
        task = asyncio.create_task(one())
        stop.started(task)
        try:
            return await task
        finally:
            stop.ended()

    def there() -> T:
        return asyncio.run(main())

    try:
        return await asyncio.get_running_loop().run_in_executor(executor, there)
    except asyncio.CancelledError:
        stop.wish()
        raise
