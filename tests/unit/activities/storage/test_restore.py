"""A run begun from a checkpoint: what is copied, what is refused, what a crash leaves."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import RestoreInput, RestoreResult, SaveConfigInput
from ratchet.activities.contracts.upgrades import TRAINER_STATE
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import failure_of
from ratchet.activities.runtime.store_activities import StoreActivities
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage import restore as checkpoints
from ratchet.activities.storage.fencing import variant
from ratchet.activities.storage.lineage import segments
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact, StoreUnavailable
from ratchet.configs.upgrades import config_document
from ratchet.configs.versions import NewerSchema
from tests.unit.workflows.support import config

SOURCE, NEXT, FORK = "run-1", "run-1+2", "other"
TRAINER = dict.fromkeys(TRAINER_STATE.keys) | {"schema": TRAINER_STATE.current}
EXPORTED = {"model.safetensors": "weights", "config.json": "{}", "canary.json": "[]"}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def artifacts(store: ArtifactStore, run: str, step: int) -> dict[str, ArtifactRef]:
    """What a run's state refers to at `step`."""
    return {
        "group": store.put_json(keys.group(run, f"train/{step}"), {"schema": 1, "n": step}),
        "cut": store.put_json(keys.group(run, f"train/{step}.1"), {"schema": 1, "n": step}),
        "batch": store.put(keys.batch(run, step + 1), b"PAR1"),
        "metrics": store.put_json(keys.batch_metrics(run, step + 1, "a" * 64), {"x": 1.0}),
    }


def checkpoint(
    store: ArtifactStore,
    tmp_path: Path,
    run: str,
    step: int,
    epoch: int | None = None,
    **changes: Any,
) -> ArtifactRef:
    """A checkpoint as a trainer and a workflow make it, by the trainer of `epoch` the variant of
    it; `changes` are files of other content.
    """
    made = {name: asdict(ref) for name, ref in artifacts(store, run, step).items()}
    weights = ArtifactRef(keys.weights(run, step), "0" * 64, 1, f"{keys.weights(run, step)}@gone")
    cache = store.put(keys.policy_cache("0123"), b"shared")
    state = {
        "schema": 1,
        "config": {"seed": 0},
        "state": {
            "step": step,
            "weights": asdict(weights),
            "train": {
                "ready": [{"group": f"train/{step}", "ref": made["group"]}, {"ref": None}],
                "cut": [{"ref": made["cut"]}],
            },
            "shipped": [{"ref": made["batch"], "metrics_ref": made["metrics"]}],
            "cache": asdict(cache),
        },
    }
    files = {
        **EXPORTED,
        "model.safetensors": f"weights of {step}",
        "optimizer.safetensors": f"moments of {step}",
        "trainer.json": json.dumps(TRAINER | {"step": step}),
        "run_state.json": json.dumps(state),
        **changes,
    }
    key = keys.checkpoint(run, step)
    if epoch is not None:
        key = variant(key, epoch)
        files["optimizer.safetensors"] = f"moments of {step} by {epoch}"
    folder = tmp_path / "made" / key
    folder.mkdir(parents=True)
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text)
    return store.put_folder(key, folder, attempt=f"save-{step}")


@pytest.fixture
def source(store: ArtifactStore, tmp_path: Path) -> dict[int, ArtifactRef]:
    """Checkpoints of steps 10, 20 and 30, and the weights of version 0."""
    folder = tmp_path / "v0"
    folder.mkdir()
    (folder / "config.json").write_text('{"v": 0}')
    store.put_folder(keys.weights(SOURCE, 0), folder, attempt="prepare")
    return {step: checkpoint(store, tmp_path, SOURCE, step) for step in (10, 20, 30)}


def restore(
    store: ArtifactStore, run: str = NEXT, source: str = SOURCE, step: int | None = None
) -> RestoreResult:
    return checkpoints.restore(store, RestoreInput(run, source, step), "attempt")


