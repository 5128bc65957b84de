"""The store's verdicts: what is referred to is committed, whole, and what was shipped."""

from pathlib import Path

import pytest

from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.storage.store import MARKER, ArtifactStore
from ratchet.configs.load import load
from tests.chaos import scenario, stored
from tests.chaos.history import Evidence, references
from tests.unit.chaos.evidence import RUN, STEPS, good_run


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store with one artifact, one group and one folder of the run."""
    made = ArtifactStore(f"file://{tmp_path}/store")
    made.put_json(f"runs/{RUN}/a.json", {"x": 1}, attempt="t")
    documents.put(made, f"runs/{RUN}/groups/0.json", {"rollouts": []}, attempt="t")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "part").write_text("content")
    made.put_folder(keys.checkpoint(RUN, 1), folder, attempt="t")
    return made


def evidence(store: ArtifactStore) -> Evidence:
    ref = store.require(f"runs/{RUN}/a.json")
    return Evidence(RUN, refs={ref.key: {(ref.sha256, ref.path)}})


def test_whole_store_passes(store: ArtifactStore) -> None:
    assert stored.artifacts(store, evidence(store)).good
    assert not stored.artifacts(store, Evidence("other")).good, "nothing was checked"


def test_reference_to_what_was_never_committed(store: ArtifactStore) -> None:
    found = evidence(store)
    Path(store.path(f"runs/{RUN}/a.json{MARKER}")).unlink()
    assert "not committed" in stored.artifacts(store, found).violations[0]


def test_reference_to_another_content_than_the_committed(store: ArtifactStore) -> None:
    found = evidence(store)
    found.refs[f"runs/{RUN}/a.json"].add(("other", "path"))
    assert "referred to as" in stored.artifacts(store, found).violations[0]


@pytest.mark.parametrize("place", ["a.json@*", "checkpoints/*@t/part", "checkpoints/*/manifest*"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damage_behind_a_marker(store: ArtifactStore, place: str, how: str) -> None:
    path = next(Path(store.path(f"runs/{RUN}")).glob(place))
    data = path.read_bytes()
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    violations = stored.artifacts(store, evidence(store)).violations
    assert len(violations) == 1 and "CorruptArtifact" in violations[0], violations


def test_damage_to_a_file_inside_its_marker(store: ArtifactStore) -> None:
    path = Path(store.path(f"runs/{RUN}/groups/0.json{MARKER}"))
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (violation,) = stored.artifacts(store, evidence(store)).violations
    assert "CorruptArtifact" in violation


def sample(group: str, rollout: int) -> Sample:
    return Sample(group, rollout, "e", 1.0, 1.0, [1], [True], [0.0], [1.0], [0])


def shipped(store: ArtifactStore, batches: dict[int, list[Sample]]) -> Evidence:
    """The good run, with its batches in the store."""
    found = good_run()
    for activity in found.activities:
        if (step := activity.input.get("step")) and activity.name == "ship_batch":
            ref = store.put(keys.batch(RUN, step), encode_batch(batches[step]))
            activity.result["ref"] = {"sha256": ref.sha256}
    for step in range(1, STEPS + 1):
        store.put_json(keys.step_record(RUN, step), {"step": step})
    return found


def test_batches_that_hold_what_was_shipped(store: ArtifactStore) -> None:
    batches = {1: [sample("train/0", 0), sample("train/1", 0)], 2: [sample("train/2", 1)]}
    assert stored.contents(store, shipped(store, batches)).good


@pytest.mark.parametrize(
    ("second", "words"),
    [(sample("train/0", 0), "it was not cut from"), (sample("train/9", 0), "not cut from")],
)
def test_batches_that_hold_something_else(store: ArtifactStore, second: Sample, words: str) -> None:
    found = shipped(store, {1: [sample("train/0", 0)], 2: [second]})
    violations = stored.contents(store, found).violations
    assert any(words in text for text in violations)


def test_missing_record_of_a_step(store: ArtifactStore) -> None:
    batches = {1: [sample("train/0", 0)], 2: [sample("train/2", 0)]}
    found = shipped(store, batches)
    store.delete(store.require(keys.step_record(RUN, 2)))
    assert "metrics of steps [2]" in stored.contents(store, found).violations[0]


def test_references_are_found_wherever_they_are() -> None:
    ref = {"key": "k", "sha256": "s", "size": 1, "path": "p", "attempt": ""}
    assert list(references({"a": [{"b": ref}, 1], "c": None})) == [("k", "s", "p")]


def test_the_run_of_the_suite_keeps_everything_that_it_judges() -> None:
    config = load(scenario.CONFIG, list(scenario.OVERRIDES))
    kept = config.retention.model_dump()
    assert kept == dict.fromkeys(kept, "all"), "what retention deletes would count as never written"
