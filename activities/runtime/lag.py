"""How late an event loop wakes up its tasks: a measure of how busy it is.

A worker whose loop is late sends heartbeats late, and notices late that work has ended.
"""

import asyncio
import time
from collections import deque
from statistics import fmean

from ratchet.activities.contracts.quantiles import quantile

PROBE_S = 0.1
WINDOW = 1000
"""Most probes kept; older ones are dropped."""


class LoopLag:
    """Probes the running event loop every PROBE_S between `start` and `stop`."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=WINDOW)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts probing, unless it already does."""
        if self._task is None:
            self._task = asyncio.create_task(self._probe())

    def stop(self) -> None:
        """Stops probing. Measurements are kept."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def take(self) -> dict[str, float] | None:
        """Statistics of the lags since the last call, in seconds: min, mean, median, p90, p99, max;
        and their number n. None if there were none.
        """
        lags = list(self._lags)
        self._lags.clear()
        if not lags:
            return None
        shares = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        result = {name: quantile(lags, share) for name, share in shares.items()}
        return {**result, "mean": fmean(lags), "n": len(lags)}

    async def _probe(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(PROBE_S)
            self._lags.append(max(0.0, time.monotonic() - began - PROBE_S))
