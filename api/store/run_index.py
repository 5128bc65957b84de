"""The index of all runs, which lists page through: an empty file per run, in a folder per hour.

    index/runs/<day>/<hour>/<created at, Unix ms>-<run>
    index/archived/<day>/<hour>/<created at, Unix ms>-<run>
    index/deleted/<deleted at, Unix ms>-<run>

Invariants: a name consists of what never changes about a run, so that adding it again has no
effect; it is written before the run starts. A name whose run does not exist, or was created at
another moment, is void: readers of rows ask Temporal about each. An archived run is in the other
list only, and adding it again does not change that. A deleted run is hidden for HIDDEN, since
Temporal takes half a minute, or more on a busy server, to forget it.

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
HIDDEN = timedelta(days=1)
HIDDEN_WITHIN_S = 2.0
"""How soon other processes hide a run that one of them has deleted."""

Row = tuple[int, str]
"""When a run was created (Unix time, ms), and its id. Lists order rows backwards."""


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
        self._deleted: TTLCache[str, frozenset[str]] = TTLCache(1, HIDDEN_WITHIN_S)
        self._lock = Lock()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds runs; they are on disk when this returns."""
        added = list(rows)
        there: set[Row] = set()
        for hour in {_hour(row) for row in added}:
            there.update(self._rows(f"{keys.INDEXED_RUNS}/{hour}"))
            there.update(self._rows(f"{keys.ARCHIVED_RUNS}/{hour}"))
        missing = [row for row in added if row not in there]
        self._store.touch(keys.indexed_run(_hour(row), *row) for row in missing)

    def archived(self, row: Row) -> bool:
        """Whether a run was archived."""
        return row in self._rows(f"{keys.ARCHIVED_RUNS}/{_hour(row)}")

    def archive(self, row: Row) -> None:
        """Moves a run from the list to the archived ones."""
        self._store.touch([keys.archived_run(_hour(row), *row)])
        self._store.delete_folder(keys.indexed_run(_hour(row), *row))
        self._forget(_hour(row))

    def unarchive(self, row: Row) -> None:
        """Moves a run from the archived ones back into the list."""
        self._store.touch([keys.indexed_run(_hour(row), *row)])
        self._store.delete_folder(keys.archived_run(_hour(row), *row))
        self._forget(_hour(row))

    def hide(self, run: str) -> None:
        """Marks a run as deleted: from now on no other run may start from it or resume it."""
        now = datetime.now(UTC)
        self._store.touch([keys.deleted_run(round(now.timestamp() * 1000), run)])
        with self._lock:
            self._deleted.clear()

    def unhide(self, run: str) -> None:
        """Removes the mark: the run is not deleted."""
        for moment, other in self._rows(keys.DELETED_RUNS):
            if other == run:
                self._store.delete_folder(keys.deleted_run(moment, run))
        with self._lock:
            self._deleted.clear()

    def hidden(self, run: str) -> bool:
        """Whether a run is marked as deleted right now."""
        return run in {other for _, other in self._rows(keys.DELETED_RUNS)}

    def delete(self, row: Row) -> None:
        """Removes a run from both lists."""
        now = datetime.now(UTC)
        for key in (keys.indexed_run(_hour(row), *row), keys.archived_run(_hour(row), *row)):
            self._store.delete_folder(key)
        self._forget(_hour(row))
        hidden_since = (now - HIDDEN).timestamp() * 1000
        for moment, run in self._rows(keys.DELETED_RUNS):
            if moment < hidden_since:
                self._store.delete_folder(keys.deleted_run(moment, run))
        with self._lock:
            self._deleted.clear()

    def deleted(self) -> frozenset[str]:
        """Ids of the runs that were deleted lately, which Temporal may still have."""
        with self._lock:
            if (kept := self._deleted.get("")) is not None:
                return kept
        deleted = frozenset(run for _, run in self._rows(keys.DELETED_RUNS))
        with self._lock:
            self._deleted[""] = deleted
        return deleted

    def before(self, row: Row | None, count: int, *, archived: bool = False) -> list[Row]:
        """The newest `count` rows before `row`, or overall, the newest first; with `archived` of
        archived runs, else of all others.
        """
        root = keys.ARCHIVED_RUNS if archived else keys.INDEXED_RUNS
        result: list[Row] = []
        for hour in self._hours(root, _hour(row) if row else "9"):
            rows = self._rows(f"{root}/{hour}")
            end = bisect_left(rows, row) if row else len(rows)
            result += rows[max(end - (count - len(result)), 0) : end][::-1]
            if len(result) == count:
                break
        return result

    def caught_up(self) -> datetime | None:
        """The moment up to which the index has all runs that Temporal knows; None if never."""
        state = self._store.read_live(keys.RUN_INDEX)
        return datetime.fromisoformat(state["until"]) if state else None

    def catch_up(self, until: datetime) -> None:
        """Records that all runs up to `until` are in the index."""
        self._store.write_live(keys.RUN_INDEX, {"until": until.isoformat()})
        with self._lock:
            self._kept.clear()

    def _forget(self, hour: str) -> None:
        with self._lock:
            for root in (keys.INDEXED_RUNS, keys.ARCHIVED_RUNS):
                self._kept.pop(f"{root}/{hour}", None)

    def _hours(self, root: str, last: str) -> Iterator[str]:
        """The hours up to `last` in which runs were created, the newest first."""
        for day in sorted(self._store.folders(root), reverse=True):
            if day <= last[:10]:
                for hour in sorted(self._store.folders(f"{root}/{day}"), reverse=True):
                    if f"{day}/{hour}" <= last:
                        yield f"{day}/{hour}"

    def _rows(self, folder: str) -> list[Row]:
        """The rows in the folder of an hour, or of all that were deleted."""
        with self._lock:
            if (kept := self._kept.get(folder)) is not None:
                return kept
        names = self._store.live_keys(folder, "")
        parts = (name.rpartition("/")[2].partition("-") for name in names)
        rows = sorted((int(moment), run) for moment, _, run in parts)
        # A row added late belongs to this hour, or to one that ended a moment ago.
        hour = folder[-len(_hour_of(datetime.now(UTC))) :]
        if folder != keys.DELETED_RUNS and hour < _hour_of(datetime.now(UTC) - timedelta(hours=2)):
            with self._lock:
                self._kept[folder] = rows
        return rows
