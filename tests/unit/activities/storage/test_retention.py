"""What retention deletes, and what it must never touch."""

import json
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.storage import keys
from ratchet.activities.storage.retention import (
    checkpointed,
    expendable,
    number_of,
    prune_batches,
    prune_checkpoints,
    prune_rollouts,
    prune_weights,
    settled_below,
    states_of,
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


# -- rollouts -------------------------------------------------------------------------------


def state(
    next_train: int, step: int, named: Set[str], finalizing: Set[int] = frozenset()
) -> dict[str, Any]:
    """A run's state that names groups and evals, in whatever part."""
    ready = [{"group": name, "ref": {"key": keys.group(RUN, name)}} for name in sorted(named)]
    generations = [{"lease": {"next_train": n}, "outstanding": []} for n in (0, next_train)]
    return {
        "steps": {"step": step},
        "dispatch": {"generations": generations},
        "train": {"ready": ready},
        "evals": {"finalizing": sorted(finalizing)},
    }


def put_group(store: ArtifactStore, group: str) -> None:
    """A group and one of its rollouts."""
    store.put(keys.group(RUN, group), b"")
    store.put(keys.rollout(RUN, group, 0), b"")


def there(store: ArtifactStore, group: str) -> bool:
    """Whether a group and its rollouts are; both are, or neither."""
    both = {
        store.committed(key) is not None
        for key in (keys.group(RUN, group), keys.rollout(RUN, group, 0))
    }
    assert len(both) == 1
    return both == {True}


def counter(group: str) -> int:
    return int(group.removeprefix("train/").partition(".")[0])


trained = st.builds("train/{}{}".format, st.integers(0, 9), st.sampled_from(["", ".1", ".12"]))
evaluated = st.builds("eval/{}-{}/a/0".format, st.integers(0, 7), st.integers(0, 1))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_that_is_referred_to_is_removed_and_all_older_is(data: st.DataObject) -> None:
    groups = data.draw(st.sets(trained, max_size=6))
    evals = data.draw(st.sets(evaluated, max_size=4))
    newest, keep = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    oldest = data.draw(st.integers(0, newest))
    named = st.sets(st.sampled_from(sorted(groups | evals | {"train/9"})), max_size=2)
    states = [
        state(
            data.draw(st.integers(0, 9)),
            data.draw(st.integers(0, 7)),
            data.draw(named),
            data.draw(st.sets(st.integers(0, 7), max_size=1)),
        )
        for _ in range(2)
    ]
    cut = {name: data.draw(st.none() | st.integers(1, newest)) for name in sorted(groups)}
    last = min(oldest, newest - keep)
    with tempfile.TemporaryDirectory() as root:
        store = ArtifactStore(root)
        for name in groups | evals:
            put_group(store, name)
        for step in {step for step in cut.values() if step is not None}:
            listed = {"step": step, "groups": [name for name in cut if cut[name] == step]}
            store.put_json(keys.step_groups(RUN, step, "ab"), listed)
        prune_rollouts(store, RUN, newest, keep, states, oldest)
        kept = {name for name in groups | evals if there(store, name)}
    texts = json.dumps(states)
    assert kept >= {name for name in groups | evals if f'"{name}"' in texts}
    recent = [counter(name) for name, step in cut.items() if step is not None and step > last]
    below = min([settled_below(one) for one in states] + recent)
    if last < 0:
        assert kept == groups | evals
        return
    assert {name for name in groups if counter(name) >= below} == kept & groups
    for name in evals - kept:
        step = int(name.removeprefix("eval/").partition("-")[0])
        assert step <= last and all(
            step < one["steps"]["step"] and step not in one["evals"]["finalizing"] for one in states
        )
    begun = min(one["steps"]["step"] for one in states)
    if not any(one["evals"]["finalizing"] for one in states) and "eval/" not in texts:
        old = {name for name in evals if int(name[5 : name.index("-")]) <= min(last, begun - 1)}
        assert kept & evals == evals - old


def test_what_a_state_settles() -> None:
    assert settled_below({}) == settled_below({"dispatch": {"generations": []}}) == 0
    assert settled_below(state(7, 3, set())) == 7
    assert settled_below(state(7, 3, {"train/5.12", "eval/1-0/a/0"})) == 5
    copied = {"path": "runs/r+2/groups/train/4.json@0123", "train/x": 0, "label": "eval/train/a"}
    assert settled_below({**state(7, 3, {"train/12"}), "other": [copied]}) == 4


def test_rollouts_stay_where_a_state_cannot_be_read(store: ArtifactStore, tmp_path: Path) -> None:
    """Or where nobody knows what a step was cut from. Other attempts' are left alone."""
    for number in range(4):
        put_group(store, f"train/{number}")
    store.put(keys.group("run-1", "train/0"), b"")
    now = state(4, 3, set())
    for name, text in (("", json.dumps({"state": now})), (".e2", "{")):
        (folder := tmp_path / f"checkpoint{name}").mkdir()
        (folder / keys.RUN_STATE_FILE).write_text(text)
        store.put_folder(keys.checkpoint(RUN, 2) + name, folder, attempt="a")
    assert states_of(store, RUN, 2) == [now, {}] and states_of(store, RUN, 1) == []
    prune_rollouts(store, RUN, 3, "all", [now], 2)
    prune_rollouts(store, RUN, 3, 1, [now, {}], 2)
    assert all(there(store, f"train/{number}") for number in range(4))
    ref = store.put_json(keys.step_groups(RUN, 3, "ab"), {"step": 3, "groups": ["train/2"]})
    damaged = Path(store.path(ref.path))
    whole = damaged.read_text()
    damaged.write_text("half")
    prune_rollouts(store, RUN, 3, 1, [now], 2)
    assert all(there(store, f"train/{number}") for number in range(4))
    damaged.write_text(whole)
    for _ in range(2):
        prune_rollouts(store, RUN, 3, 1, [now], 2)
        left = [number for number in range(4) if there(store, f"train/{number}")]
        assert left == [2, 3]
    assert store.committed(keys.group("run-1", "train/0")) is not None
