"""Patience with a store that fails: what took long to make is not let go at its first error.

Invariant: only StoreUnavailable is waited out, since `work` must not be repeated on a failure that
may have other reasons. It is repeated whole, so it must be idempotent, as commits are.
"""

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from temporalio import activity

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
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE_S
    reported = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except StoreUnavailable as error:
            if loop.time() >= until:
                raise
            if not reported:
                activity.logger.warning("tried again for up to %.0f s: %s", PATIENCE_S, error)
                reported = True
        await asyncio.sleep(random.uniform(*REST_S))
