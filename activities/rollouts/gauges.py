"""Live gauges of one rollout worker process and run, for dashboards.

Nothing decides anything by them. Written at most once a second.
"""

import asyncio
import time
from collections import deque
from dataclasses import asdict

from temporalio import activity

from activities.contracts.rollouts import Gauges
from activities.storage import keys
from activities.storage.store import ArtifactStore

WRITE_S = 1.0
WINDOW_S = 10.0


class RunGauges:
    """What this process has done for one run. `worker` names the process."""

    def __init__(self, store: ArtifactStore, run_id: str, worker: str) -> None:
        self.store = store
        self.key = keys.live(run_id, f"rollout-{worker}")
        self.inflight = 0
        self.tokens = 0
        self.rollouts = 0
        self.dispatch = Gauges()
        self._recent: deque[tuple[float, int]] = deque()
        self._written = 0.0
        self._started = time.monotonic()

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
        """Stores the gauges, unless they were stored less than a second ago."""
        now = time.monotonic()
        if not force and now - self._written < WRITE_S:
            return
        self._written = now
        value = {
            "time": time.time(),
            "inflight": self.inflight,
            "sampled_tokens": self.tokens,
            "rollouts": self.rollouts,
            "tokens_per_s": round(self.tokens_per_s(), 1),
            **asdict(self.dispatch),
        }
        try:
            await asyncio.to_thread(self.store.write_live, self.key, value)
        except Exception:
            # No rollout is worth losing over a gauge.
            activity.logger.warning("gauges were not stored", exc_info=True)
