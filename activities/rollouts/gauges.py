"""Gauges of one rollout worker process and run, for dashboards: the latest, and a series of them.

No decision depends on them. The live record is written at most once a second; a sample is taken
every SAMPLE_S while rollouts run, and when the last of them has ended.
"""

import asyncio
import time
import uuid
from collections import deque
from dataclasses import asdict
from typing import Any

from temporalio import activity

from ratchet.activities.contracts.rollouts import Gauges
from ratchet.activities.runtime.lag import LoopLag
from ratchet.activities.runtime.usage import Usage
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Chunk, Series
from ratchet.activities.storage.store import ArtifactStore

WRITE_S = 1.0
WINDOW_S = 10.0
SAMPLE_S = 10.0


class RunGauges:
    """What this process has done for one run. `worker` names the process.

    `inflight` counts the rollouts that this process executes.
    """

    def __init__(self, store: ArtifactStore, run_id: str, worker: str) -> None:
        self.store = store
        self.key = keys.live(run_id, f"rollout-{worker}")
        self.inflight = 0
        self.tokens = 0
        self.rollouts = 0
        self._dispatch, self._heard = Gauges(), 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()
        self._written = self._sampled = -float("inf")
        # A process that comes back may have its predecessor's name.
        self._series = Series(run_id, f"rollout-{worker}-{uuid.uuid4().hex[:6]}")
        self._lag = LoopLag()
        self._usage = Usage()
        self._writing = asyncio.Lock()
        self._sample_time = 0.0

    def hear(self, gauges: Gauges) -> None:
        """Takes the gauges that Dispatch sent with its latest work; they are of all workers."""
        self._dispatch, self._heard = gauges, time.time()

    def finished(self, sampled_tokens: int) -> None:
        """Counts a rollout that ended."""
        self.rollouts += 1
        self.tokens += sampled_tokens
        self._recent.append((time.monotonic(), sampled_tokens))

    def tokens_per_s(self) -> float:
        """Sampled tokens per second of rollouts that ended in the last seconds."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        span = min(WINDOW_S, max(now - self._started, 1.0))
        return sum(tokens for _, tokens in self._recent) / span

    async def write(self, *, force: bool = False) -> None:
        """Stores the gauges, unless they were stored less than a second ago, and samples them if
        that is due. To be called every few seconds during work, and with `force` at its end.
        """
        if force:
            self._lag.stop()
        else:
            self._lag.start()
        now = time.monotonic()
        if not force and (self._writing.locked() or now - self._written < WRITE_S):
            return
        self._written = now
        # One at a time, so that a slow write never overwrites a later one.
        async with self._writing:
            try:
                chunk = await self._sample(now, end=force)
                live = {"time": time.time(), "rollouts": self.rollouts, **self._value()}
                await asyncio.to_thread(self._store, live, chunk)
            except Exception:
                # A gauge that fails must not fail a rollout.
                activity.logger.warning("gauges were not stored", exc_info=True)

    def _value(self) -> dict[str, Any]:
        """This process's numbers, then those of Dispatch and when they arrived (`heard`, Unix)."""
        return {
            "worker_inflight": self.inflight,
            "sampled_tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s(), 1),
            "heard": self._heard,
            **asdict(self._dispatch),
        }

    async def _sample(self, now: float, *, end: bool) -> Chunk | None:
        """Takes a sample if it is due. The one at the end of work replaces one just taken."""
        if not end and now - self._sampled < SAMPLE_S:
            return None
        self._sampled = now
        usage = await asyncio.to_thread(self._usage.take)
        # It rises, even if the clock is set back.
        self._sample_time = moment = max(time.time(), self._sample_time + 0.001)
        own = {"event_loop_lag": self._lag.take(), "usage": usage}
        sample = {"time": moment, **self._value(), **own}
        return self._series.add(sample, replace_after=moment - WRITE_S if end else None)

    def _store(self, live: dict[str, Any], chunk: Chunk | None) -> None:
        self.store.write_live(self.key, live)
        if chunk is not None:
            chunk.write(self.store)
