"""Chunks repeat a hundred step records as columns, and nothing rests on them."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.training import StepRecord
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.store_activities import StoreActivities
from ratchet.activities.storage import curves, keys
from ratchet.activities.storage.store import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def record(store: ArtifactStore, step: int, **metrics: Any) -> None:
    value = {"step": step, "time": 10.0 * step, "metrics": metrics or {"loss": step / 3}}
    store.put_json(keys.step_record("r", step), value)


@pytest.mark.parametrize(
    ("step", "wanted"), [(1, (1, 100)), (100, (1, 100)), (101, (101, 200)), (10_000, (9901, 10000))]
)
def test_bounds(step: int, wanted: tuple[int, int]) -> None:
    assert curves.bounds(step) == wanted


async def test_the_last_record_of_a_hundred_makes_the_chunk_whatever_their_order(
    tmp_path: Path,
) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    run, tell = ActivityEnvironment().run, StoreActivities(ctx).record_step
    late = 37
    for step in range(1, 101):
        if step != late:
            await run(tell, StepRecord("r", step, {"loss": step / 3}))
    assert curves.read(ctx.store, "r", 100) is None
    await run(tell, StepRecord("r", late, {"loss": late / 3, "rare": 1.0}))
    made = ctx.store.require(keys.step_chunk("r", 100))
    chunk = curves.read(ctx.store, "r", 100)
    assert chunk is not None and chunk.steps == list(range(1, 101))
    assert chunk.metrics["loss"] == [step / 3 for step in range(1, 101)]
    assert chunk.metrics["rare"] == [1.0 if step == late else None for step in range(1, 101)]
    # An attempt at it that comes again leaves it as it is.
    await run(tell, StepRecord("r", late, {"loss": 0.0}))
    await run(tell, StepRecord("r", 100, {"loss": 0.0}))
    assert ctx.store.require(keys.step_chunk("r", 100)) == made


def test_steps_of_another_attempt_are_not_packed(store: ArtifactStore) -> None:
    for step in range(151, 301):
        record(store, step)
        curves.pack(store, "r", step)
    assert store.committed_keys(keys.step_chunks("r")) == [keys.step_chunk("r", 300)]


def test_a_damaged_record_is_not_packed_and_stops_nothing(store: ArtifactStore) -> None:
    for step in range(1, 101):
        record(store, step)
    Path(store.path(store.require(keys.step_record("r", 5)).path)).write_text("{}")
    curves.pack(store, "r", 100)
    assert store.committed_keys(keys.step_chunks("r")) == []


@pytest.mark.parametrize("part", ["content", "marker", "nothing"])
def test_a_damaged_chunk_counts_as_none(store: ArtifactStore, part: str) -> None:
    for step in range(1, 101):
        record(store, step)
    curves.pack(store, "r", 100)
    ref = store.require(keys.step_chunk("r", 100))
    if part != "nothing":
        path = Path(store.path(ref.path if part == "content" else f"{ref.key}.commit"))
        path.write_bytes(path.read_bytes()[:-9])
    assert (curves.read(store, "r", 100) is None) == (part != "nothing")


VALUES = st.one_of(st.none(), st.floats(), st.integers(-(2**40), 2**40))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1, max_size=5))
def test_what_is_read_is_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, result: list[dict[str, Any]]
) -> None:
    store = ArtifactStore(str(tmp_path_factory.mktemp("store")))
    for step in range(1, 101):
        metrics = result[step % len(result)]
        value = {"step": step, "time": step, "metrics": metrics}
        store.put_json(keys.step_record("r", step), value)
    curves.pack(store, "r", 100)
    chunk = curves.read(store, "r", 100)
    assert chunk is not None
    assert chunk.metrics.keys() == {name for metrics in result for name in metrics}
    for row, step in enumerate(chunk.steps):
        metrics = result[step % len(result)]
        for name, column in chunk.metrics.items():
            found, wanted = column[row], metrics.get(name)
            if wanted is None:
                assert found is None
            else:
                assert found == wanted or (math.isnan(wanted) and math.isnan(found or 0.0))
