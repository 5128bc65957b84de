"""Keeps the services of a local stack alive: Temporal, the API, the workers.

`python -m ratchet.worker.supervisor` starts the stack and supervises it, in the foreground, until
SIGTERM or Ctrl-C takes it down; `make up` leaves one in the background. Servers of runs are not its
job but that of the runs' own hosts. Invariants:

- A service that ended is restarted: at once the first time, then after waits that double up to
  LONGEST_REST_S, until it has been healthy for STEADY_S. It is retried forever, since what it lacks
  may become available; from LOOPS_AFTER ends in a row on its state is 'crash-looping'.
- A service that answered once and then is silent for SILENT_S, or has not answered for
  READY_WITHIN_S after its start, is ended by SIGKILL and restarted: a stalled worker holds work
  that another must take over. Temporal gives up on a worker's work after HEARTBEAT anyway.
- A service that is silent because it computes, or waits for a core, is starved and not stalled, and
  gets STARVED_S (after its start STARTS_WITHIN_S): on a busy machine a restart would only cost more
  time.
- Only probes that were on time count: a supervisor that stood still itself has seen nothing.
- A service that runs when the supervisor starts is adopted, according to stack.json; one that is
  not recorded there never ran, and its first start is not a restart.
- Workers are started only while Temporal answers: without it they end at once.
- No signal interrupts a start: a process without a record would belong to nobody.
- States are written wherever they change, for `make status` and the API.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from ratchet.activities.contracts.redact import log_without_secrets, writable
from ratchet.activities.contracts.services import ServiceState, ServiceStatus, services_file
from ratchet.activities.hosting.keeper import write_record
from ratchet.configs.home import home_folder
from ratchet.worker.stack import (
    READY_WITHIN_S,
    Stack,
    StackError,
    only_supervisor,
)

EVERY_S = 0.5
PROBE_LIMIT_S = 2.0
SILENT_S = 7.0
"""How long a service may be silent. With a probe, a check and a worker's start it takes at most
15 s from a stall to a worker that takes over its work.
"""
HUNG_S = 9.0
"""How long the event loop of a service that answers may stand still. A second later its work would
be lost (HEARTBEAT); this leaves enough time to replace it within 15 s.
"""
STARVED_S = 60.0
STARTS_WITHIN_S = 3 * READY_WITHIN_S
MISSES = 3
"""How many checks in a row must also have found it so: a machine that stood still as a whole gives
each process time to recover.
"""
LATE_S = 1.0
"""A probe that ends this long after its limit means that the supervisor itself stood still."""
TURNS_EVERY_S = 2.0
"""A lag below this does not count."""
LONGEST_REST_S = 30.0
STEADY_S = 30.0
LOOPS_AFTER = 3

log = logging.getLogger(__name__)


def rest_before_start(ends: int) -> float:
    """Seconds to wait before a restart after so many ends in a row."""
    return 0.0 if ends <= 1 else min(2.0 ** (ends - 2), LONGEST_REST_S)


@dataclass
class Watched:
    """What is known about one service. Pure; times are monotonic seconds.

    It was started at `begun`, last `seen` (None: not since), and will be started at `start_at`
    (None: it runs). `ends` are those in a row, `misses` probes in a row without an answer, `lags`
    those in a row that found its event loop late. `demand` is what `demand_of` returned when it was
    last well.
    """

    begun: float
    seen: float | None = None
    steady_from: float | None = None
    start_at: float | None = None
    ends: int = 0
    restarts: int = 0
    misses: int = 0
    lags: int = 0
    demand: float = 0.0

    def on_ended(self, now: float) -> None:
        """Called when it was found to have ended."""
        if self.start_at is None:
            self.ends += 1
            self.start_at = now + rest_before_start(self.ends)

    def on_started(self, now: float) -> None:
        """Called when it was restarted."""
        self.begun, self.seen, self.steady_from, self.start_at = now, None, None, None
        self.restarts += self.ends > 0
        self.misses = self.lags = 0
        self.demand = 0.0

    def on_answer(self, now: float, lag_s: float, demand: float) -> None:
        """Called when it answered that its event loop last turned `lag_s` ago."""
        self.seen, self.misses = now - lag_s, 0
        if lag_s < TURNS_EVERY_S:
            self.lags, self.demand = 0, demand
        else:
            self.lags += 1
        self.steady_from = now if self.steady_from is None else self.steady_from
        if now - self.steady_from >= STEADY_S:
            self.ends = 0

    def on_silence(self) -> None:
        """Called when it did not answer."""
        self.misses += 1

    def is_lost(self, now: float, demand: float) -> bool:
        """Whether it runs and should be ended."""
        silent_s = now - (self.begun if self.seen is None else self.seen)
        # The demand of threads that have ended since is no longer counted.
        starved = max(0.0, demand - self.demand) >= silent_s / 2
        if self.seen is None:
            within_s = STARTS_WITHIN_S if starved else READY_WITHIN_S
        elif starved:
            within_s = STARVED_S
        else:
            within_s = SILENT_S if self.misses else HUNG_S
        return silent_s >= within_s and max(self.misses, self.lags) >= MISSES

    @property
    def state(self) -> ServiceStatus:
        """Its state."""
        if self.ends >= LOOPS_AFTER:
            return "crash-looping"
        if self.start_at is not None:
            return "down"
        return "starting" if self.seen is None else "up"


def demand_of(pid: int) -> float:
    """Seconds that a process has computed, including threads that have ended, plus the seconds that
    its threads have waited for a core. A kernel without schedstat does not report the latter.
    """
    computed, waited = 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        computed = times.user + times.system
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        # Threads end while they are counted.
        with contextlib.suppress(OSError):
            waited += int(file.read_text().split()[1])
    return computed + waited / 1e9


class Supervisor:
    """Supervises the planned services of a stack; `started` is called with the name of each one
    that is restarted.
    """

    def __init__(self, stack: Stack, started: Callable[[str], None] = lambda name: None) -> None:
        self._stack = stack
        self._started = started
        now = time.monotonic()
        self._watched = {
            name: Watched(now, start_at=None if name in stack.record["processes"] else now)
            for name in stack.services
        }
        self._states: dict[str, ServiceState] = {}

    async def run(self) -> None:
        """Supervises them until it is cancelled."""
        async with httpx.AsyncClient(timeout=PROBE_LIMIT_S, trust_env=False) as http:
            kept = asyncio.create_task(self._keep_ended_runs())
            try:
                while True:
                    await asyncio.gather(*(self._look(http, name) for name in self._watched))
                    self._publish()
                    await asyncio.sleep(EVERY_S)
            finally:
                kept.cancel()

    async def _keep_ended_runs(self) -> None:
        """Configures that once Temporal answers; its database remembers."""
        while "temporal" in self._watched:
            await asyncio.sleep(EVERY_S)
            if not self._has_temporal():
                continue
            try:
                await asyncio.to_thread(self._stack.keep_ended_runs)
                return
            except StackError as error:
                log.warning("%s", error)
                await asyncio.sleep(LONGEST_REST_S)

    def _has_temporal(self) -> bool:
        temporal = self._watched.get("temporal")
        return temporal is None or (temporal.start_at is None and temporal.seen is not None)

    async def _look(self, http: httpx.AsyncClient, name: str) -> None:
        watched, process = self._watched[name], self._stack.alive(name)
        if process is None:
            self._revive(name, watched)
            return
        asked = time.monotonic()
        lag_s = await self._lag(http, name)
        now, demand = time.monotonic(), demand_of(process.pid)
        if lag_s is None and now - asked > PROBE_LIMIT_S + LATE_S:
            return
        if lag_s is None:
            watched.on_silence()
        else:
            watched.on_answer(now, lag_s, demand)
        if watched.is_lost(now, demand):
            how = "is silent" if lag_s is None else f"has stood still for {lag_s:.0f} s"
            log.warning("%s %s and is killed, to be restarted", name, how)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _revive(self, name: str, watched: Watched) -> None:
        now = time.monotonic()
        watched.on_ended(now)
        if watched.start_at is None or now < watched.start_at:
            return
        if name.startswith("worker-") and not self._has_temporal():
            return
        try:
            self._stack.revive(name)
        except OSError as error:
            # A full disk, no free process: it may pass.
            log.warning("%s cannot be started: %s", name, error)
            watched.start_at = now + LONGEST_REST_S
            return
        watched.on_started(now)
        if watched.ends:
            log.warning("%s had ended and was restarted (%d in a row)", name, watched.ends)
            self._started(name)

    async def _lag(self, http: httpx.AsyncClient, name: str) -> float | None:
        """How long ago the event loop of a service last turned, in seconds; None: no answer."""
        try:
            answer = await http.get(self._stack.health_url(name))
        except httpx.HTTPError:
            return None
        if "event_loop_lag_s" not in answer.text:
            return 0.0
        worker = answer.json()
        # A service started by an older build does not report `ready`.
        return float(worker["event_loop_lag_s"]) if worker.get("ready", True) else None

    def _publish(self) -> None:
        file, before = services_file(self._stack.home), self._states
        now = datetime.now(UTC).isoformat()
        self._states = {}
        for name, watched in self._watched.items():
            past = before.get(name)
            since = past.since if past and past.state == watched.state else now
            self._states[name] = ServiceState(
                name, watched.state, since, watched.restarts, watched.ends, f"logs/{name}.log"
            )
        try:
            if self._states != before:
                write_record(file, [asdict(state) for state in self._states.values()])
            os.utime(file)
        except OSError as error:
            log.warning("states of services cannot be written: %s", error)
            self._states = {}


async def mind(stack: Stack) -> None:
    """Supervises a stack until a signal asks it to end, and then takes the stack down. Raises
    StackError if the plan is refused.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    stack.plan()
    minding = asyncio.create_task(Supervisor(stack).run())
    asked = asyncio.create_task(ended.wait())
    await asyncio.wait([minding, asked], return_when=asyncio.FIRST_COMPLETED)
    if not ended.is_set():
        await minding
    minding.cancel()
    await asyncio.wait([minding])
    # It blocks the loop, so that no further signal interrupts it.
    stack.down()
    services_file(stack.home).unlink(missing_ok=True)


def main() -> int:
    """Entry point; returns the exit status."""
    log_without_secrets(logging.WARNING, "%(asctime)s %(levelname)s %(message)s")
    stack = Stack(home_folder())
    try:
        with only_supervisor(stack.home):
            asyncio.run(mind(stack))
    except StackError as error:
        print(f"supervisor: {writable(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
