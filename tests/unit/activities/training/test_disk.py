"""What a run keeps on disk: counted by its config, refused with what helps."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import SaveCheckpointInput, TrainerTarget
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.activities import TrainerActivities
from ratchet.activities.training.check import check_disk, estimates, shape_of
from ratchet.activities.training.disk import checkpoint_bytes, disk_parts, problem
from ratchet.activities.training.memory import GIB, Shape
from ratchet.configs.run import RunConfig
from tests.unit.activities.training.test_activities import RUN, context, run
from tests.unit.activities.training.test_check import config

LARGE = Shape(layers=36, hidden=2560, heads=4096, kv_heads=1024, inner=9728, vocab=151936)
FULL = 4 * LARGE.parameters


def weight_parts(shape: Shape, run: RunConfig) -> dict[str, int]:
    """Without what rollouts and batches take."""
    return {k: v for k, v in disk_parts(shape, run).items() if k not in ("rollouts", "batches")}


def run_of(sections: dict[str, dict[str, Any]] | None = None, **top: Any) -> RunConfig:
    plain = config({}, seq_len=512).model_dump(mode="json")
    for name, changes in (sections or {}).items():
        plain[name] = {**plain[name], **changes}
    return RunConfig.model_validate({**plain, "max_steps": 100, **top})


def test_parts_are_what_retention_keeps() -> None:
    plain = weight_parts(LARGE, run_of())
    # Version 0, the newest four and none of an eval; two checkpoints of weights and two moments.
    assert plain == {"versions": 5 * FULL, "checkpoints": 6 * FULL, "being written": 6 * FULL}
    low = weight_parts(LARGE, run_of({"inference": {"dtype": "bfloat16"}}))
    assert low == {**plain, "versions": 5 * FULL // 2}, "masters stay float32"
    assert disk_parts(LARGE, run_of({"retention": {"weights": "all"}}))["versions"] == 101 * FULL
    every = run_of({"checkpoint": {"keep_last": 3, "keep_every": 20}})
    assert disk_parts(LARGE, every)["checkpoints"] == (3 + 2) * 3 * FULL
    sgd = run_of({"trainer": {"optim": {"type": "sgd", "lr": 0.1}}})
    assert disk_parts(LARGE, sgd)["checkpoints"] == 4 * FULL
    short = weight_parts(LARGE, run_of(max_steps=1))
    assert short == {"versions": 2 * FULL, "checkpoints": 3 * FULL, "being written": 6 * FULL}


def test_rollouts_and_batches_are_counted_by_their_tokens() -> None:
    length, size = 512, 64
    run = {"train": {"batch_size": size}, "checkpoint": {"interval": 10, "keep_last": 2}}
    rollout = 4096 + 19 * length

    def parts(**more: dict[str, Any]) -> dict[str, int]:
        return disk_parts(LARGE, run_of({**run, **more}))

    assert parts()["rollouts"] == pytest.approx(100 * size * rollout)
    # Two checkpoints, and the steps until the third is due.
    assert parts()["batches"] == pytest.approx(30 * size * 13.2 * length)
    assert parts(retention={"batches": "all"})["batches"] == pytest.approx(
        100 * size * 13.2 * length
    )
    fewer = parts(retention={"rollouts": 5})["rollouts"]
    assert fewer == pytest.approx(30 * size * rollout), "what a checkpoint needs stays"
    assert parts(retention={"rollouts": 40})["rollouts"] == pytest.approx(50 * size * rollout)
    kept = {"interval": 10, "keep_last": 2, "keep_every": 50}
    assert parts(retention={"rollouts": 5}, checkpoint=kept)["rollouts"] == parts()["rollouts"]
    by_tokens = {"batch_size": None, "token_batch_size": 10 * length}
    counted = run_of({"train": by_tokens, "dispatch": {"max_inflight_rollouts": 8}})
    assert disk_parts(LARGE, counted)["rollouts"] == pytest.approx(100 * 10 * rollout)
    env = {"env": [{"id": "a"}], "num_examples": 8, "group_size": 2, "interval": 10}
    assert parts(eval=env)["rollouts"] == pytest.approx((100 * size + 11 * 16) * rollout)
    unknown = {**env, "num_examples": -1}
    assert parts(eval=unknown)["rollouts"] == parts()["rollouts"]


def test_rollouts_that_fill_a_disk_are_refused_with_the_key_that_helps() -> None:
    tiny = Shape(layers=2, hidden=64, heads=64, kv_heads=64, inner=128, vocab=128)
    run = run_of(
        {"train": {"batch_size": 1024}, "trainer": {"seq_len": 32768, "micro_batch_tokens": 32768}}
    )
    parts = disk_parts(tiny, run)
    assert parts["rollouts"] > 55 * GIB
    text = problem(tiny, run, free=50 * GIB, where="/store")
    assert text is not None and "set retention.rollouts = 1 (" in text


def test_batches_that_fill_a_disk_are_refused_with_the_key_that_helps() -> None:
    tiny = Shape(layers=2, hidden=64, heads=64, kv_heads=64, inner=128, vocab=128)
    run = run_of(
        {
            "train": {"batch_size": 1024},
            "trainer": {"seq_len": 32768, "micro_batch_tokens": 32768},
            "checkpoint": {"interval": 5, "keep_last": 2},
            "retention": {"batches": "all", "rollouts": 1},
        }
    )
    text = problem(tiny, run, free=25 * GIB, where="/store")
    assert text is not None and 'set retention.batches = "checkpoint" (' in text


def test_a_run_that_keeps_all_is_counted_for_its_first_steps() -> None:
    all_of_it = {"retention": {"weights": "all"}, "checkpoint": {"keep_every": 1}}
    parts = disk_parts(LARGE, run_of(all_of_it))
    assert disk_parts(LARGE, run_of(all_of_it, max_steps=10**6)) == parts
    assert disk_parts(LARGE, run_of(all_of_it, max_steps=None)) == parts


def test_the_best_of_an_eval_is_kept_too() -> None:
    evals = {"eval": {"env": [{"id": "a"}, {"id": "b"}]}}
    assert disk_parts(LARGE, run_of(evals))["versions"] == 7 * FULL


def test_an_adapters_checkpoint_is_small() -> None:
    parts = disk_parts(LARGE, run_of({"trainer": {"lora": {"rank": 16}}}))
    assert parts["checkpoints"] < 0.1 * FULL
    # Merged weights of both checkpoints' steps stay.
    assert 7 * FULL < parts["versions"] < 7.2 * FULL


def test_a_version_that_is_an_adapter_alone_is_small() -> None:
    pushed = {"trainer": {"lora": {"rank": 16}}, "inference": {"transfer": "adapter"}}
    parts = disk_parts(LARGE, run_of(pushed))
    assert FULL < parts["versions"] < 1.2 * FULL
    assert parts["being written"] == 2 * FULL, "version 0 is whole"


@given(st.integers(1, 400))
def test_advice_helps(free: int) -> None:
    run = run_of({"checkpoint": {"keep_last": 4, "keep_every": 10}})
    text = problem(LARGE, run, free=free * GIB, where="/store")
    assert (text is None) == (sum(disk_parts(LARGE, run).values()) <= free * GIB)
    if text is None:
        return
    assert f"/store has {free}.0 GiB free" in text
    least = run_of(
        {
            "checkpoint": {"keep_last": 2, "keep_every": None},
            "retention": {"weights": 2, "rollouts": 1},
            "inference": {"dtype": "bfloat16"},
        }
    )
    fits = problem(LARGE, least, free=free * GIB, where="/store") is None
    assert ("all of these" in text) == fits
    if "set retention.weights = 2 (" in text:
        fewer = {"checkpoint": {"keep_last": 4, "keep_every": 10}, "retention": {"weights": 2}}
        assert problem(LARGE, run_of(fewer), free=free * GIB, where="/store") is None
    assert all(float(size) <= free for size in re.findall(r"\((\d+\.\d) GiB\)", text))


def test_an_evaluation_keeps_one_version_and_needs_no_trainer(tmp_path: Path) -> None:
    run = run_of({"train": {"env": []}, "eval": {"env": [{"id": "e"}]}}, max_steps=0)
    shape = shape_of(run, ArtifactStore(str(tmp_path)))
    assert shape is not None
    found = estimates(run, shape)
    assert found.keys() == {"engine memory", "disk"}
    parts = found["disk"]
    assert parts["checkpoints"] == 0 and parts["being written"] == 2 * parts["versions"]
    assert parts["batches"] == 0 < parts["rollouts"]


def test_checkpoint_bytes_follow_the_optimizer() -> None:
    optim = run_of().trainer.optim
    assert checkpoint_bytes(10, optim) == 120


def test_a_store_that_is_too_full_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(str(tmp_path))
    run = run_of()
    shape = shape_of(run, store)
    assert shape is not None
    needed = sum(estimates(run, shape)["disk"].values())
    monkeypatch.setattr(ArtifactStore, "free_bytes", lambda self: needed)
    assert check_disk(run, shape, store) == []
    monkeypatch.setattr(ArtifactStore, "free_bytes", lambda self: needed - 1)
    (found,) = check_disk(run, shape, store)
    assert found.pointer == "/retention/weights" and str(tmp_path) in found.message
    # An object store has no limit of its own.
    monkeypatch.setattr(ArtifactStore, "free_bytes", lambda self: None)
    assert check_disk(run, shape, store) == []


async def test_a_checkpoint_needs_its_space_before_it_is_written_and_none_once_it_is(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context(tmp_path, policy)
    acts, store = TrainerActivities(ctx), ctx.store
    store.put_folder(keys.weights(RUN, 1), policy, attempt="t")
    nobody = TrainerTarget(1, f"unix://{tmp_path / 'gone'}")
    save = SaveCheckpointInput(RUN, 1, nobody, "{}")

    async def refused() -> ApplicationError:
        with pytest.raises(ApplicationError) as caught:
            await run(acts.save_checkpoint, save)
        return caught.value

    assert (await refused()).type == names.TRAINER_LOST, "there is space"
    # Weights and two moments, in the store and in the scratch folder.
    need = 2 * (3 * store.require(keys.weights(RUN, 1)).size + len(save.run_state))
    monkeypatch.setattr(ArtifactStore, "free_bytes", lambda self: need)
    assert (await refused()).type == names.TRAINER_LOST, "there is just enough"
    monkeypatch.setattr(ArtifactStore, "free_bytes", lambda self: 1000)
    full = await refused()
    assert full.type == names.NO_SPACE
    assert "step 1" in str(full) and f"{store.url} has 0.0 MiB" in str(full)
    store.put_folder(keys.checkpoint(RUN, 1), policy, attempt="t")
    assert (await refused()).type == names.TRAINER_LOST, "an attempt before had it"