def references(value: Any) -> list[ArtifactRef]:
    if isinstance(value, list):
        return [ref for item in value for ref in references(item)]
    if not isinstance(value, dict):
        return []
    if "sha256" in value:
        return [ArtifactRef(**value)]
    return [ref for item in value.values() for ref in references(item)]


def spoil(store: ArtifactStore, path: str) -> None:
    """Flips one bit."""
    data = bytearray(store.fs.cat_file(store.path(path)))
    data[len(data) // 2] ^= 1
    store.fs.pipe_file(store.path(path), bytes(data))


def forget(store: ArtifactStore, run: str) -> None:
    store.fs.rm(store.path(keys.run_folder(run)), recursive=True)


def everything(store: ArtifactStore, run: str) -> dict[str, str]:
    """Committed keys of a run, and their hashes."""
    root = Path(store.path(keys.run_folder(run)))
    markers = [json.loads(path.read_text()) for path in root.rglob("*.commit")]
    return {marker["key"]: marker["sha256"] for marker in markers}


def test_a_restored_run_needs_nothing_of_its_source(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    result = restore(store)
    forget(store, SOURCE)
    assert (result.checkpoint.step, result.refused) == (30, [])
    assert result.checkpoint.ref == store.require(keys.checkpoint(NEXT, 30))
    assert result.checkpoint.ref.sha256 == source[30].sha256
    folder = store.fetch_folder(result.checkpoint.ref)
    assert (folder / "optimizer.safetensors").read_text() == "moments of 30"
    weights = store.fetch_folder(result.weights)
    assert result.weights == store.require(keys.weights(NEXT, 30))
    assert {path.name for path in weights.iterdir()} == {*EXPORTED, "manifest.json"}
    assert (weights / "model.safetensors").read_text() == "weights of 30"
    first = store.fetch_folder(store.require(keys.weights(NEXT, 0)))
    assert (first / "config.json").read_text() == '{"v": 0}'
    state = result.run_state["state"]
    assert state["weights"] == asdict(result.weights), "those of the source may be gone"
    assert state["cache"]["key"] == keys.policy_cache("0123"), "what is shared stays shared"
    assert state["train"]["ready"][0]["ref"]["key"] == keys.group(NEXT, "train/30")
    assert state["train"]["ready"][1] == {"ref": None}
    for ref in references(result.run_state):
        store.verify(ref)
        assert store.committed(ref.key) == ref
    lineage = store.get_json(store.require(keys.lineage(NEXT)))
    assert lineage == {"source": SOURCE, "step": 30, "kind": "resume"}
    assert result.source == SOURCE


ADAPTER_ALONE = dict.fromkeys(EXPORTED)


def adapter_checkpoint(
    store: ArtifactStore, tmp_path: Path, step: int, epoch: int | None = None
) -> ArtifactRef:
    """A checkpoint that holds an adapter alone."""
    name = f"{step}-{epoch}"
    made = {"adapter_model.safetensors": name, **ADAPTER_ALONE}
    ref = checkpoint(store, tmp_path, SOURCE, step, epoch, **made)
    return in_its_folder(store, tmp_path, ref, name)


def in_its_folder(store: ArtifactStore, tmp_path: Path, ref: ArtifactRef, name: str) -> ArtifactRef:
    folder = tmp_path / "moved" / name
    shutil.copytree(store.fetch_folder(ref), folder, ignore=shutil.ignore_patterns("manifest*"))
    (folder / keys.ADAPTER_FOLDER).mkdir()
    (folder / keys.ADAPTER_WEIGHTS).rename(folder / keys.ADAPTER_FILE)
    store.delete(ref)
    return store.put_folder(ref.key, folder, attempt=f"moved-{name}")


def merged_weights(
    store: ArtifactStore, tmp_path: Path, step: int, adapter: str, epoch: int | None = None
) -> ArtifactRef:
    key = keys.weights(SOURCE, step)
    folder = tmp_path / "merged" / f"{step}-{epoch}"
    (folder / keys.ADAPTER_FOLDER).mkdir(parents=True)
    (folder / keys.ADAPTER_FILE).write_text(adapter)
    (folder / "model.safetensors").write_text(f"merged with {adapter}")
    return store.put_folder(key if epoch is None else variant(key, epoch), folder, attempt="m")


def test_an_adapter_is_restored_with_the_weights_that_it_is_merged_into(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> None:
    saved = adapter_checkpoint(store, tmp_path, 40)
    merged_weights(store, tmp_path, 40, "of another trainer")
    mine = merged_weights(store, tmp_path, 40, "40-None", 3)
    result = restore(store)
    forget(store, SOURCE)
    assert (result.checkpoint.step, result.refused) == (40, [])
    assert result.checkpoint.ref.sha256 == saved.sha256 and result.weights.sha256 == mine.sha256
    assert result.weights == store.require(keys.weights(NEXT, 40))
    assert store.committed(keys.weights(NEXT, 0)) is not None
    assert restore(store) == result, "repeated, it has the same of its own"


@pytest.mark.parametrize("left", ["nothing", "another", "spoiled"])
def test_an_adapter_without_its_merged_weights_gives_way(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path, left: str
) -> None:
    adapter_checkpoint(store, tmp_path, 40)
    if left == "another":
        merged_weights(store, tmp_path, 40, "of another trainer")
    if left == "spoiled":
        kept = merged_weights(store, tmp_path, 40, "40-None")
        spoil(store, f"{kept.path}/model.safetensors")
    result = restore(store)
    assert result.checkpoint.step == 30
    (said,) = result.refused
    assert "checkpoint of step 40 is damaged" in said
    assert ("does not match" if left == "spoiled" else "into which its adapter is merged") in said


def test_the_adapter_of_step_0_goes_with_version_0(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> None:
    adapter_checkpoint(store, tmp_path, 0)
    first = store.require(keys.weights(SOURCE, 0))
    assert restore(store, FORK, step=0).weights.sha256 == first.sha256


def test_a_fork_begins_where_it_is_asked_to(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    result = restore(store, FORK, step=10)
    assert result.checkpoint.step == 10 and result.refused == []
    assert result.run_state["state"]["shipped"][0]["ref"]["key"] == keys.batch(FORK, 11)
    assert store.get_json(store.require(keys.lineage(FORK)))["kind"] == "fork"
    with pytest.raises(ValueError, match=r"no checkpoint of step 15 .*steps 10, 20, 30"):
        restore(store, "third", step=15)
    with pytest.raises(ValueError, match=r"run none has no checkpoint .*start a new run"):
        restore(store, "third", source="none")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda store, ref: spoil(store, f"{ref.path}/optimizer.safetensors"), "optimizer"),
        (lambda store, ref: spoil(store, f"{ref.path}/manifest.json"), "manifest"),
        (
            lambda store, ref: store.fs.rm(store.path(f"{ref.path}/model.safetensors")),
            "model.safetensors is missing",
        ),
        (
            lambda store, ref: store.fs.pipe_file(store.path(ref.key + ".commit"), b'{"key": "r'),
            "marker",
        ),
        (
            lambda store, ref: store.delete(store.require(keys.group(SOURCE, "train/30"))),
            "train/30",
        ),
        (
            lambda store, ref: spoil(store, store.require(keys.batch(SOURCE, 31)).path),
            "step-00000031",
        ),
    ],
    ids=["flipped bit", "manifest", "missing file", "half a marker", "lost group", "bad batch"],
)
def test_the_one_before_a_damaged_one_is_used(
    store: ArtifactStore, source: dict[int, ArtifactRef], harm: Any, said: str
) -> None:
    harm(store, source[30])
    result = restore(store)
    assert result.checkpoint.step == 20
    (reported,) = result.refused
    assert reported.startswith("checkpoint of step 30 is damaged: runs/run-1/") and said in reported
    assert reported.endswith("; that of step 20 is used instead")
    assert not [key for key in everything(store, NEXT) if "30" in key or "31" in key]


def test_the_one_before_one_that_was_deleted_meanwhile_is_used(
    store: ArtifactStore, source: dict[int, ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes it after it was listed."""
    committed = ArtifactStore.committed

    def deleted_before(store: ArtifactStore, key: str) -> ArtifactRef | None:
        if key == source[30].key and (ref := committed(store, key)):
            store.delete(ref)
        return committed(store, key)

    monkeypatch.setattr(ArtifactStore, "committed", deleted_before)
    result = restore(store)
    assert result.checkpoint.step == 20
    assert "it was deleted in the meantime; that of step 20 is used" in result.refused[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_state.json": '{"cursor": 1}'}, "run_state.json has schema 0"),
        ({"run_state.json": '{"schema": "a"}'}, "run_state.json has schema 'a'; the schemas read"),
        ({"run_state.json": '{"schema": 1, "st'}, "run_state.json is not JSON"),
        ({"run_state.json": '{"schema": 1, "config": {}}'}, "lost keys ['state'] and unknown ones"),
        ({"trainer.json": json.dumps(TRAINER | {"heads": 2})}, "and unknown ones ['heads']"),
        ({"run_state.json": None}, "run_state.json is missing"),
    ],
)
def test_what_cannot_be_read_here_is_passed_over(
    store: ArtifactStore,
    source: dict[int, ArtifactRef],
    tmp_path: Path,
    changes: dict[str, str | None],
    said: str,
) -> None:
    checkpoint(store, tmp_path, SOURCE, 40, **changes)
    spoil(store, f"{source[30].path}/config.json")
    result = restore(store)
    assert result.checkpoint.step == 20 and len(result.refused) == 2
    assert said in result.refused[0] and "checkpoint of step 40" in result.refused[0]
    assert "checkpoint of step 30 is damaged" in result.refused[1]
    with pytest.raises(ValueError, match=r"of step 40.*; there are those of steps 10, 20, 30$"):
        restore(store, FORK, step=40)
    assert everything(store, FORK) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.json": '{"schema": 9}'}, "trainer.json has schema 9, .* reads 1 to 3"),
        ({"run_state.json": '{"schema": 2, "state": {}}'}, "run_state.json has schema 2"),
    ],
)
@pytest.mark.parametrize("step", [None, 40])
async def test_a_newer_one_waits_for_a_worker_that_reads_it(
    store: ArtifactStore,
    source: dict[int, ArtifactRef],
    tmp_path: Path,
    changes: dict[str, str | None],
    said: str,
    step: int | None,
) -> None:
    checkpoint(store, tmp_path, SOURCE, 40, **changes)
    with pytest.raises(NewerSchema, match=said) as caught:
        restore(store, FORK, step=step)
    assert everything(store, FORK) == {}
    failure = failure_of(caught.value, "restore_run")
    assert failure is not None and failure.type == names.STORE_FAILED
    assert restore(store, FORK, step=30).checkpoint.step == 30


def test_if_none_is_sound_all_is_reported(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    for ref in source.values():
        spoil(store, f"{ref.path}/model.safetensors")
    with pytest.raises(ValueError) as caught:
        restore(store)
    for step in (10, 20, 30):
        assert f"checkpoint of step {step} is damaged" in str(caught.value)
    assert everything(store, NEXT) == {}


def test_damaged_first_weights_are_not_taken_over(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    first = store.require(keys.weights(SOURCE, 0))
    spoil(store, f"{first.path}/config.json")
    with pytest.raises(CorruptArtifact, match="v00000000"):
        restore(store)
    store.delete(first)
    assert restore(store).checkpoint.step == 30
    assert store.committed(keys.weights(NEXT, 0)) is None


def test_a_crash_anywhere_changes_nothing(
    store: ArtifactStore, source: dict[int, ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(store, f"{source[30].path}/model.safetensors")
    whole = restore(store, FORK)
    wanted = {
        key.replace("/other/", "/run-1+2/"): sha for key, sha in everything(store, FORK).items()
    }
    lineage = keys.lineage(NEXT)
    del wanted[lineage]
    commit = ArtifactStore._commit
    crashes = 0
    for allowed in range(len(wanted) + 2):
        left = allowed

        def failing(self: ArtifactStore, ref: ArtifactRef) -> ArtifactRef:
            nonlocal left
            if left == 0:
                raise StoreUnavailable("killed")
            left -= 1
            return commit(self, ref)

        with monkeypatch.context() as patch:
            patch.setattr(ArtifactStore, "_commit", failing)
            try:
                restore(store)
            except StoreUnavailable:
                crashes += 1
                assert store.committed(lineage) is None, "it comes last"
        again = restore(store)
        assert (again.checkpoint.step, again.refused) == (20, whole.refused)
        found = everything(store, NEXT)
        assert {key: sha for key, sha in found.items() if key != lineage} == wanted
        forget(store, NEXT)
    assert crashes == len(wanted) + 1


def test_once_begun_it_stays_so_though_the_source_goes_on(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> None:
    spoil(store, f"{source[30].path}/model.safetensors")
    first = restore(store)
    assert first.checkpoint.step == 20
    checkpoint(store, tmp_path, SOURCE, 40)
    assert restore(store) == first
    store.delete(source[20])
    store.delete(store.require(keys.group(SOURCE, "train/20")))
    store.delete(store.require(keys.weights(SOURCE, 0)))
    assert restore(store) == first


def test_the_lineage_is_followed(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> None:
    restore(store, NEXT, step=20)
    late = checkpoint(store, tmp_path, NEXT, 25)
    restore(store, "run-1+3", source=NEXT)
    restore(store, FORK, source="run-1+3", step=25)
    assert segments(store, FORK) == [(FORK, None), ("run-1+3", 25), (NEXT, 25), (SOURCE, 20)]
    assert segments(store, SOURCE) == [(SOURCE, None)]
    # What an attempt has not kept itself is found with the one it came from, but nothing later.
    assert restore(store, "fork-of-10", source=NEXT, step=10).checkpoint.step == 10
    assert store.get_json(store.require(keys.lineage("fork-of-10")))["source"] == SOURCE
    with pytest.raises(ValueError, match="steps 10, 20, 25"):
        restore(store, "fork-of-30", source=NEXT, step=30)
    spoil(store, f"{late.path}/model.safetensors")
    spoil(store, f"{store.require(keys.checkpoint(NEXT, 20)).path}/model.safetensors")
    result = restore(store, "run-1+4", source=NEXT)
    assert (result.checkpoint.step, len(result.refused), result.source) == (20, 2, SOURCE)
    assert segments(store, "run-1+4") == [("run-1+4", None), (SOURCE, 20)]


def test_an_attempt_that_made_no_checkpoint_owns_what_it_was_given(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    restore(store, NEXT)
    forget(store, SOURCE)
    store.put_json(keys.group(SOURCE, "train/30"), {"schema": 1, "n": "of another run so named"})
    for run in ("run-1+3", FORK):
        result = restore(store, run, source=NEXT)
        assert (result.source, result.checkpoint.step, result.refused) == (NEXT, 30, [])
        found = references(result.run_state)
        owned = [ref for ref in found if ref.key.startswith(f"{keys.run_folder(run)}/")]
        shared = [ref.key for ref in found if ref not in owned]
        assert len(owned) == 5 and shared == [keys.policy_cache("0123")]
        for ref in found:
            store.verify(ref)
        assert store.get_json(store.require(keys.group(run, "train/30"))) == {"schema": 1, "n": 30}


@pytest.fixture
def apart(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> dict[int, ArtifactRef]:
    """Variants of the checkpoint of step 30, by epoch; the plain one has -1."""
    return {-1: source[30]} | {
        epoch: checkpoint(store, tmp_path, SOURCE, 30, epoch) for epoch in (3, 12)
    }


def test_the_last_trainers_variant_is_the_one_to_go_on_from(
    store: ArtifactStore, apart: dict[int, ArtifactRef]
) -> None:
    result = restore(store)
    assert (result.checkpoint.step, result.refused, result.source) == (30, [], SOURCE)
    assert result.checkpoint.ref.key == keys.checkpoint(NEXT, 30)
    assert result.checkpoint.ref.sha256 == apart[12].sha256
    assert restore(store, FORK, step=30).checkpoint.ref.sha256 == apart[12].sha256
    store.delete(apart[12])
    assert restore(store) == result


def test_of_damaged_variants_the_one_before_is_used(
    store: ArtifactStore, apart: dict[int, ArtifactRef]
) -> None:
    spoil(store, f"{apart[12].path}/optimizer.safetensors")
    result = restore(store)
    assert result.checkpoint.ref.sha256 == apart[3].sha256
    (reported,) = result.refused
    assert reported.startswith(
        "checkpoint of step 30 is damaged: runs/run-1/checkpoints/step-00000030"
    )
    assert ".e12: " in reported and reported.endswith("; another one of that step is used instead")
    spoil(store, f"{apart[3].path}/model.safetensors")
    assert restore(store) == result, "what was copied is taken"
    plain = restore(store, FORK)
    assert plain.checkpoint.ref.sha256 == apart[-1].sha256 and len(plain.refused) == 2
    spoil(store, f"{apart[-1].path}/config.json")
    last = restore(store, "third")
    assert last.checkpoint.step == 20 and len(last.refused) == 3
    assert restore(store, "third") == last, "with all that was refused"
    assert all(reported.endswith("; that of step 20 is used instead") for reported in last.refused)


def test_what_was_copied_of_one_variant_is_not_mixed_with_another(
    store: ArtifactStore, apart: dict[int, ArtifactRef]
) -> None:
    store.copy(apart[12], keys.checkpoint(NEXT, 30), attempt="killed")
    store.delete(apart[12])
    result = restore(store)
    assert result.checkpoint.ref.sha256 == apart[12].sha256
    folder = store.fetch_folder(result.checkpoint.ref)
    assert (folder / "optimizer.safetensors").read_text() == "moments of 30 by 12"


def test_keys_that_name_no_step_are_passed_over(
    store: ArtifactStore, source: dict[int, ArtifactRef]
) -> None:
    for name in ("step-00000031.bak", "notes", "step-00000030.e"):
        store.put(f"{keys.checkpoints(SOURCE)}/{name}", b"")
    assert restore(store).checkpoint.ref.sha256 == source[30].sha256


def test_a_run_descends_from_no_run_twice(store: ArtifactStore) -> None:
    store.put_json(keys.lineage("a"), {"source": "b", "step": 1, "kind": "fork"})
    store.put_json(keys.lineage("b"), {"source": "a", "step": 1, "kind": "fork"})
    with pytest.raises(AssertionError, match="descends from itself"):
        segments(store, "a")


async def test_the_activities(
    store: ArtifactStore, source: dict[int, ArtifactRef], tmp_path: Path
) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=store.url, own_queue="q")
    acts, run = StoreActivities(ctx), ActivityEnvironment().run
    result = await run(acts.restore_run, RestoreInput(NEXT, SOURCE))
    assert result.checkpoint.step == 30
    with pytest.raises(ApplicationError, match="steps 10, 20, 30") as caught:
        await run(acts.restore_run, RestoreInput(FORK, SOURCE, 7))
    assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable
    for _ in range(2):
        await run(acts.save_config, SaveConfigInput(NEXT, 1, config_document(config(max_steps=3))))
    assert configs.load(store, NEXT, 1) == config(max_steps=3)
    with pytest.raises(ApplicationError, match="a different config") as caught:
        await run(acts.save_config, SaveConfigInput(NEXT, 1, config_document(config(max_steps=4))))
    assert caught.value.type == names.CORRUPT and caught.value.non_retryable


def test_gauges_of_all_attempts_are_one_series() -> None:
    assert keys.live(NEXT, "w") == keys.live(SOURCE, "w")
    assert keys.series(NEXT, "w", 1) == keys.series(SOURCE, "w", 1)
    assert keys.live_records(NEXT) == keys.live_records(SOURCE)
    assert keys.series_folder(NEXT) == keys.series_folder(SOURCE)
    assert keys.step_records(NEXT) != keys.step_records(SOURCE)
