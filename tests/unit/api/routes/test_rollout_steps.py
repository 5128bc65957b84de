"""The step of groups that left nothing to train on, and so are in no batch."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import Rollouts, Wanted
from ratchet.api.store.step_groups import StepGroups
from ratchet.configs.load import validate

ERROR = {"type": "Timeout", "message": "too slow"}
FAILED, KEPT = {"error": ERROR}, {"error": None, "reward": 1.0}
FILTERED = {**KEPT, "filtered": True}


def put(store: ArtifactStore, run: str, name: str, began: int, *members: Any, **more: Any) -> None:
    """A finalized group that began at a version."""
    rollouts = [{"rollout": index, **member} for index, member in enumerate(members)]
    value = {"group": f"train/{name}", "kind": "train", "env": "e", "example": 1, **more}
    value |= {"version_start": began, "rollouts": rollouts}
    store.put_json(keys.group(run, f"train/{name}"), value)


def cut(store: ArtifactStore, run: str, step: int, *names: str) -> None:
    """What is recorded when a batch is written."""
    value = {"step": step, "groups": [f"train/{name}" for name in names]}
    store.put_json(keys.step_groups(run, step, "0" * 16), value)


def steps(store: ArtifactStore) -> dict[str, int | None]:
    """The step of each group of run 'x', as a list without `step` says it."""
    page = Rollouts(Records(store)).page("x", Wanted(kind="train"), None, 500)
    return {item.group.removeprefix("train/"): item.step for item in page.data}


def of_step(store: ArtifactStore, step: int) -> list[str]:
    """The groups of a step, by pages of one rollout."""
    reader, found, after, more = Rollouts(Records(store)), list[str](), None, True
    while more:
        page = reader.page("x", Wanted(kind="train", step=step), after, 1)
        found += [item.group.removeprefix("train/") for item in page.data if item.step == step]
        after, more = page.next_after, page.has_more
    return found


def configured(store: ArtifactStore, attempt: str) -> None:
    """The config of an attempt whose groups may be one version behind."""
    train = {"env": [{"id": "reverse-text"}], "max_off_policy_steps": 1}
    config = validate({"max_steps": 9, "train": train})
    store.put_json(keys.config(attempt), config.model_dump(mode="json"))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path))
    configured(store, "x")
    return store


def test_what_failed_before_the_first_batch_is_of_step_1(store: ArtifactStore) -> None:
    put(store, "x", "0", 0, FAILED, FAILED)
    put(store, "x", "1", 0, FILTERED, FAILED)
    put(store, "x", "2", 0, KEPT, FAILED)
    put(store, "x", "3", 0, KEPT, FAILED, rejected=True)
    assert steps(store) == {"0": 1, "1": 1, "2": None, "3": 1}, "the third waits for a batch"
    assert of_step(store, 1) == ["0", "0", "1", "1", "3", "3"]
    assert of_step(store, 2) == of_step(store, 0) == []
    page = Rollouts(Records(store)).page("x", Wanted(step=1, errored=True), None, 10)
    assert [item.id for item in page.data] == ["train:0:0", "train:0:1", "train:1:1", "train:3:1"]
    assert page.note == "no batch of step 1 has been written"


def test_a_group_that_left_nothing_is_of_the_step_that_was_collected_then(
    store: ArtifactStore,
) -> None:
    batches = {1: ["1", "3"], 2: ["4", "6"], 3: ["8", "7"]}
    for step, names in batches.items():
        cut(store, "x", step, *names)
        for name in names:
            put(store, "x", name, step - 1, KEPT)
    put(store, "x", "0", 0, FAILED)
    put(store, "x", "2", 0, FAILED)
    put(store, "x", "5", 0, FILTERED)
    put(store, "x", "5.1", 2, FAILED)
    put(store, "x", "9", 2, FAILED)
    put(store, "x", "10", 3, KEPT)
    left = {"0": 1, "2": 1, "5": 2, "5.1": 3, "9": 4, "10": None}
    trained = {name: step for step, names in batches.items() for name in names}
    assert steps(store) == left | trained
    assert of_step(store, 1) == ["1", "3", "0", "2"]
    assert of_step(store, 2) == ["4", "6", "5"]
    assert of_step(store, 3) == ["8", "7", "5.1"]
    assert of_step(store, 4) == ["9"] and of_step(store, 5) == []


def test_what_was_left_when_the_last_batch_was_cut_is_of_the_last_step(
    store: ArtifactStore,
) -> None:
    for step in (8, 9):
        cut(store, "x", step, f"{step}")
        put(store, "x", f"{step}", step - 1, KEPT)
    put(store, "x", "10", 8, FAILED)
    assert steps(store) == {"8": 8, "9": 9, "10": 9}
    assert of_step(store, 9) == ["9", "10"] and of_step(store, 10) == []


def test_what_filters_took_from_a_batch_is_listed_once(store: ArtifactStore) -> None:
    cut(store, "x", 1, "0", "2")
    cut(store, "x", 2, "1", "3")
    for name in ("0", "1", "2", "3"):
        put(store, "x", name, 0, {**KEPT, "post_filtered": True})
    assert steps(store) == {"0": 1, "1": 2, "2": 1, "3": 2}
    assert of_step(store, 1) == ["0", "2"] and of_step(store, 2) == ["1", "3"]


def test_what_a_run_left_by_a_resume_has_no_step(store: ArtifactStore) -> None:
    configured(store, "x+2")
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 1, "kind": "resume"})
    cut(store, "x", 1, "1")
    cut(store, "x", 2, "3")
    for name, began in (("0", 0), ("2", 1), ("4", 2)):
        put(store, "x", name, began, FAILED)
    put(store, "x+2", "5", 1, FAILED)
    assert steps(store) == {"0": 1, "2": None, "4": None, "5": 2}
    assert of_step(store, 1) == ["0"] and of_step(store, 2) == ["5"]


def test_a_step_of_an_older_build_is_not_taken_for_the_one_that_is_collected(
    store: ArtifactStore,
) -> None:
    store.put_json(keys.step_record("x", 1), {"step": 1, "time": 1.0, "metrics": {}})
    put(store, "x", "0", 0, FAILED)
    assert steps(store) == {"0": None} and of_step(store, 1) == []


@pytest.mark.parametrize(("failed", "step"), [(0, 6), (1, 6), (2, 7)])
def test_where_all_rollouts_failed_no_batch_is_searched_for_the_group(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, failed: int, step: int
) -> None:
    """Failed rollouts have no versions, as those of frozen models, which any step may train on."""
    put(store, "x", "4", 0, *[FAILED] * failed, *[KEPT] * (2 - failed))
    for at in (5, 6):
        cut(store, "x", at, f"{at - 2}")
    read: list[int] = []
    cut_for = StepGroups.cut_for

    def noted(self: StepGroups, attempt: str, step: int) -> list[str] | None:
        read.append(step)
        return cut_for(self, attempt, step)

    monkeypatch.setattr(StepGroups, "cut_for", noted)
    page = Rollouts(Records(store)).page("x", Wanted(kind="train"), None, 5)
    assert [item.step for item in page.data] == [step, step]
    assert read == [5, 6], "without results: for one that has a group of a higher counter"
