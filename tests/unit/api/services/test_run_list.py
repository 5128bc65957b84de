"""The list of runs: newest first, each once, none lacking, at a cost that does not grow."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.schemas.run import Run
from ratchet.api.services import run_list
from ratchet.api.services.run_list import (
    MOST_LOOKED_AT,
    MOST_OPEN,
    RunList,
    cursor_of,
    row_at,
)
from ratchet.api.services.run_view import run_object
from ratchet.api.store import run_index
from ratchet.api.store.run_index import Row, RunIndex, row_of
from ratchet.api.temporal.client import Execution

NOW = datetime.now(UTC).replace(microsecond=0)


def execution(run_id: str, created: datetime, status: str = "succeeded", **memo: Any) -> Execution:
    ended = status in ("succeeded", "failed")
    state = ("completed" if status == "succeeded" else "failed") if ended else "running"
    said = {"status": status, "name": "run", "created_at": created.isoformat(), "max_steps": 9}
    return Execution(run_id, "TrainingRun", state, created, None, {**said, **memo})


class Known:
    """What Temporal knows of runs, and how many of them it was asked about."""

    namespace = "default"

    def __init__(self, runs: Sequence[Execution]) -> None:
        self.runs = {run.id: run for run in runs}
        self.listed = dict(self.runs)
        self.asked = 0

    async def newest(self, ids: Sequence[str]) -> dict[str, Execution]:
        self.asked += len(ids)
        return {run_id: self.listed[run_id] for run_id in ids if run_id in self.listed}

    async def describe(self, run_id: str) -> Execution | None:
        return self.runs.get(run_id)

    async def open_runs(self, most: int) -> list[Execution]:
        return [run for run in self.runs.values() if run.state == "running"][:most]

    async def runs_since(self, moment: datetime | None) -> AsyncIterator[list[Execution]]:
        yield [run for run in self.runs.values() if moment is None or run.started > moment]


def runs_of(known: Known, folder: Path) -> RunList:
    return RunList(known, RunIndex(ArtifactStore(f"file://{folder}")), "")  # type: ignore[arg-type]


async def pages(runs: RunList, limit: int, **given: Any) -> list[list[str]]:
    found: list[list[str]] = []
    after: Row | None = None
    while True:
        page, after = await runs.page(after, limit, **given)
        found.append([run.id for run in page])
        if after is None:
            return found
        # As a client sends it back.
        assert row_at(cursor_of(after)) == after


async def test_pages_are_newest_first_and_have_each_run_once(tmp_path: Path) -> None:
    # Some in one moment, some a month apart.
    made = [
        execution(f"run-{i:02d}", NOW - timedelta(days=40 * (i % 3), hours=i % 5, minutes=i // 9))
        for i in range(40)
    ]
    runs = runs_of(Known(made), tmp_path)
    order = sorted(made, key=lambda run: (run.started, run.id), reverse=True)
    for limit in (1, 7, 39, 40, 100):
        found = await pages(runs, limit)
        assert all(len(page) == limit for page in found[:-1])
        assert [run_id for page in found for run_id in page] == [run.id for run in order]


async def test_runs_of_older_builds_are_added_before_anything_is_listed(tmp_path: Path) -> None:
    known = Known([execution("old", NOW - timedelta(days=9))])
    assert await pages(runs_of(known, tmp_path), 5) == [["old"]]
    # One that was begun past this API, or by an older build beside it.
    known.runs["other"] = known.listed["other"] = execution("other", NOW)
    assert await pages(runs_of(known, tmp_path), 5) == [["other", "old"]]
    # Only what began since is looked at.
    assert await runs_of(known, tmp_path).catch_up() == 1
    assert await runs_of(known, tmp_path).catch_up(rebuild=True) == 2


class Slow(Known):
    """Answers what began lately only when it may."""

    def __init__(self, runs: Sequence[Execution]) -> None:
        super().__init__(runs)
        self.may = asyncio.Event()
        self.may.set()

    async def runs_since(self, moment: datetime | None) -> AsyncIterator[list[Execution]]:
        await self.may.wait()
        async for part in super().runs_since(moment):
            yield part


async def test_a_list_waits_for_what_began_only_when_that_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    known = Slow([execution("old", NOW - timedelta(hours=3))])
    runs = runs_of(known, tmp_path)
    monkeypatch.setattr(run_list, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert await pages(runs, 9) == [["old"]]
    late = execution("late", NOW)
    known.runs["late"] = known.listed["late"] = late
    known.may.clear()
    now[0] = 0.7 * run_list.CAUGHT_UP_S
    assert await pages(runs, 9) == [["old"]], "it did not wait"
    now[0] = 1.2 * run_list.CAUGHT_UP_S
    waiting = asyncio.ensure_future(pages(runs, 9))
    # Others that begin after it and wait for nothing are done before it.
    for n in range(3):
        other = runs_of(Known([execution("a", NOW)]), tmp_path / f"other-{n}")
        assert await pages(other, 9) == [["a"]]
    assert not waiting.done(), "a list is no older than that"
    known.may.set()
    assert await waiting == [["late", "old"]]


async def test_what_is_in_the_index_twice_or_without_a_run_is_listed_once_or_not(
    tmp_path: Path,
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    known = Known([execution("twice", now), execution("fresh", now), execution("gone", now)])
    runs = runs_of(known, tmp_path)
    # A request that was sent twice, and one whose run never started.
    await asyncio.to_thread(runs.index.add, [row_of("twice", now - timedelta(seconds=3))])
    await asyncio.to_thread(runs.index.add, [row_of("never", now)])
    # Temporal's list lags, and at last forgets what has ended.
    del known.listed["fresh"], known.listed["gone"]
    assert await pages(runs, 1) == [["twice"], ["gone"], ["fresh"]]
    del known.runs["gone"]
    assert await pages(runs, 1) == [["twice"], ["fresh"]]


async def test_a_deleted_run_is_not_listed_though_temporal_still_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [execution(f"run-{i}", NOW - timedelta(hours=i)) for i in range(3)]
    runs = runs_of(known := Known(made), tmp_path)
    assert await pages(runs, 5) == [["run-0", "run-1", "run-2"]]
    other = runs_of(known, tmp_path)
    index = runs.index
    await asyncio.to_thread(index.archive, runs.row_of(made[2]))
    for run in made[1:]:
        await asyncio.to_thread(index.hide, run.id)
        await asyncio.to_thread(index.delete, runs.row_of(run))
    # Here, in another process, and where what Temporal retains is added again.
    assert await pages(runs, 5) == await pages(other, 5) == [["run-0"]]
    await runs.catch_up(rebuild=True)
    assert await pages(runs, 5) == [["run-0"]]
    assert await pages(runs, 5, archived=True) == [[]]
    # What is hidden no more is forgotten at the next deletion.
    monkeypatch.setattr(run_index, "HIDDEN", timedelta(seconds=-9))
    await asyncio.to_thread(index.hide, made[0].id)
    await asyncio.to_thread(index.delete, runs.row_of(made[0]))
    assert index.deleted() == frozenset()


async def test_a_page_looks_at_a_bounded_number_of_runs(tmp_path: Path) -> None:
    made = [
        execution(f"run-{i:04d}", NOW - timedelta(minutes=i), metadata={"owner": "ana"})
        for i in range(1000)
    ]
    made[700] = execution("failed-1", made[700].started, "failed")
    made[900] = execution("open-1", made[900].started, "running", metadata={"owner": "ben"})
    known = Known(made)
    runs = runs_of(known, tmp_path)
    for given in ({"status": "failed"}, {"fits": lambda run: run.metadata.get("owner") == "ben"}):
        after, found = None, []
        while True:
            known.asked = 0
            page, after = await runs.page(after, 20, **given)  # type: ignore[arg-type]
            found += [run.id for run in page]
            assert known.asked <= MOST_LOOKED_AT + 21
            if after is None:
                break
        assert found == (["failed-1"] if "status" in given else ["open-1"])
    known.asked = 0
    assert await pages(runs, 20, status="running") == [["open-1"]]
    assert known.asked == 0


@pytest.mark.parametrize("count", [MOST_OPEN - 1, MOST_OPEN + 100])
async def test_filters_of_many_open_runs_are_complete_and_show_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As many as are listed directly, and more."""
    made = [
        execution(
            f"run-{i:04d}",
            NOW - timedelta(minutes=i),
            "paused" if i % 500 == 7 else "running",
            metadata={"owner": "ben" if i % 500 == 9 else "ana"},
        )
        for i in range(count)
    ]
    runs = runs_of(Known(made), tmp_path)
    shown: list[str] = []

    def counted(run: Execution, **given: Any) -> Run:
        shown.append(run.id)
        return run_object(run, **given)

    monkeypatch.setattr(run_list, "run_object", counted)

    async def all_of(limit: int, **given: Any) -> list[str]:
        after, found = None, []
        while True:
            shown.clear()
            page, after = await runs.page(after, limit, **given)
            found += [run.id for run in page]
            # Two looks at the index, where that is what knows them all.
            assert len(page) <= limit and len(shown) <= 2 * MOST_LOOKED_AT
            assert count >= MOST_OPEN or len(shown) <= max(limit, MOST_LOOKED_AT)
            if after is None:
                return found

    of_ben = {"fits": lambda run: run.metadata["owner"] == "ben"}
    expected = [f"run-{i:04d}" for i in range(count)]
    assert await all_of(100, status="paused") == expected[7::500]
    assert await all_of(100, status="running", **of_ben) == expected[9::500]
    assert await all_of(100, status="running") == [r for r in expected if r not in expected[7::500]]


@pytest.mark.parametrize("text", ["", "nope", "run-1a2b3c", "%", "é", "MTIz", "a" * 120])
def test_what_is_no_cursor_is_none(text: str) -> None:
    assert row_at(text) is None


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_pages_of_100000_runs(tmp_path: Path) -> None:
    """All in one day: days and hours are what the index divides by."""
    midnight = NOW.replace(hour=0, minute=0, second=0) - timedelta(days=2)
    step = timedelta(days=1) / 100_000
    made = []
    for i in range(100_000):
        at = midnight + step * i
        made.append(
            execution(f"run-{i:06d}", at.replace(microsecond=at.microsecond // 1000 * 1000))
        )
    runs = runs_of(Known(made), tmp_path)
    await runs.catch_up()
    await runs.page(None, 1)
    for after in (None, runs.row_of(made[50_000]), runs.row_of(made[50])):
        for status in (None, "failed"):
            took = []
            # The best of a few, since the machine may have other things to do for a moment.
            for _ in range(5):
                began = time.perf_counter()
                page, _ = await runs.page(after, 100, status)
                took.append(time.perf_counter() - began)
            assert min(took) < 0.1
            assert status or len(page) == (50 if after and after[1] == "run-000050" else 100)
