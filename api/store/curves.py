"""Step metrics as columns, kept in memory: the source of every curve and table.

Records never change once committed, so each is read once per process. A run's curves follow its
lineage: its own records, and those of the attempt or run it was restored from up to that step.
Invariant: within one lineage a step has one record, so that no point is lost or doubled. A damaged
record costs its own step only, which is named; once it is restored, it is read.
"""

import csv
import io
import json
import logging
import math
import re
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from ratchet.activities.storage import curves as chunked
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

KEPT = 32
FRESH_S = 0.5
LISTED_S = 30.0
"""Between full listings, which find steps after a missing one, only the next steps are checked."""
GAP_S = 60.0
NAN = math.nan
ROWS_A_PART = 500

_RECORD = re.compile(r"step-([0-9]{1,18})\.json")

logger = logging.getLogger(__name__)


def _steps_of(result: Sequence[str]) -> list[int]:
    """The steps in keys, in their order; keys without a step are skipped."""
    names = (_RECORD.fullmatch(key.rpartition("/")[2]) for key in result)
    return [int(name[1]) for name in names if name]


@dataclass(frozen=True)
class Span:
    """Steps of one attempt that belong to a run: those above `first`, up to `last`."""

    attempt: str
    first: int
    last: int | None


class Columns:
    """The records of one attempt, ascending by step; a missing value is NaN."""

    def __init__(self, store: ArtifactStore, attempt: str) -> None:
        self._store = store
        self._attempt = attempt
        self._lock = threading.Lock()
        self._looked = self._listed = -math.inf
        self._last = -1
        self.damaged: dict[int, float] = {}
        """Steps whose record cannot be read, and when that was noticed (Unix seconds)."""
        self.healed = False
        """Whether one of them is readable now, so that everything must be read again."""
        self.steps = array("q")
        self.times = array("d")
        self.values: dict[str, array[float]] = {}

    def renew(self) -> None:
        """Reads what was committed since the last call. Blocks.

        A step is left out while one before it is missing, since that one may still be committed
        and readers page by step; unless it has been missing for a minute.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._looked < FRESH_S:
                return
            if now - self._listed < LISTED_S and self._last >= 0:
                self._read_next()
            else:
                self._read_all()
                self._listed = now
            self._looked = time.monotonic()

    def _read_next(self) -> None:
        """Reads the steps that follow, without a listing, which is slow for a long run."""
        while True:
            try:
                chunk = self._record(self._last + 1)
            except FileNotFoundError:
                return
            self._extend(self._last + 1, chunk)

    def _record(self, step: int) -> chunked.Chunk:
        """The record of a step; nothing if it is damaged. Raises FileNotFoundError."""
        try:
            ref = self._store.require(keys.step_record(self._attempt, step))
            record: dict[str, Any] = self._store.get_json(ref)
        except CorruptArtifact as damage:
            if step not in self.damaged:
                logger.error("step %d of %s is left out: %s", step, self._attempt, damage)
                self.damaged[step] = time.time()
            return chunked.Chunk([], [], {})
        return chunked.packed([{**record, "step": step}])

    def _sound(self, step: int) -> bool:
        try:
            return bool(self._record(step).steps)
        except FileNotFoundError:
            return False

    def _read_all(self) -> None:
        """Reads all steps that are committed, in whole chunks where possible."""
        result = _steps_of(self._store.committed_keys(keys.step_records(self._attempt)))
        ahead = [step for step in result if step > self._last]
        # An outage of the store is no damage, and raises.
        self.healed = any(self._sound(step) for step in self.damaged)
        chunks: set[int] = set()
        if len(ahead) >= chunked.CHUNK_STEPS:
            folder = keys.step_chunks(self._attempt)
            chunks = set(_steps_of(self._store.committed_keys(folder)))
        for step in ahead:
            first, end = chunked.bounds(step)
            if step <= self._last:
                # Already read with a chunk.
                continue
            chunk, last = None, end
            if step == first and end in chunks:
                chunk = chunked.read(self._store, self._attempt, end)
            if chunk is None:
                try:
                    chunk, last = self._record(step), step
                except FileNotFoundError:
                    continue
            if self._awaited(step, chunk.times[0] if chunk.steps else self.damaged[step]):
                return
            self._extend(last, chunk)

    def _awaited(self, step: int, reported: float) -> bool:
        """Whether a step before `step`, which was recorded at `reported`, may still appear."""
        if self._last < 0 or step == self._last + 1:
            return False
        return time.time() - reported < GAP_S

    def _extend(self, last: int, chunk: chunked.Chunk) -> None:
        """Adds the steps up to `last`."""
        rows, more = len(self.steps), len(chunk.steps)
        for name, input in chunk.metrics.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("d", [NAN]) * rows
            column.extend([NAN if value is None else value for value in input])
        for column in self.values.values():
            if len(column) == rows:
                column.extend(array("d", [NAN]) * more)
        # Readers go by the steps, so these are added last.
        self.times.extend(chunk.times)
        self.steps.extend(chunk.steps)
        self._last = last


def extremes(steps: Sequence[int], values: Sequence[float], points: int) -> list[int]:
    """Indexes of at most `points` (4 or more) of the finite values, ascending: the first and the
    last, and the lowest and highest of each of equal intervals in between.
    """
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if len(finite) <= points:
        return finite
    inner = finite[1:-1]
    buckets = (points - 2) // 2
    chosen = {finite[0], finite[-1]}
    for number in range(buckets):
        part = inner[number * len(inner) // buckets : (number + 1) * len(inner) // buckets]
        chosen.add(min(part, key=lambda index: values[index]))
        chosen.add(max(part, key=lambda index: values[index]))
    return sorted(chosen)


@dataclass(frozen=True)
class Table:
    """An excerpt of a run's metrics: rows of some steps, columns by name; NaN marks no value."""

    steps: list[int]
    times: list[float]
    columns: Mapping[str, Sequence[float]]
    damaged: Sequence[int] = ()
    """Steps of the range that are left out because their records are damaged."""

    def thinned(self, points: int) -> "Table":
        """At most `points` extremes of each column; rows without any are left out."""
        kept = {name: extremes(self.steps, v, points) for name, v in self.columns.items()}
        rows = sorted({index for indexes in kept.values() for index in indexes})
        place = {index: row for row, index in enumerate(rows)}
        columns = {}
        for name, indexes in kept.items():
            column = columns[name] = [NAN] * len(rows)
            for index in indexes:
                column[place[index]] = self.columns[name][index]
        times = [self.times[i] for i in rows]
        return Table([self.steps[i] for i in rows], times, columns, self.damaged)

    def first(self, limit: int) -> "Table":
        """The first `limit` rows."""
        columns = {name: values[:limit] for name, values in self.columns.items()}
        steps, damaged = self.steps[:limit], self.damaged
        if len(steps) < len(self.steps):
            damaged = [step for step in damaged if step < self.steps[limit]]
        return Table(steps, self.times[:limit], columns, damaged)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows as the API shows them; missing values are left out, non-finite ones are null."""
        names = list(self.columns)
        for row, step in enumerate(self.steps):
            result = {name: self.columns[name][row] for name in names}
            yield {
                "step": step,
                "time": self.times[row] or None,
                "metrics": {
                    name: value if math.isfinite(value) else None
                    for name, value in result.items()
                    if value == value
                },
            }

    def as_json(self, *, has_more: bool) -> bytes:
        """The list object as the API answers with it."""
        page = {
            "object": "list",
            "data": list(self.rows()),
            "has_more": has_more,
            "next_after": str(self.steps[-1]) if has_more else None,
            "damaged": [*self.damaged],
        }
        return json.dumps(page, separators=(",", ":"), allow_nan=False).encode()

    def as_csv(self) -> Iterator[str]:
        """CSV in pieces: a header (step, time, the columns by name), then the rows; missing values
        are empty.
        """
        names = sorted(self.columns)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["step", "time", *names])
        for row, step in enumerate(self.steps):
            values = [self.columns[name][row] for name in names]
            writer.writerow([step, self.times[row], *("" if v != v else repr(v) for v in values)])
            if row % ROWS_A_PART == ROWS_A_PART - 1:
                yield out.getvalue()
                out.seek(0)
                out.truncate()
        yield out.getvalue()


class Curves:
    """Metrics of all runs that were requested lately."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._kept: LRUCache[str, Columns] = LRUCache(KEPT)
        self._lock = threading.Lock()

    def _columns(self, attempt: str) -> Columns:
        with self._lock:
            result = self._kept.get(attempt)
            if result is None or result.healed:
                result = self._kept[attempt] = Columns(self._store, attempt)
        result.renew()
        return result

    def table(
        self,
        spans: Sequence[Span],
        *,
        after: int = -1,
        until: int | None = None,
        names: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> Table:
        """Rows above step `after` up to `until`, the first `limit` of them, with the columns of
        `names` (none: all). Blocks; raises StoreUnavailable.
        """
        damaged: list[int] = []
        steps: list[int] = []
        times: list[float] = []
        columns: dict[str, array[float]] = {}
        for span in spans:
            held = self._columns(span.attempt)
            low = max(after, span.first)
            high = min(x for x in (until, span.last, 2**62) if x is not None)
            damaged += sorted(step for step in list(held.damaged) if low < step <= high)
            start, stop = bisect_right(held.steps, low), bisect_right(held.steps, high)
            if limit is not None:
                stop = min(stop, start + limit - len(steps))
            if start >= stop:
                continue
            for name in list(held.values) if names is None else names:
                column = columns.setdefault(name, array("d", [NAN]) * len(steps))
                result = held.values.get(name)
                column.extend(result[start:stop] if result is not None else [NAN] * (stop - start))
            steps += held.steps[start:stop]
            times += held.times[start:stop]
            for column in columns.values():
                column.extend(array("d", [NAN]) * (len(steps) - len(column)))
        return Table(steps, times, columns, damaged)
