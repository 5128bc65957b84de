"""Event-loop lag and resource usage of a worker process, recorded for the runs that it works for.

No decision depends on it. Every SAMPLE_S each role of the process adds a sample to the series of
each run for which it runs an activity, or has ended one since the previous sample. Invariants:

- Only activities of a run's own workflows count: the check of a config leaves nothing behind.
- No activity waits for a sample, and none fails because of one.
- A run that has ended gets one more sample at most.

Rollout workers are left out, since their gauges include both (`activities/rollouts/gauges.py`).
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.runtime.lag import LoopLag
from ratchet.activities.runtime.usage import Usage
from ratchet.activities.storage.series import Chunk, Series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.workflows.protocol.messages import DISPATCH, HOST, TRAINING_RUN

SAMPLE_S = 10.0
KEPT_S = 3600.0
"""How long a series without new samples can be continued in its chunk. One whose run comes back
later begins another chunk.
"""
OF_RUNS = (TRAINING_RUN, DISPATCH, HOST)
"""Types of the workflows that a run consists of; their ids begin with the run's."""

Work = tuple[str, str]
"""A role, and a run that it works for."""

log = logging.getLogger(__name__)


class LagRecorder:
    """Event-loop lag and usage of this process, once for each role and run it works for."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        # A restarted process may have its predecessor's name.
        self._process = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._lag = LoopLag()
        self._usage = Usage()
        self._inflight: Counter[Work] = Counter()
        self._ended: set[Work] = set()
        self._series: dict[Work, Series] = {}
        self._time = 0.0

    def interceptors(self, role: str) -> list[Interceptor]:
        """What a worker of `role` needs so that its runs are known; nothing for 'rollout'."""
        return [] if role == "rollout" else [_Watch(self, role)]

    @contextmanager
    def working(self, role: str, run: str) -> Iterator[None]:
        """Marks the time in which an activity of `run` runs."""
        work = (role, workflow_of(run))
        self._inflight[work] += 1
        try:
            yield
        finally:
            self._inflight[work] -= 1
            if not self._inflight[work]:
                del self._inflight[work]
            self._ended.add(work)

    async def run(self) -> None:
        """Measures and records until cancelled."""
        self._lag.start()
        try:
            while True:
                await asyncio.sleep(SAMPLE_S)
                await self._record()
        finally:
            self._lag.stop()

    async def _record(self) -> None:
        try:
            usage = await asyncio.to_thread(self._usage.take)
            await asyncio.to_thread(_write, self._store, self._sample(usage))
        except Exception:
            # A gauge must not fail a run. The next sample's chunk includes this one, too.
            log.warning("event-loop lag was not stored", exc_info=True)

    def _sample(self, usage: dict[str, Any]) -> list[Chunk]:
        """Takes one sample for each role and run that has work."""
        lag = self._lag.take()
        if lag is None:
            return []
        working = sorted({*self._inflight, *self._ended})
        self._ended.clear()
        # It rises, even if the clock is set back.
        self._time = now = max(time.time(), self._time + 0.001)
        sample = {"time": now, "event_loop_lag": lag, "usage": usage}
        for role, run in working:
            self._series.setdefault((role, run), Series(run, f"{role}-{self._process}"))
        chunks = [self._series[work].add(sample) for work in working]
        self._series = {w: s for w, s in self._series.items() if s.last > now - KEPT_S}
        return chunks


def _write(store: ArtifactStore, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        chunk.write(store)


class _Watch(Interceptor):
    """Reports to a recorder every activity of a run that a role's workers run."""

    def __init__(self, recorder: LagRecorder, role: str) -> None:
        self._recorder, self._role = recorder, role

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """Wraps the activities of a worker."""
        return _Inbound(next, self._recorder, self._role)


class _Inbound(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, recorder: LagRecorder, role: str) -> None:
        super().__init__(next)
        self._recorder, self._role = recorder, role

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        if info.workflow_id is None or info.workflow_type not in OF_RUNS:
            return await super().execute_activity(input)
        with self._recorder.working(self._role, info.workflow_id.partition("/")[0]):
            return await super().execute_activity(input)
