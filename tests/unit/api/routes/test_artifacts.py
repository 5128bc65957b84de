"""Checkpoints and batches as the API lists them: variants, damage, names of something else."""

from pathlib import Path

import pytest

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys
from ratchet.activities.storage.fencing import variant
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.store.artifacts import batches, checkpoint, checkpoints, checkpoints_of
from ratchet.api.store.records import Records

RUN, NEXT = "run", "run+2"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.fixture
def kept(store: ArtifactStore, tmp_path: Path) -> dict[str, ArtifactRef]:
    """A checkpoint of step 4, and of step 8 three variants."""
    plain = keys.checkpoint(RUN, 8)
    names = [keys.checkpoint(RUN, 4), plain, variant(plain, 3), variant(plain, 12)]
    found = {}
    for name in names:
        folder = tmp_path / "made" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(name)
        found[name] = store.put_folder(name, folder, attempt="t")
    return found


def test_of_variants_the_last_sound_one_is_shown(
    store: ArtifactStore, kept: dict[str, ArtifactRef]
) -> None:
    records, plain = Records(store), keys.checkpoint(RUN, 8)
    assert [found.step for found in checkpoints_of(records, RUN)] == [4, 8]
    _, shown = checkpoints(records, RUN, verify=True)
    assert (shown.sha256, shown.sound) == (kept[variant(plain, 12)].sha256, True)
    assert shown.path == kept[variant(plain, 12)].path
    store.fs.rm(store.path(f"{kept[variant(plain, 12)].path}/model.safetensors"))
    _, shown = checkpoints(records, RUN, verify=False)
    assert (shown.sha256, shown.sound) == (kept[variant(plain, 3)].sha256, True)
    for name in (plain, variant(plain, 3)):
        store.fs.rm(store.path(f"{kept[name].path}/manifest.json"))
    _, shown = checkpoints(records, RUN, verify=False)
    assert shown.sha256 == kept[variant(plain, 12)].sha256
    assert shown.problem == "model.safetensors is missing"


def test_a_damaged_marker_is_reported(store: ArtifactStore, kept: dict[str, ArtifactRef]) -> None:
    store.fs.pipe_file(store.path(keys.checkpoint(RUN, 4) + ".commit"), b'{"key": "r')
    first, second = checkpoints(Records(store), RUN, verify=False)
    assert not first.sound and "marker" in (first.problem or "")
    assert second.sound


def test_one_that_was_deleted_meanwhile_is_left_out(
    store: ArtifactStore, kept: dict[str, ArtifactRef]
) -> None:
    first, second = checkpoints_of(Records(store), RUN)
    store.delete(kept[keys.checkpoint(RUN, 4)])
    store.delete(kept[variant(keys.checkpoint(RUN, 8), 12)])
    assert checkpoint(store, first, verify=False) is None
    shown = checkpoint(store, second, verify=False)
    assert shown and shown.sha256 == kept[variant(keys.checkpoint(RUN, 8), 3)].sha256


def test_names_of_something_else_are_passed_over(
    store: ArtifactStore, kept: dict[str, ArtifactRef]
) -> None:
    store.put(f"{keys.checkpoints(RUN)}/notes", b"")
    store.put(f"{keys.run_folder(RUN)}/batches/step-1.bak", b"")
    store.put(keys.batch(RUN, 2), b"PAR1")
    records = Records(store)
    assert [found.step for found in checkpoints_of(records, RUN)] == [4, 8]
    found, more = batches(records, RUN, 0, 10)
    assert ([batch.step for batch in found], more) == ([2], None)


def test_a_later_attempt_holds_a_step_that_both_have(
    store: ArtifactStore, kept: dict[str, ArtifactRef]
) -> None:
    store.put_json(keys.config(NEXT), {})
    store.put_json(keys.lineage(NEXT), {"source": RUN, "step": 4, "kind": "resume"})
    store.copy(kept[keys.checkpoint(RUN, 4)], keys.checkpoint(NEXT, 4), attempt="r")
    (found,) = checkpoints_of(Records(store), RUN)
    assert (found.step, found.attempt, found.keys) == (4, NEXT, (keys.checkpoint(NEXT, 4),))
