"""Step metrics as columns, kept in memory: what every curve and table is cut from.

Records never change once committed, so each is read once a process. A run's curves follow its
lineage: its own records, and those of the attempt or run it was restored from up to that step.
Invariant: within one lineage a step has one record, so that no point is lost or doubled.
"""

import csv
import io
import json
import math
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from activities.storage import curves as chunked
from activities.storage import keys
from activities.storage.store import ArtifactStore

KEPT = 32
FRESH_S = 0.5
LISTED_S = 30.0
"""Between full listings, which find steps after a missing one, only the next are looked for."""
GAP_S = 60.0
NAN = math.nan


def _step_of(key: str) -> int:
    return int(key.rsplit("step-", 1)[1].removesuffix(".json"))


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
        self.steps = array("q")
        self.times = array("d")
        self.values: dict[str, array[float]] = {}

    def renew(self) -> None:
        """Reads what was committed since. Blocks.

        A step is left out while one before it is missing, since that may yet be committed and
        readers page by step; unless it has been missing for a minute.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._looked < FRESH_S:
                return
            if now - self._listed < LISTED_S and self.steps:
                self._read_next()
            else:
                self._read_all()
                self._listed = now
            self._looked = time.monotonic()

    def _read_next(self) -> None:
        """Reads the steps that follow; a listing of a long run takes its time."""
        while True:
            step = self.steps[-1] + 1
            ref = self._store.committed(keys.step_record(self._attempt, step))
            if ref is None:
                return
            self._add(step, self._store.get_json(ref))

    def _read_all(self) -> None:
        """Reads all steps that are committed: by chunks where whole ones are ahead."""
        last = self.steps[-1] if self.steps else -1
        found = map(_step_of, self._store.committed_keys(keys.step_records(self._attempt)))
        ahead = [step for step in found if step > last]
        chunks: set[int] = set()
        if len(ahead) >= chunked.CHUNK_STEPS:
            folder = keys.step_chunks(self._attempt)
            chunks = set(map(_step_of, self._store.committed_keys(folder)))
        row = 0
        while row < len(ahead):
            step = ahead[row]
            first, end = chunked.bounds(step)
            chunk = None
            if step == first and end in chunks:
                chunk = chunked.read(self._store, self._attempt, end)
            if chunk is None:
                key = keys.step_record(self._attempt, step)
                record = self._store.get_json(self._store.require(key))
                if self._awaited(step, chunked.time_of(record)):
                    return
                self._add(step, record)
                row += 1
            else:
                if self._awaited(step, chunk.times[0]):
                    return
                self._extend(chunk)
                row = bisect_right(ahead, end)

    def _awaited(self, step: int, told: float) -> bool:
        """Whether a step before `step`, which was recorded at `told`, may yet come."""
        if not self.steps or step == self.steps[-1] + 1:
            return False
        return time.time() - told < GAP_S

    def _add(self, step: int, record: dict[str, Any]) -> None:
        self._extend(chunked.packed([{**record, "step": step}]))

    def _extend(self, chunk: chunked.Chunk) -> None:
        rows, more = len(self.steps), len(chunk.steps)
        for name, given in chunk.metrics.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("d", [NAN]) * rows
            column.extend([NAN if value is None else value for value in given])
        for column in self.values.values():
            if len(column) == rows:
                column.extend(array("d", [NAN]) * more)
        # Readers go by the steps, so these come last.
        self.times.extend(chunk.times)
        self.steps.extend(chunk.steps)


def extremes(steps: Sequence[int], values: Sequence[float], points: int) -> list[int]:
    """Indexes of at most `points` (4 or more) of the finite values, ascending: the first and the
    last, and the lowest and highest of each of equal stretches of what is between.
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
    """A cut through a run's metrics: rows of some steps, columns by name; NaN where nothing is."""

    steps: list[int]
    times: list[float]
    columns: dict[str, list[float]]

    def thinned(self, points: int) -> "Table":
        """Of each column only its extremes, at most `points`; rows without any are left out."""
        kept = {name: extremes(self.steps, v, points) for name, v in self.columns.items()}
        rows = sorted({index for indexes in kept.values() for index in indexes})
        place = {index: row for row, index in enumerate(rows)}
        columns = {}
        for name, indexes in kept.items():
            columns[name] = [NAN] * len(rows)
            for index in indexes:
                columns[name][place[index]] = self.columns[name][index]
        return Table([self.steps[i] for i in rows], [self.times[i] for i in rows], columns)

    def first(self, limit: int) -> "Table":
        """The first `limit` rows."""
        columns = {name: values[:limit] for name, values in self.columns.items()}
        return Table(self.steps[:limit], self.times[:limit], columns)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows as the API shows them; what is missing is left out, what is not finite null."""
        names = list(self.columns)
        for row, step in enumerate(self.steps):
            found = {name: self.columns[name][row] for name in names}
            yield {
                "step": step,
                "time": self.times[row] or None,
                "metrics": {
                    name: value if math.isfinite(value) else None
                    for name, value in found.items()
                    if value == value
                },
            }

    def as_json(self, *, has_more: bool) -> bytes:
        """The list object as the API answers with it."""
        data = list(self.rows())
        page = {"object": "list", "data": data, "has_more": has_more}
        return json.dumps(page, separators=(",", ":"), allow_nan=False).encode()

    def as_csv(self) -> str:
        """CSV with a header: step, time, then the columns by name; empty where nothing is."""
        out = io.StringIO()
        names = sorted(self.columns)
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["step", "time", *names])
        for row, step in enumerate(self.steps):
            values = [self.columns[name][row] for name in names]
            writer.writerow([step, self.times[row], *("" if v != v else repr(v) for v in values)])
        return out.getvalue()


class Curves:
    """Metrics of all runs that were lately asked for."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._kept: OrderedDict[str, Columns] = OrderedDict()
        self._lock = threading.Lock()

    def _columns(self, attempt: str) -> Columns:
        with self._lock:
            found = self._kept.get(attempt)
            if found is None:
                found = self._kept[attempt] = Columns(self._store, attempt)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(attempt)
        found.renew()
        return found

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
        `names` (none: all). Blocks.
        """
        steps: list[int] = []
        times: list[float] = []
        columns: dict[str, list[float]] = {}
        for span in spans:
            held = self._columns(span.attempt)
            low = max(after, span.first)
            high = min(x for x in (until, span.last, 2**62) if x is not None)
            start, stop = bisect_right(held.steps, low), bisect_right(held.steps, high)
            if limit is not None:
                stop = min(stop, start + limit - len(steps))
            if start >= stop:
                continue
            for name in list(held.values) if names is None else names:
                column = columns.setdefault(name, [NAN] * len(steps))
                found = held.values.get(name)
                column += found[start:stop] if found is not None else [NAN] * (stop - start)
            steps += held.steps[start:stop]
            times += held.times[start:stop]
            for column in columns.values():
                column += [NAN] * (len(steps) - len(column))
        return Table(steps, times, columns)
