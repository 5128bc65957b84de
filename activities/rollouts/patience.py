"""Retries against a store that fails: one error does not lose results that took long to produce.

Invariant: only StoreUnavailable is retried, since any other failure may have reasons that a retry
does not change. `work` is repeated as a whole, so it must be idempotent, as commits are.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from temporalio import activity
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_random,
)

from ratchet.activities.storage.store import StoreUnavailable

PATIENCE_S = 60.0
"""Well below what an activity of rollouts may take beyond the rollouts themselves."""
REST_S = (1.0, 2.0)
"""Wait between tries, drawn from this range: hundreds of rollouts may wait for the same disk."""

T = TypeVar("T")


async def patiently(work: Callable[[], T]) -> T:
    """The result of `work`, called in a thread and repeated while the store cannot be used.

    After PATIENCE_S it raises the error of the last try. Cancelling the caller ends the retries.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_random(*REST_S),
        stop=stop_after_delay(PATIENCE_S),
        before_sleep=_report_first,
        reraise=True,
    )
    return await retrying(asyncio.to_thread, work)


def _report_first(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        error = state.outcome.exception()
        activity.logger.warning("tried again for up to %.0f s: %s", PATIENCE_S, error)
