"""Series on a real store: chunks, pages, and what a reader sees while they grow."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.storage import keys, series
from ratchet.activities.storage.series import Series, last_heard
from ratchet.activities.storage.store import ArtifactStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    url = f"file://{tmp_path}" if request.param == "local" else f"memory://{tmp_path}"
    return ArtifactStore(url)


def _pages(store: ArtifactStore, limit: int, after: float = 0.0) -> list[dict[str, Any]]:
    """All samples after `after`, a page at a time."""
    found: list[dict[str, Any]] = []
    more = True
    while more:
        data, more = series.page(store, "r", found[-1]["time"] if found else after, limit)
        assert data or not more, "every page moves the cursor"
        found += data
    return found


def test_chunks_are_bounded_and_read_as_one(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "CHUNK_SAMPLES", 3)
    growing = Series("r", "w-1")
    for number in range(7):
        growing.add({"time": 10.0 + number, "n": number}).write(store)
        assert [s["n"] for s in _pages(store, 100)] == list(range(number + 1))
    names = store.live_keys(keys.series_folder("r"), ".jsonl")
    assert names == [keys.series("r", "w-1", start) for start in (10_000, 13_000, 16_000)]
    assert [len(store.read_lines(name)) for name in names] == [3, 3, 1]
    assert _pages(store, 2)[0] == {"time": 10.0, "n": 0, "source": "w-1"}
    assert series.page(store, "other", 0.0, 10) == ([], False)


def test_a_sample_just_taken_gives_way(store: ArtifactStore) -> None:
    growing = Series("r", "w")
    for at, replace_after in ((5.0, 4.0), (5.5, 4.5), (9.0, 8.0), (9.5, None), (10.0, 9.5)):
        growing.add({"time": at}, replace_after=replace_after).write(store)
    assert [sample["time"] for sample in _pages(store, 10)] == [5.5, 9.0, 9.5, 10.0]
    with pytest.raises(AssertionError, match="ascending"):
        growing.add({"time": 10.0})


def test_chunks_that_end_before_the_cursor_are_not_read(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "CHUNK_SAMPLES", 2)
    growing = Series("r", "w")
    for number in range(10):
        growing.add({"time": float(number + 1)}).write(store)
    read: list[str] = []
    lines = store.read_lines
    monkeypatch.setattr(store, "read_lines", lambda key: read.append(key) or lines(key))
    data, more = series.page(store, "r", 5.5, 1)
    assert ([sample["time"] for sample in data], more) == ([6.0], True)
    assert read == [keys.series("r", "w", start) for start in (5000, 7000)]


@given(
    sources=st.lists(
        # Steps from under a millisecond to seconds, so that chunk names and samples nearly meet.
        st.lists(st.sampled_from([0.0003, 0.001, 0.5, 0.99, 4.0]), max_size=12),
        min_size=1,
        max_size=3,
    ),
    limit=st.integers(1, 8),
    skipped=st.integers(0, 20),
)
def test_pages_give_every_later_sample_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, sources: list[list[float]], limit: int, skipped: int
) -> None:
    store = ArtifactStore(f"memory://{tmp_path_factory.mktemp('series')}")
    times: list[tuple[float, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "CHUNK_SAMPLES", 4)
        for number, steps in enumerate(sources):
            growing = Series("r", f"w{number}")
            for time in itertools.accumulate(steps, initial=1_700_000_000.0):
                growing.add({"time": time}).write(store)
                times.append((time, f"w{number}"))
    times.sort()
    after = times[skipped - 1][0] if 0 < skipped <= len(times) else 0.0
    found = [(sample["time"], sample["source"]) for sample in _pages(store, limit, after)]
    assert found == [(time, source) for time, source in times if time > after]


def test_the_latest_sample_is_reported_by_role(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    heard = (
        ("trainer-a-1-aaaaaa", (1000.0, 9000.0)),
        ("trainer-b-2-bbbbbb", (9010.0, 9020.0)),
        ("trainer-c-3-cccccc", (9015.0,)),
        ("env-a-4-dddddd", (20.0, 30.0)),
    )
    for source, times in heard:
        series = Series("r", source)
        for moment in times:
            series.add({"time": moment}).write(store)
    assert last_heard(store, "r", 9030.0) == {"trainer": 9020.0, "env": 30.0}
    assert last_heard(store, "another", 9030.0) == {}
