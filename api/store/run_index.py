"""The index of all runs, by which lists are paged: an empty file for each run, in a folder an hour.

    index/runs/<day>/<hour>/<created at, Unix ms>-<run>

Invariants: a name is made of what never changes of a run, so that adding it again changes nothing;
it is written before the run starts. A name whose run is not there, or was created at another
moment, stands for nothing: whoever reads rows asks Temporal about each.

Memory: the names of at most KEPT hours, for KEPT_S seconds.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from threading import Lock

from cachetools import TTLCache

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore

KEPT = 1000
KEPT_S = 60.0

Row = tuple[int, str]
"""When a run was created (Unix time, ms), and its id. Rows are in the order of lists, backwards."""


def row_of(run_id: str, created_at: datetime) -> Row:
    """The row of a run."""
    return round(created_at.timestamp() * 1000), run_id


def _hour_of(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d/%H}"


def _hour(row: Row) -> str:
    return _hour_of(datetime.fromtimestamp(row[0] / 1000, UTC))


class RunIndex:
    """The index in a store. Every method blocks, and raises StoreUnavailable."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._kept: TTLCache[str, list[Row]] = TTLCache(KEPT, KEPT_S)
        self._lock = Lock()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds runs, on the disk when this returns."""
        added = list(rows)
        there = {row for hour in {_hour(row) for row in added} for row in self._rows(hour)}
        missing = [row for row in added if row not in there]
        self._store.touch(keys.indexed_run(_hour(row), *row) for row in missing)

    def before(self, row: Row | None, count: int) -> list[Row]:
        """The newest `count` rows that come before `row`, or of all, the newest first."""
        result: list[Row] = []
        for hour in self._hours(_hour(row) if row else "9"):
            rows = self._rows(hour)
            end = bisect_left(rows, row) if row else len(rows)
            result += rows[max(end - (count - len(result)), 0) : end][::-1]
            if len(result) == count:
                break
        return result

    def caught_up(self) -> datetime | None:
        """Up to when all runs that Temporal knows are in the index; None if never."""
        state = self._store.read_live(keys.RUN_INDEX)
        return datetime.fromisoformat(state["until"]) if state else None

    def catch_up(self, until: datetime) -> None:
        """All runs up to `until` are in the index."""
        self._store.write_live(keys.RUN_INDEX, {"until": until.isoformat()})
        with self._lock:
            self._kept.clear()

    def _hours(self, last: str) -> Iterator[str]:
        """The hours up to `last` in which runs were created, the newest first."""
        for day in sorted(self._store.folders(keys.INDEXED_RUNS), reverse=True):
            if day <= last[:10]:
                for hour in sorted(self._store.folders(f"{keys.INDEXED_RUNS}/{day}"), reverse=True):
                    if f"{day}/{hour}" <= last:
                        yield f"{day}/{hour}"

    def _rows(self, hour: str) -> list[Row]:
        with self._lock:
            if (kept := self._kept.get(hour)) is not None:
                return kept
        names = self._store.live_keys(f"{keys.INDEXED_RUNS}/{hour}", "")
        parts = (name.rpartition("/")[2].partition("-") for name in names)
        rows = sorted((int(moment), run) for moment, _, run in parts)
        # What is added late is of this hour, or of one that was a moment ago.
        if hour < _hour_of(datetime.now(UTC) - timedelta(hours=2)):
            with self._lock:
                self._kept[hour] = rows
        return rows
