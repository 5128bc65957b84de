"""Forwards runs from the API to one target, in order and exactly once.

A series is the run itself, and `RUN.gauges` has the gauges of its workers, of all attempts, on a
clock's axis. A run that was resumed from before the last step sent repeats some steps: its whole
curve goes to a series `RUN+<attempt>`, and the previous series keeps what it has. If no step is
repeated, the series continues. A fork has the curve that the API shows.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.client import Ratchet, RatchetError
from ratchet.api.schemas.metrics import EvalRecord
from ratchet.api.schemas.run import Run
from ratchet.worker.mirrors.records import eval_record, gauge_record, read_samples, step_record
from ratchet.worker.mirrors.state import LATE_S, Record, Sent, States
from ratchet.worker.mirrors.targets import Target

BATCH = 100
"""Most steps sent at once."""
GAUGES_BATCH = 1000
"""Most gauges; a target may take seconds for a batch of any size, and gauges are many."""
GAUGES = ".gauges"
"""Suffix of a series of gauges; no run's id has a dot."""
SAMPLES = 8
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 300.0

Fresh = Callable[[Run, Sent], list[Record] | None]

log = logging.getLogger("ratchet.mirrors")


class Forwarder:
    """One target's reader of the API. `alive` is called after every piece of progress; a table of
    an eval has at most `samples` rows.
    """

    def __init__(
        self,
        client: Ratchet,
        target: Target,
        states: States,
        wanted: Sequence[str],
        alive: Callable[[], None] = lambda: None,
        samples: int = SAMPLES,
    ) -> None:
        self._client = client
        self._target = target
        self._states = states
        self._wanted = wanted
        self._alive = alive
        self._samples = samples
        self._begun: set[str] = set()
        self._failures: dict[str, int] = {}

    def run_forever(self, every_s: float | None = None) -> None:
        """Queries every `every_s` seconds, the target's own choice by default; never returns."""
        failed = 0
        while True:
            failed = 0 if self.look() else failed + 1
            wait_s = every_s or self._target.every_s
            if failed:
                wait_s = min(LEAST_WAIT_S * 2.0 ** min(failed - 1, 20), MOST_WAIT_S)
            until = time.monotonic() + wait_s
            while (left := until - time.monotonic()) > 0:
                self._alive()
                time.sleep(min(left, 1.0))

    def look(self) -> bool:
        """One pass over all runs; returns whether neither the API nor the target failed.

        The first failure of the target ends the pass: most likely it is down for all runs. The run
        that it failed at comes last in the next pass, so that no run holds up the others.
        """
        well = True
        for run in self._runs():
            self._alive()
            try:
                self._forward(run)
            except RatchetError as error:
                log.warning("run %s: %s", run.id, error)
                well = False
            # A target is other people's code, with failures of any kind.
            except Exception as error:
                self._fail(run.id, error)
                return False
        return well

    def _runs(self) -> list[Run]:
        result: list[Run] = []
        for run_id in self._wanted:
            try:
                if run_id == "all":
                    result += self._client.runs.list(limit=100)
                else:
                    result.append(self._client.runs.retrieve(run_id))
            except RatchetError as error:
                log.warning("%s: %s", run_id, error)
        return sorted(result, key=lambda run: self._failures.get(run.id, 0))

    def _fail(self, run_id: str, error: Exception) -> None:
        self._failures[run_id] = self._failures.get(run_id, 0) + 1
        log.warning("run %s: the target failed and is retried: %r", run_id, error)
        for series in self._begun:
            try:
                self._target.end(series)
            except Exception as another:
                log.warning("series %s was not closed: %r", series, another)
        self._begun.clear()

    def _forward(self, run: Run) -> None:
        ended = f"{run.attempt} {run.status} {run.finished_at}" if run.status in ENDED else ""
        self._copy(run, run.id, ended, self._fresh)
        # Workers store their last gauges after the run has ended.
        over = run.finished_at is None or time.time() - run.finished_at.timestamp() > LATE_S
        self._copy(run, f"{run.id}{GAUGES}", ended if over else "", self._fresh_gauges)
        self._failures.pop(run.id, None)

    def _copy(self, run: Run, first: str, ended: str, fresh: Fresh) -> None:
        """Sends what was not sent yet, by the state of the series `first`. `ended` describes the
        end of a run that will not change any more.
        """
        sent = self._states.load(first)
        if ended and sent.settled == ended:
            return
        while True:
            sent = self._deliver(run.id, first, sent)
            batch = fresh(run, sent)
            if batch is None:
                name = attempt_id(run.id, run.attempt)
                if name == sent.name:
                    # The run was fetched before its latest attempt began.
                    return
                log.info("run %s continues from an earlier step, as series %s", run.id, name)
                self._let_go(sent.name)
                sent = Sent(name)
                continue
            if not batch:
                break
            sent = replace(sent, pending=tuple(batch), settled="")
            self._states.save(first, sent)
        if ended:
            self._states.save(first, replace(sent, settled=ended))
            self._let_go(sent.name)

    def _let_go(self, series: str) -> None:
        if series in self._begun:
            self._target.end(series)
            self._begun.remove(series)

    def _deliver(self, run_id: str, first_series: str, sent: Sent) -> Sent:
        """Sends what is pending, except for what the target has already, and commits that."""
        if not sent.pending:
            return sent
        first = sent.count
        if sent.name not in self._begun:
            first = self._target.begin(run_id, sent.name, sent.count, sent.mark)
            self._begun.add(sent.name)
        mark = sent.mark
        if left := sent.pending[first - sent.count :]:
            mark = self._target.send(sent.name, first, left)
        sent = sent.committed(mark)
        self._states.save(first_series, sent)
        self._alive()
        return sent

    def _fresh(self, run: Run, sent: Sent) -> list[Record] | None:
        """The next records to send, by step; None if the run does not continue what was sent."""
        page = self._client.runs.metrics(run.id, after_step=max(sent.step - 1, -1), limit=BATCH + 1)
        rows = [*page.data]
        if sent.step >= 0:
            # A repeated step is recorded at another time; everything before the last is its past.
            if not rows or (rows[0].step, rows[0].time) != (sent.step, sent.time):
                return None
            rows = rows[1:]
        more, rows = page.has_more or len(rows) > BATCH, rows[:BATCH]
        known = set(sent.evals)
        evals = [result for result in self._client.runs.evals(run.id) if result.epoch not in known]
        if more:
            # The rest of the evals goes with the rest of the steps.
            evals = [result for result in evals if (result.step or 0) <= rows[-1].step]
        records = [*map(step_record, rows), *(self._eval(run, result) for result in evals)]
        return sorted(records, key=lambda record: (record.step, record.eval))

    def _eval(self, run: Run, result: EvalRecord) -> Record:
        samples = read_samples(self._client, run.id, result, self._samples)
        self._alive()
        return eval_record(result, samples)

    def _fresh_gauges(self, run: Run, sent: Sent) -> list[Record]:
        """The next gauges to send, by time; those of one worker are ascending."""
        page = self._client.runs.gauges(run.id, after=sent.gauges_since, role="all")
        new = (sample for sample in page if sample.time > sent.gauges.get(sample.source, 0.0))
        records = filter(lambda record: record.values, map(gauge_record, new))
        return [*islice(records, GAUGES_BATCH)]
