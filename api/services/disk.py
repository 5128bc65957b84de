"""How many bytes of the store each run takes, without walking its files at every request.

A run is measured when it is shown and the last measurement is out of date, in a separate thread,
one run at a time; until then the last result is reported. While MOST_WAITING runs wait for that,
further ones are measured only when they are shown again. What a run takes a minute after its end
no longer changes.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cachetools import LRUCache

from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable
from ratchet.api.schemas.run import Run
from ratchet.api.store.removal import size_of

KEPT = 50_000
FRESH_S = 60.0
MOST_WAITING = 200
LATE_S = 60.0
"""For how long after its end a run's workers may still write."""
SHARE = 20.0
"""A run is measured again after so many times as long as the measurement took."""


@dataclass(frozen=True)
class _Measured:
    size: int
    at: float
    """Unix time at which the measurement began."""
    until: float
    """Monotonic time until which it is used."""


class Disk:
    """Disk usage of runs. Created in a running event loop or before; used in one only."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._known: LRUCache[str, _Measured] = LRUCache(KEPT)
        self._measuring: dict[str, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")

    async def shown(self, run: Run, wait_s: float = 0.0) -> Run:
        """The run with its disk usage. If it was never measured, waits at most `wait_s`."""
        known = self._known.get(run.id)
        if known is None or not _final(run, known):
            task = self._measuring.get(run.id)
            due = known is None or time.monotonic() > known.until
            if task is None and due and len(self._measuring) < MOST_WAITING:
                task = self._measuring[run.id] = asyncio.create_task(self._measure(run.id))
            if known is None and task and wait_s:
                await asyncio.wait([task], timeout=wait_s)
                known = self._known.get(run.id)
        return run.model_copy(update={"disk": known.size if known else None})

    def forget(self, run_id: str) -> None:
        """Drops a deleted run."""
        self._known.pop(run_id, None)

    async def _measure(self, run_id: str) -> None:
        at, began = time.time(), time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            size = await loop.run_in_executor(self._thread, size_of, self._store, run_id)
            now = time.monotonic()
            serves_s = max(FRESH_S, SHARE * (now - began))
            self._known[run_id] = _Measured(size, at, now + serves_s)
        except StoreUnavailable:
            # A run can be shown while the store is away.
            pass
        finally:
            del self._measuring[run_id]


def _final(run: Run, known: _Measured) -> bool:
    """Whether a measurement of a run is final."""
    return run.finished_at is not None and known.at > run.finished_at.timestamp() + LATE_S
