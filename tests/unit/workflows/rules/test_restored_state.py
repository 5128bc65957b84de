"""A run's real state through a checkpoint into a later attempt and a fork: all of it resolves."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.activities.contracts.training import CheckpointResult, RestoreInput, RestoreResult
from ratchet.activities.contracts.wire import decoded
from ratchet.activities.storage import fencing, keys
from ratchet.activities.storage import restore as checkpoints
from ratchet.activities.storage.batch import decode_batch, encode_batch
from ratchet.activities.storage.lineage import segments
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.load import validate
from ratchet.workflows.protocol.state import (
    DispatchState,
    GenerationState,
    Lease,
    Lifecycle,
    LiveConfig,
    Recording,
    RunState,
    ServersState,
    ShippedBatch,
    StepsState,
    TrainedBatch,
    TrainerState,
    TrainProgress,
)
from ratchet.workflows.rules.restore import kept, restored
from tests.unit.activities.storage.test_data_page import SAMPLE
from tests.unit.activities.storage.test_restore import TRAINER
from tests.unit.workflows.support import config

SOURCE, STEP, EPOCH = "run-1", 5, 2
CONFIG = config()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def group(store: ArtifactStore, name: str) -> GroupResult:
    """A finalized group that lies in the store."""
    ref = store.put_json(keys.group(SOURCE, name), {"schema": 1, "group": name}, attempt="f")
    return GroupResult(name, "train", "a", ref, 2, 2, 0, 0.5, 2, 8, 3, trainable=2)


def shipped(store: ArtifactStore, step: int) -> ShippedBatch:
    """A batch that waits for the trainer."""
    batch = encode_batch([replace(SAMPLE, group=f"train/{step}")])
    metrics = store.put_json(keys.batch_metrics(SOURCE, step, f"{step:064d}"), {"reward/all": 0.5})
    return ShippedBatch(step, store.put(keys.batch(SOURCE, step), batch), {}, metrics, 0.1)


def folder(path: Path, bits: str, **more: str) -> Path:
    """Files that a trainer writes; `bits` are its own."""
    path.mkdir(parents=True)
    files = {"model.safetensors": bits, "config.json": "{}", "canary.json": "[]", **more}
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def run(store: ArtifactStore, made: Path) -> RunState:
    """A run whose trainer of epoch 2 came to other bits than the one before it, at its checkpoint:
    some batches are shipped, one is being written, groups are ready and others in flight.
    """
    store.put_folder(keys.weights(SOURCE, 0), folder(made / "v0", "0"), attempt="p")
    version = keys.weights(SOURCE, STEP)
    fencing.commit(store, version, folder(made / "v-1", "-1"), epoch=1, attempt="t1")
    weights = fencing.commit(store, version, folder(made / "v", "2"), epoch=EPOCH, attempt="t2")
    # Retention deletes these while the run goes on, and no checkpoint may need them.
    gone = [ArtifactRef(k, "0" * 64, 1, f"{k}@x") for k in (keys.batch(SOURCE, 4), version + ".e1")]
    trained = [TrainedBatch(4, gone[0], 1)]
    state = RunState(
        Lifecycle("running"),
        live=LiveConfig({"max_steps": 12}, revision=1, pending=True),
        servers=ServersState(weights=weights),
        trainer=TrainerState(
            EPOCH,
            STEP,
            checkpoint=CheckpointResult(3, gone[1]),
            batches=trained,
            older=Recording(CheckpointResult(1, gone[1]), list(trained)),
        ),
        train=TrainProgress(
            ready=[group(store, "train/40"), group(store, "train/9.1")],
            cut=[group(store, f"train/{n}") for n in (30, 31, 32, 33)],
            shipped_rollouts=64,
            shipped_batches=8,
        ),
        steps=StepsState(STEP, STEP, shipped=[shipped(store, STEP + 1), shipped(store, STEP + 2)]),
        dispatch=DispatchState(
            generations=[
                GenerationState(2, Lease(next_train=50), started=True, outstanding=["train/45"])
            ],
            next_generation=3,
        ),
    )
    text = kept(state, CONFIG)
    for epoch in (1, EPOCH):
        whole = folder(
            made / f"checkpoint-{epoch}",
            str(epoch),
            **{
                "optimizer.safetensors": f"moments of {epoch}",
                "optimizer/shard-00001.safetensors": f"a rank's of {epoch}",
                "trainer.json": json.dumps(TRAINER | {"step": STEP}),
                "run_state.json": text,
            },
        )
        key = keys.checkpoint(SOURCE, STEP)
        fencing.commit(store, key, whole, epoch=epoch, attempt=f"c{epoch}")
    return state


def begin(store: ArtifactStore, to: str, source: str, config: Any = CONFIG) -> RunState:
    """What a run begins with, by way of the JSON that crosses to Temporal."""
    arg = RestoreInput(to, source)
    result = decoded(RestoreResult, json.loads(to_json(checkpoints.restore(store, arg, "attempt"))))
    assert result.refused == []
    return restored(arg, result, decoded(RunState, result.run_state["state"]), config)


def references(value: Any) -> list[ArtifactRef]:
    if isinstance(value, list):
        return [ref for item in value for ref in references(item)]
    if not isinstance(value, dict):
        return []
    if "sha256" in value:
        return [ArtifactRef(**value)]
    return [ref for item in value.values() for ref in references(item)]


def check(store: ArtifactStore, after: RunState, to: str, before: RunState) -> None:
    """All that the state refers to is the run's own, whole, and what it was at the checkpoint."""
    found = references(asdict(after))
    # Six groups, two batches with their metrics, weights and checkpoint.
    assert len(found) == 6 + 2 * 2 + 2
    for ref in found:
        assert ref.key.startswith(f"{keys.run_folder(to)}/")
        assert store.require(ref.key) == ref
        store.verify(ref)
    groups = [*before.train.cut, *before.train.ready]
    assert [g.group for g in after.train.ready] == [g.group for g in groups]
    for was, now in zip(groups, after.train.ready, strict=True):
        assert now.ref == store.require(keys.group(to, now.group))
        assert was.ref is not None and now.ref is not None and now.ref.sha256 == was.ref.sha256
    assert [batch.step for batch in after.steps.shipped] == [STEP + 1, STEP + 2]
    for batch in after.steps.shipped:
        assert batch.ref.key == keys.batch(to, batch.step)
        assert [row.group for row in decode_batch(store.get(batch.ref))] == [f"train/{batch.step}"]
        assert batch.metrics_ref is not None
        assert store.get_json(batch.metrics_ref) == {"reward/all": 0.5}
    names = (keys.weights(to, STEP), keys.checkpoint(to, STEP))
    weights, checkpoint = (store.require(name) for name in names)
    assert after.servers.weights == weights
    assert after.trainer == TrainerState(checkpoint=CheckpointResult(STEP, checkpoint))
    folders = [store.fetch_folder(ref) for ref in (weights, checkpoint)]
    assert {(f / "model.safetensors").read_text() for f in folders} == {str(EPOCH)}
    assert not (folders[0] / "optimizer.safetensors").exists()
    shown = [(f / "optimizer" / "shard-00001.safetensors").exists() for f in folders]
    assert shown == [False, True], "what a rank wrote of the optimizer is no part of weights"
    assert after.dispatch.requeued == ["train/45"]
    assert (after.live.revision, after.live.pending) == (0, False), "its config has all changes"
    assert after.dispatch.generations[-1].lease.next_train == 50


