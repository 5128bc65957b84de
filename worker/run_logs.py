"""The orchestrator's log of each run: a line about its pipeline every `log.interval` seconds, its
steps and its warnings, in logs/<run>/orchestrator.log below RATCHET_HOME.

Workflows pass views and lines on as log records, which are no commands: a replay emits none.
The log is for people; no decision depends on it. Invariants:

- The thread of a workflow does no more than append to a queue.
- A run has at most MOST_BYTES in each of KEPT + 1 files.
- A run without any sign of life for GONE_S belongs to another worker, or is over, and gets no
  more lines.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.logs import orchestrator_log
from ratchet.activities.contracts.names import LOG_LINE, LOG_VIEW
from ratchet.activities.contracts.redact import RedactingFormatter
from ratchet.activities.contracts.statuses import ENDED
from ratchet.activities.runtime.lag import LoopLag
from ratchet.configs.home import private_folder

TICK_S = 0.5
GONE_S = 150.0
"""Runs report at least once a minute: generations give signs of life."""
MOST_BYTES, KEPT = 2**20, 3
LOGGER = "temporalio.workflow"
DISPATCH = "/dispatch/"
FORMAT = RedactingFormatter("%(asctime)s %(levelname)s %(message)s")

View = Mapping[str, Any]


def log_file(home: Path, run: str) -> Path:
    """The path of the orchestrator's log of a run."""
    return home / orchestrator_log(run)


def pipeline_line(run: View, generations: Sequence[View], lag: View | None) -> str:
    """One line that combines the views of a run, of its generations, and the lag of this process's
    event loop.
    """
    parts = [
        f"pipeline: step {run['step']}" + (f"/{last}" if (last := run["max_steps"]) else ""),
        f"policy v{max(run['policy_version'], 0)}",
        f"batch {run['collected']}/{run['wanted']} {run['unit']}, {run['shipped_batches']} shipped",
    ]
    if generations:
        buffered = sum(view["buffered"] for view in generations)
        parts.append(f"{buffered} rollouts in unfinished groups")
        inflight: dict[str, int] = {}
        for view in generations:
            for place, count in view["inflight"].items():
                inflight[place] = inflight.get(place, 0) + count
        total = sum(inflight.values())
        permits = max(view["permits"] for view in generations)
        shown = ", ".join(f"{place} {inflight[place]}" for place in sorted(inflight))
        parts.append(f"in flight {total}/{permits}" + (f" ({shown})" if shown else ""))
        oldest = max(view["off_policy_max"] for view in generations)
        parts.append(f"off-policy at most {oldest}")
    evals = [f"{name} {e['groups']}/{e['of']}" for name, e in sorted(run["evals"].items())]
    parts += [f"evals {', '.join(evals)}"] if evals else []
    if lag is not None:
        parts.append(f"lag p99 {lag['p99'] * 1e3:.0f} ms, max {lag['max'] * 1e3:.0f} ms")
    if run["status"] != "running":
        parts.append(run["status"])
    parts += [f"waits for {run['waiting_for']}"] if run["waiting_for"] else []
    return " | ".join(parts)


@dataclass
class _Run:
    """What was received about a run: its own view, and those of its generations by workflow id."""

    file: RotatingFileHandler
    heard: float = 0.0
    due: float = 0.0
    view: View | None = None
    generations: dict[str, tuple[float, View]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.view is not None and self.view["status"] in ENDED


class RunLogs(logging.Filter):
    """The logs of all runs whose workflows this process runs."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        self._queue: deque[logging.LogRecord] = deque()
        self._runs: dict[str, _Run] = {}
        self._lag = LoopLag()

    def filter(self, record: logging.LogRecord) -> bool:
        """Takes the records that are for a run's log; views go nowhere else."""
        view = hasattr(record, LOG_VIEW)
        if (view or hasattr(record, LOG_LINE)) and hasattr(record, "temporal_workflow"):
            self._queue.append(record)
        return not view

    async def run(self) -> None:
        """Writes until cancelled."""
        logger = logging.getLogger(LOGGER)
        logger.addFilter(self)
        self._lag.start()
        try:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    await asyncio.to_thread(self.write, time.time())
                except OSError as error:
                    logging.warning("a run's log cannot be written: %s", error)
        finally:
            logger.removeFilter(self)
            self._lag.stop()

    def write(self, now: float) -> None:
        """Writes what has arrived since the last call, and the pipeline lines that are due."""
        while self._queue:
            self._take(self._queue.popleft())
        lag = None
        for name, run in [*self._runs.items()]:
            gone = now - run.heard > GONE_S
            if run.view is not None and not gone and (now >= run.due or run.over):
                lag = lag or self._lag.take()
                run.due = now + run.view["interval"]
                fresh = [view for at, view in run.generations.values() if now - at <= GONE_S]
                self._line(run, now, "INFO", pipeline_line(run.view, fresh, lag))
            if gone or run.over:
                run.file.close()
                del self._runs[name]

    def _take(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        workflow_id: str = fields["temporal_workflow"]["workflow_id"]
        name = workflow_id.partition("/")[0]
        if name not in self._runs:
            self._runs[name] = _Run(self._open(name))
        run = self._runs[name]
        run.heard = max(run.heard, record.created)
        if LOG_LINE in fields:
            self._line(run, record.created, record.levelname, fields[LOG_LINE])
        elif DISPATCH not in workflow_id:
            run.view = fields[LOG_VIEW]
        elif fields[LOG_VIEW]["closed"]:
            run.generations.pop(workflow_id, None)
        else:
            run.generations[workflow_id] = record.created, fields[LOG_VIEW]

    def _open(self, run: str) -> RotatingFileHandler:
        path = log_file(self._home, run)
        private_folder(path.parent)
        file = RotatingFileHandler(
            path, maxBytes=MOST_BYTES, backupCount=KEPT, encoding="utf-8", delay=True
        )
        file.setFormatter(FORMAT)
        return file

    @staticmethod
    def _line(run: _Run, at: float, level: str, text: str) -> None:
        about = {"created": at, "msecs": at % 1 * 1e3, "levelname": level}
        run.file.emit(logging.makeLogRecord({**about, "msg": " ".join(text.split())}))
