"""What retention deletes, and what it must never touch."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.storage import keys
from ratchet.activities.storage.retention import (
    checkpointed,
    expendable,
    number_of,
    prune_batches,
    prune_checkpoints,
    prune_weights,
)
from ratchet.activities.storage.store import ArtifactStore

RUN = "run-1+2"
numbers = st.sets(st.integers(1, 60), max_size=12)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def steps_of(store: ArtifactStore, folder: str) -> list[int | None]:
    return [number_of(key) for key in store.committed_keys(folder)]


@given(numbers, st.integers(0, 60), st.integers(1, 5))
def test_only_old_ones_are_expendable(found: set[int], newest: int, keep: int) -> None:
    gone = expendable(found, newest, keep)
    left = sorted(found - set(gone))
    assert gone == sorted(gone) and set(gone) <= found
    assert all(n in left for n in found if n > newest)
    old = [n for n in left if n <= newest]
    assert len(old) == min(keep, sum(n <= newest for n in found))
    assert not gone or not old or max(gone) < min(old)


@given(numbers, st.integers(1, 60), st.integers(2, 4), st.none() | st.integers(1, 10))
def test_checkpoints_left(found: set[int], newest: int, keep: int, every: int | None) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = ArtifactStore(root)
        for step in found:
            store.put(keys.checkpoint(RUN, step), b"")
        left = prune_checkpoints(store, RUN, newest, keep, every)
        there = steps_of(store, keys.checkpoints(RUN))
        assert left == [step for step in there if step is not None and step <= newest]
        multiples = {step for step in found if every is not None and step % every == 0}
        newest_ones = sorted(step for step in found if step <= newest)[-keep:]
        later = {step for step in found if step > newest}
        assert set(there) == multiples | set(newest_ones) | later
        assert prune_checkpoints(store, RUN, newest, keep, every) == left


def test_weights_that_a_checkpoint_needs_stay(store: ArtifactStore) -> None:
    for version in range(8):
        store.put(keys.weights(RUN, version), b"")
    for step in (2, 4):
        store.put(keys.checkpoint(RUN, step), b"")
    prune_weights(store, RUN, 7, 2, checkpointed(store, RUN))
    assert steps_of(store, f"runs/{RUN}/weights") == [0, 2, 4, 6, 7]
    prune_checkpoints(store, RUN, 7, 1)
    prune_weights(store, RUN, 7, 2, checkpointed(store, RUN))
    assert steps_of(store, f"runs/{RUN}/weights") == [0, 4, 6, 7]


def test_weights_that_are_needed_stay_until_they_are_not(store: ArtifactStore) -> None:
    for version in range(8):
        store.put(keys.weights(RUN, version), b"")
    prune_weights(store, RUN, 7, 2, {3, 5})
    assert steps_of(store, f"runs/{RUN}/weights") == [0, 3, 5, 6, 7]
    prune_weights(store, RUN, 7, 2, {5})
    assert steps_of(store, f"runs/{RUN}/weights") == [0, 5, 6, 7]


def test_all_weights_of_a_version_go_together(store: ArtifactStore) -> None:
    folder = keys.weights(RUN, 0).rpartition("/")[0]
    kept = ["v00000000", "v00000004", "v00000005.e2", "v00000009"]
    gone = ["v00000001", "v00000002", "v00000002.e3", "v00000003.e12"]
    strange = ["v1.old", "notes", "vx", "step"]
    for name in (*kept, *gone, *strange):
        store.put(f"{folder}/{name}", b"")
    prune_weights(store, RUN, 5, "all")
    assert len(store.committed_keys(folder)) == 12
    prune_weights(store, RUN, 5, 1)
    assert store.committed_keys(folder) == sorted(f"{folder}/{name}" for name in (*kept, *strange))


def test_batches_before_a_checkpoint_go(store: ArtifactStore) -> None:
    for step in range(1, 8):
        store.put(keys.batch(RUN, step), b"")
        store.put(keys.token_logprobs(RUN, step), b"")
        store.put(keys.batch("run-1", step), b"")
    store.put(f"{keys.token_logprobs(RUN, 3)}.e2", b"")
    for _ in range(2):
        prune_batches(store, RUN, 4)
        for key in (keys.batch(RUN, 0), keys.token_logprobs(RUN, 0)):
            assert steps_of(store, key.rpartition("/")[0]) == [5, 6, 7]
    assert len(steps_of(store, keys.batch("run-1", 0).rpartition("/")[0])) == 7


def test_a_damaged_marker_stops_nothing(store: ArtifactStore) -> None:
    for step in (1, 2, 3, 4):
        store.put(keys.checkpoint(RUN, step), b"")
    Path(store.path(keys.checkpoint(RUN, 1) + ".commit")).write_text("half of i")
    assert prune_checkpoints(store, RUN, 4, 2) == [3, 4]
    assert steps_of(store, keys.checkpoints(RUN)) == [1, 3, 4]


def test_numbers_of_keys() -> None:
    assert number_of(keys.weights("r", 12)) == 12 == number_of(keys.weights("r", 12) + ".e3")
    assert number_of(keys.checkpoint("r", 0)) == 0 and number_of(keys.batch("r", 7)) == 7
    assert number_of(keys.token_logprobs("r", 7) + ".e3") == 7
    assert number_of("runs/r/weights/v12.e3.old") is None
