"""Patience with a store that fails: results that took long to produce are not lost to one error.

Invariant: only StoreUnavailable is waited out, since `work` must not be repeated on a failure that
may have other reasons. It is repeated whole, so it must be idempotent, as commits are.
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
"""Between tries; drawn from this range, as hundreds of rollouts may wait for the same disk."""

T = TypeVar("T")


async def patiently(work: Callable[[], T]) -> T:
    """What `work` returns, called in a thread; again and again while the store cannot be used.

    After PATIENCE_S it raises what the last try raised. A caller that is cancelled tries no more.
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
