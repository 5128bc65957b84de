"""Runs work that may block in a separate event loop, on a thread of a bounded pool.

Invariant: work does not outlive its caller, except for the step in which it blocks.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


async def aside(executor: Executor, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, awaited on a thread of `executor`; cancelling this cancels the work."""
    running: Future[Callable[[], object]] = Future()

    async def main() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        running.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work()

    def cancel(known: Future[Callable[[], object]]) -> None:
        # A closed loop has no work left to cancel.
        with contextlib.suppress(RuntimeError):
            known.result()()

    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, lambda: asyncio.run(main())
        )
    except asyncio.CancelledError:
        # If the work does not run yet, the callback is called as soon as it does.
        running.add_done_callback(cancel)
        raise
