"""Which versions of a run's policy are kept, and what is said of one that is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import configs, keys, policies
from ratchet.activities.storage.fencing import variant
from ratchet.activities.storage.policies import NoVersion
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact
from ratchet.configs.load import validate
from tests.unit.api.conftest import config
from tests.unit.api.leaving import (
    ADAPTER,
    MODEL,
    leave,
    put_adapter,
    put_weights,
    put_whole_checkpoint,
    weights_of,
)

RUN, NEXT = "run", "run+2"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def test_versions_follow_the_lineage(store: ArtifactStore) -> None:
    leave(store, RUN, weights=[0, 3, 4, 5], checkpoints=[4])
    leave(store, NEXT, weights=[0, 4, 6])
    assert policies.weights_of(store, RUN)[5].attempt == RUN
    store.put_json(keys.lineage(NEXT), {"source": RUN, "step": 4, "kind": "resume"})
    found = policies.weights_of(store, RUN)
    assert [(held.step, held.attempt) for held in found.values()] == [
        (0, NEXT),
        (3, RUN),
        (4, NEXT),
        (6, NEXT),
    ]
    assert [*policies.checkpoints_of(store, RUN)] == [4]
    leave(store, "fork", weights=[0, 4])
    store.put_json(keys.lineage("fork"), {"source": RUN, "step": 4, "kind": "fork"})
    assert [*policies.weights_of(store, "fork")] == [0, 3, 4]


def test_a_run_begins_with_the_checkpoint_of_a_version_where_there_is_one(
    store: ArtifactStore,
) -> None:
    leave(store, RUN, weights=[0, 4, 5], checkpoints=[4])
    assert policies.find(store, RUN, 4).keys == (keys.checkpoint(RUN, 4),)
    assert policies.find(store, RUN, 5).keys == (keys.weights(RUN, 5),)


def test_what_is_not_there_is_said_with_what_is(store: ArtifactStore) -> None:
    kept = {"retention": {"weights": 2}, "checkpoint": {"interval": 2, "keep_every": 4}}
    leave(store, RUN, weights=[0, 7, 8], checkpoints=[4, 8], **kept)
    with pytest.raises(NoVersion, match="there is no run 'nope'"):
        policies.find(store, "nope", 1)
    with pytest.raises(NoVersion, match=r"no version 9; kept versions: 0, 4, 7, 8") as no:
        policies.find(store, RUN, 9)
    assert not no.value.removed
    # What was changed while the run ran is what removed it.
    changed = validate(config(**{**kept, "retention": {"weights": 3}}))
    configs.save(store, RUN, changed, revision=1, attempt="t")
    with pytest.raises(NoVersion, match="version 5 of run run was removed by its retention") as no:
        policies.find(store, RUN, 5)
    assert no.value.removed
    said = "retention.weights = 3, checkpoint.keep_last = 2, checkpoint.keep_every = 4"
    assert said in str(no.value) and 'retention.weights = "all"' in str(no.value)


def test_of_an_adapter_its_base_is_fetched_with_it(store: ArtifactStore, tmp_path: Path) -> None:
    leave(store, RUN, weights=[0])
    put_adapter(store, RUN, 3)
    folder = tmp_path / "copy"
    policies.fetch(store, RUN, 3, folder)
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert names == {*MODEL, *(f"adapter/{name}" for name in ADAPTER)}
    assert (folder / "model.safetensors").read_bytes() == weights_of(RUN, 0)
    held = policies.find(store, RUN, 3)
    model = policies.model_of(store, held, store.require(held.keys[0]))
    assert model.key == keys.weights(RUN, 0)
    # Where the checkpoint is gone, the merged weights are a whole model.
    store.delete(store.require(keys.checkpoint(RUN, 3)))
    policies.fetch(store, RUN, 3, folder)
    assert {file.name for file in folder.iterdir()} == {*MODEL}
    assert (folder / "model.safetensors").read_bytes() == weights_of(RUN, 3)


def test_of_variants_the_last_sound_one_is_fetched(store: ArtifactStore, tmp_path: Path) -> None:
    leave(store, RUN, weights=[0])
    plain = keys.weights(RUN, 3)
    put_weights(store, RUN, 3)
    for epoch in (2, 11):
        folder = tmp_path / str(epoch)
        folder.mkdir()
        (folder / "model.safetensors").write_text(str(epoch))
        store.put_folder(variant(plain, epoch), folder, attempt="t")
    assert policies.find(store, RUN, 3).keys == (variant(plain, 11), variant(plain, 2), plain)

    def fetched() -> str:
        policies.fetch(store, RUN, 3, tmp_path / "copy")
        return (tmp_path / "copy" / "model.safetensors").read_text()

    assert fetched() == "11"
    for epoch, next_one in ((11, "2"), (2, weights_of(RUN, 3).decode())):
        ref = store.require(variant(plain, epoch))
        store.fs.pipe_file(store.path(f"{ref.path}/model.safetensors"), b"99")
        assert fetched() == next_one
    ref = store.require(plain)
    store.fs.rm(store.path(f"{ref.path}/config.json"))
    with pytest.raises(CorruptArtifact):
        fetched()


def test_what_is_fetched_is_a_model_and_a_copy(store: ArtifactStore, tmp_path: Path) -> None:
    leave(store, RUN, weights=[0], checkpoints=[2])
    policies.fetch(store, RUN, 2, tmp_path / "copy")
    store.delete(store.require(keys.checkpoint(RUN, 2)))
    assert sorted(file.name for file in (tmp_path / "copy").iterdir()) == MODEL


def test_a_version_that_goes_while_it_is_fetched_was_removed(tmp_path: Path) -> None:
    class Pruned(ArtifactStore):
        def pieces(self, ref: ArtifactRef, name: str) -> Iterator[bytes]:
            if name == "model.safetensors":
                self.delete(ref)
            return super().pieces(ref, name)

    store = Pruned(str(tmp_path / "store"))
    leave(store, RUN, weights=[0, 2])
    with pytest.raises(NoVersion, match="version 2 of run run has been removed") as gone:
        policies.fetch(store, RUN, 2, tmp_path / "copy")
    assert gone.value.removed


def test_what_a_policy_descends_from(store: ArtifactStore, tmp_path: Path) -> None:
    leave(store, RUN, weights=[0])
    assert policies.about(store, RUN) == {
        "base": "ratchet/smollm2-135m",
        "license": "apache-2.0",
        "parameters": 1234,
    }
    leave(store, "early", model={"name": "a/hub-name"})
    assert policies.about(store, "early")["base"] == "a/hub-name"
    put_whole_checkpoint(store, "early", 1)
    assert policies.about(store, "early")["license"] is None