@pytest.mark.parametrize("to", ["run-1+2", "other"])
def test_all_of_a_restored_state_resolves(store: ArtifactStore, tmp_path: Path, to: str) -> None:
    before = run(store, tmp_path / "made")
    after = begin(store, to, SOURCE)
    store.fs.rm(store.path(keys.run_folder(SOURCE)), recursive=True)
    check(store, after, to, before)
    assert after.live.overrides == ({"max_steps": 12} if to == "run-1+2" else {})


def test_attempts_after_attempts_need_none_before(store: ArtifactStore, tmp_path: Path) -> None:
    before = run(store, tmp_path / "made")
    source = SOURCE
    for to in ("run-1+2", "run-1+3", "other", "other+2"):
        after = begin(store, to, source)
        store.fs.rm(store.path(keys.run_folder(source)), recursive=True)
        check(store, after, to, before)
        assert segments(store, to) == [(to, None), (source, STEP)]
        source = to


def test_a_fork_on_other_data_keeps_the_policy_alone(store: ArtifactStore, tmp_path: Path) -> None:
    run(store, tmp_path / "made")
    changed = validate({**CONFIG.model_dump(mode="json"), "seed": 5})
    store.put_json(keys.config("other"), changed.model_dump(mode="json"))
    after = begin(store, "other", SOURCE, changed)
    assert {ref.key for ref in references(asdict(after))} == {
        keys.weights("other", STEP),
        keys.checkpoint("other", STEP),
    }
    (closed,) = after.dispatch.generations
    assert closed.number == after.dispatch.next_generation - 1 and closed.state == "closed"
    # Named as the source's, they would be taken for its own by the groups that it rolls out.
    for name in ("train/30", "train/40"):
        assert store.committed(keys.group("other", name)) is None
    assert store.committed(keys.batch("other", STEP + 1)) is None
