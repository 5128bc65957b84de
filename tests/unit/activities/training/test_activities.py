"""The trainer room's activities on a real store and a real trainer process."""

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.training import (
    LoadTrainerInput,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainerTarget,
    TrainStepInput,
)
from ratchet.activities.inference.devices import SharedDevices
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.retention import expendable
from ratchet.activities.storage.token_logprobs import decode_token_logprobs
from ratchet.activities.training import activities
from ratchet.activities.training.activities import TrainerActivities
from ratchet.activities.training.disk import checkpoint_bytes
from ratchet.activities.training.model import export
from ratchet.activities.training.policy import build_model
from ratchet.activities.training.server import SOCKET_PATH_LIMIT, socket_path, trainer_spec
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.configs.upgrades import read_config
from tests.unit.activities.training.conftest import SMALL, make_batch
from tests.unit.activities.training.test_process import CONFIG, trainer

RUN = "run-1"


def context(tmp_path: Path, policy: Path, **sections: Any) -> WorkerContext:
    home = tmp_path / "home"
    home.mkdir()
    ctx = WorkerContext(home=home, store_url=str(tmp_path / "store"), own_queue="q")
    config = {**CONFIG, "model": {"name": str(policy)}, **sections}
    ctx.store.put_json(keys.config(RUN), config)
    return ctx


async def run(activity: Any, given: Any) -> Any:
    return await ActivityEnvironment().run(activity, given)


@pytest.mark.timeout(180)
async def test_from_version_0_to_a_restored_checkpoint(tmp_path: Path, policy: Path) -> None:
    ctx = context(
        tmp_path,
        policy,
        retention={"weights": 2},
        checkpoint={"interval": 1, "keep_last": 2, "keep_every": 4},
    )
    acts = TrainerActivities(ctx)
    prepared = await run(acts.prepare_policy, PreparePolicyInput(RUN))
    assert prepared.weights.key == keys.weights(RUN, 0) and prepared.origin == str(policy)
    assert await run(acts.prepare_policy, PreparePolicyInput(RUN)) == prepared
    v0 = ctx.store.fetch_folder(prepared.weights)
    assert (v0 / "canary.json").exists()

    (tmp_path / "s").mkdir()
    async with trainer(tmp_path / "s") as client:
        target = TrainerTarget(1, f"unix://{client.path}")
        loaded = await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        assert loaded.step == 0
        inputs, results = {}, {}
        for step in (1, 2, 3):
            batch = ctx.store.put(keys.batch(RUN, step), encode_batch(make_batch(step)))
            inputs[step] = TrainStepInput(RUN, step, batch, target)
            results[step] = await run(acts.train_step, inputs[step])
            save = SaveCheckpointInput(RUN, step, target, '{"cursor": 1}')
            saved = await run(acts.save_checkpoint, save)
        assert ctx.store.committed_keys(f"runs/{RUN}/weights") == [
            keys.weights(RUN, version) for version in (0, 2, 3)
        ]
        kept = [keys.checkpoint(RUN, step) for step in (2, 3)]
        assert ctx.store.committed_keys(keys.checkpoints(RUN)) == kept
        assert ctx.store.committed_keys(f"runs/{RUN}/batches") == [keys.batch(RUN, 3)]
        metrics = json.loads(ctx.store.get(results[3].metrics_ref))
        assert metrics["time/push/prepare"] > 0
        assert metrics["weights/bytes"] == results[3].weights.size > 4 * SMALL.shape.parameters
        scores = keys.token_logprobs(RUN, 3)
        assert ctx.store.committed_keys(f"runs/{RUN}/token_logprobs") == [scores]
        rows = decode_token_logprobs(ctx.store.get(ctx.store.require(scores)))
        trained = [(s.group, s.rollout, len(s.token_ids)) for s in make_batch(3)]
        assert [(r.group, r.rollout, len(r.trainer_logprobs)) for r in rows] == trained
        folder = ctx.store.fetch_folder(saved.ref)
        assert json.loads((folder / "run_state.json").read_text()) == {"cursor": 1}
        written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        optim = ctx.config(RUN).trainer.optim
        assert written == pytest.approx(checkpoint_bytes(SMALL.shape.parameters, optim), rel=0.1)
        first = ctx.store.require(scores)
        assert await run(acts.train_step, inputs[3]) == results[3]
        assert ctx.store.require(scores) == first, "those of the first time are adopted"
        metrics = ctx.store.get_json(results[3].metrics_ref)
        assert results[3].metrics.items() <= metrics.items() and len(results[3].metrics) <= 8
        assert {"loss", "mismatch_kl"} <= set(results[3].metrics) and "seconds_train" in metrics

        for step in (1, 2):
            ctx.store.put(keys.batch(RUN, step), encode_batch(make_batch(step)))
        with pytest.raises(ApplicationError) as caught:
            await run(acts.train_step, inputs[2])
        assert caught.value.type == names.TRAINER_LOST and caught.value.non_retryable

        # Back to version 0 and once more: the same bits, so the same reference.
        await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        again = await run(acts.train_step, inputs[1])
        assert again == replace(results[1], weights=again.weights), "its metrics are adopted"
        assert again.weights.sha256 == results[1].weights.sha256
        assert ctx.store.committed(keys.weights(RUN, 3)) is not None
        restore = LoadTrainerInput(RUN, target, checkpoint=saved.ref)
        assert (await run(acts.load_trainer, restore)).step == 3
        ctx.store.delete(first)
        assert await run(acts.train_step, inputs[3]) == results[3]
        assert ctx.store.committed(scores) is None, "a checkpoint does not hold them"

    with pytest.raises(ApplicationError) as caught:
        await run(acts.train_step, inputs[3])
    assert caught.value.type == names.TRAINER_LOST
    assert list((ctx.home / "scratch" / "training").iterdir()) == []


async def test_model_that_does_not_load_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ctx = context(tmp_path, tmp_path / "empty")
    with pytest.raises(ApplicationError, match="cannot be loaded") as caught:
        await run(TrainerActivities(ctx).prepare_policy, PreparePolicyInput(RUN))
    assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable


async def test_what_preparing_says_when_it_dies_holds_no_part_of_a_secret(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"password={'hunter2' * 300}\n{'y' * 1900}\nlast words"
    dies = [sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit(3)"]
    monkeypatch.setattr(activities, "module_command", lambda module: dies)
    acts = TrainerActivities(context(tmp_path, policy))
    config = read_config({**CONFIG, "model": {"name": str(policy)}})
    with pytest.raises(RuntimeError, match="ended with code 3") as caught:
        await acts._prepare(config, tmp_path, tmp_path / "out")
    assert "hunter2" not in str(caught.value) and str(caught.value).endswith("y\nlast words")


@pytest.mark.nightly
async def test_a_model_without_a_template_cannot_be_evaluated_by_chat(
    tmp_path: Path, policy: Path
) -> None:
    bare = shutil.copytree(policy, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    evals = {"env": [{"id": "reverse-text"}], "client": "chat", "sampling": {"max_tokens": 8}}
    ctx = context(tmp_path, bare, eval=evals)
    with pytest.raises(ApplicationError, match=r"set eval\.client to 'tokens'") as caught:
        await run(TrainerActivities(ctx).prepare_policy, PreparePolicyInput(RUN))
    assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable


def trained(ctx: WorkerContext, tmp_path: Path, run_id: str, seed: int) -> Path:
    """Another run's version 3, as weights and, of other values, as a checkpoint; the latter."""
    configs.save(ctx.store, run_id, read_config(CONFIG), attempt="t")
    for key, of in ((keys.weights, seed), (keys.checkpoint, seed + 1)):
        folder = tmp_path / "parent" / key(run_id, 3)
        export(build_model(SMALL, of), build_tokenizer(SMALL.max_positions), folder)
        ctx.store.put_folder(key(run_id, 3), folder, attempt="t")
    first = tmp_path / "parent" / "v0"
    first.mkdir()
    about = {"base": "owner/model", "license": "mit", "parameters": 1, "origin": "owner/model"}
    (first / "policy.json").write_text(json.dumps(about))
    ctx.store.put_folder(keys.weights(run_id, 0), first, attempt="t")
    return folder


@pytest.mark.long
async def test_a_run_begins_with_another_ones_version_and_keeps_it(
    tmp_path: Path, policy: Path
) -> None:
    ctx = context(tmp_path, policy, model={"name": "run:parent@3"})
    acts, parent = TrainerActivities(ctx), trained(ctx, tmp_path, "parent", 5)
    given = CheckInput({**CONFIG, "model": {"name": "run:parent@3"}})
    assert (await run(acts.check_model, given)).problems == []
    prepared = await run(acts.prepare_policy, PreparePolicyInput(RUN))
    assert prepared.origin == "run:parent@3"
    for kind in (keys.weights, keys.checkpoint):
        ctx.store.delete(ctx.store.require(kind("parent", 3)))
    assert await run(acts.prepare_policy, PreparePolicyInput(RUN)) == prepared
    folder = ctx.store.fetch_folder(prepared.weights)
    mine, theirs = (load_file(at / "model.safetensors") for at in (folder, parent))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine), "those of the checkpoint"
    about = json.loads((folder / "policy.json").read_text())
    assert (about["base"], about["license"]) == ("owner/model", "mit")
    assert {"canary.json", "fingerprints.json"} <= {file.name for file in folder.iterdir()}
    # What begins anew needs the version, what is restored has its own copy.
    (problem,) = (await run(acts.check_model, given)).problems
    assert problem.pointer == "/model/name" and "no version 3" in problem.message
    assert (await run(acts.check_model, replace(given, restored=True))).problems == []
    other = {**CONFIG, "model": {"name": "run:parent@3"}}
    ctx.store.put_json(keys.config("late"), other)
    with pytest.raises(ApplicationError, match="no version 3") as caught:
        await run(acts.prepare_policy, PreparePolicyInput("late"))
    assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable


@pytest.mark.timeout(180)
@pytest.mark.nightly
async def test_an_adapter_from_version_0_to_another_run(tmp_path: Path, policy: Path) -> None:
    """The weights of a checkpoint's step stay as long as it does, and another run merges it."""
    section = {**CONFIG["trainer"], "lora": {"rank": 4}}
    about = {"trainer": section, "retention": {"weights": 2}, "checkpoint": {"keep_last": 2}}
    ctx = context(tmp_path, policy, **about)
    acts, store = TrainerActivities(ctx), ctx.store
    await run(acts.prepare_policy, PreparePolicyInput(RUN))
    (tmp_path / "s").mkdir()
    async with trainer(tmp_path / "s") as client:
        target = TrainerTarget(1, f"unix://{client.path}")
        assert (await run(acts.load_trainer, LoadTrainerInput(RUN, target))).step == 0
        for step in (1, 2, 3, 4):
            batch = store.put(keys.batch(RUN, step), encode_batch(make_batch(step)))
            trained = await run(acts.train_step, TrainStepInput(RUN, step, batch, target))
            if step != 3:
                save = SaveCheckpointInput(RUN, step, target, '{"cursor": 1}')
                result = await run(acts.save_checkpoint, save)
            if step == 2:
                saved = result
        versions = [keys.weights(RUN, version) for version in (0, 2, 3, 4)]
        assert store.committed_keys(f"runs/{RUN}/weights") == versions
        assert saved.ref.size < store.require(versions[1]).size / 2
        restore = LoadTrainerInput(RUN, target, checkpoint=saved.ref)
        assert (await run(acts.load_trainer, restore)).step == 2
        for step in (3, 4):
            batch = store.put(keys.batch(RUN, step), encode_batch(make_batch(step)))
            again = await run(acts.train_step, TrainStepInput(RUN, step, batch, target))
        assert again.weights.sha256 == trained.weights.sha256

    named = {**CONFIG, "model": {"name": f"run:{RUN}@2"}}
    assert (await run(acts.check_model, CheckInput(named))).problems == []
    store.put_json(keys.config("next"), named)
    prepared = await run(acts.prepare_policy, PreparePolicyInput("next"))
    merged = store.fetch_folder(store.require(versions[1]))
    ours, theirs = (
        load_file(at / "model.safetensors") for at in (store.fetch_folder(prepared.weights), merged)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


async def test_a_version_must_fit_the_run(tmp_path: Path, policy: Path) -> None:
    ctx = context(tmp_path, policy)
    trained(ctx, tmp_path, "parent", 5)
    long = {"seq_len": 600, "micro_batch_tokens": 600}
    config = {**CONFIG, "model": {"name": "run:parent@3"}, "trainer": long}
    (problem,) = (await run(TrainerActivities(ctx).check_model, CheckInput(config))).problems
    assert problem.pointer == "/trainer/seq_len" and "512" in problem.message


@pytest.mark.nightly
async def test_the_model_card_of_a_folder_reports_base_and_licence(
    tmp_path: Path, policy: Path
) -> None:
    shutil.copytree(policy, tmp_path / "mine")
    card = "---\nlicense: mit\nbase_model: Qwen/Qwen3-0.6B\n---\n# mine\n"
    (tmp_path / "mine" / "README.md").write_text(card)
    ctx = context(tmp_path, tmp_path / "mine")
    prepared = await run(TrainerActivities(ctx).prepare_policy, PreparePolicyInput(RUN))
    folder = ctx.store.fetch_folder(prepared.weights)
    about = json.loads((folder / "policy.json").read_text())
    assert (about["base"], about["license"]) == ("Qwen/Qwen3-0.6B", "mit")
    assert about["origin"] == str(tmp_path / "mine")


async def test_cancelled_preparation_leaves_nothing_running(tmp_path: Path, policy: Path) -> None:
    ctx = context(tmp_path, policy, model={"name": "ratchet/tiny"})
    acts = TrainerActivities(ctx)
    before = set(psutil.Process().children())

    def children() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    task = asyncio.create_task(run(acts.prepare_policy, PreparePolicyInput(RUN)))
    async with asyncio.timeout(60):
        while not children():
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not children()
    assert list((ctx.home / "scratch" / "training").iterdir()) == []
    assert ctx.store.committed(keys.weights(RUN, 0)) is None


@pytest.mark.nightly
async def test_batch_that_cannot_be_trained_is_not_retried(tmp_path: Path, policy: Path) -> None:
    ctx = context(tmp_path, policy)
    acts = TrainerActivities(ctx)
    await run(acts.prepare_policy, PreparePolicyInput(RUN))
    greedy = [replace(sample, temperature=0.0) for sample in make_batch(0)]
    batch = ctx.store.put(keys.batch(RUN, 1), encode_batch(greedy))
    (tmp_path / "s").mkdir()
    async with trainer(tmp_path / "s") as client:
        target = TrainerTarget(1, f"unix://{client.path}")
        await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        with pytest.raises(ApplicationError, match="temperature") as caught:
            await run(acts.train_step, TrainStepInput(RUN, 1, batch, target))
        assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable
        assert await client.ping() == 0


async def test_check_model_reports(tmp_path: Path, policy: Path) -> None:
    acts = TrainerActivities(context(tmp_path, policy))
    config = {**CONFIG, "model": {"name": "/no/such"}}
    (problem,) = (await run(acts.check_model, CheckInput(config))).problems
    assert problem.pointer == "/model/name"
    good = await run(acts.check_model, CheckInput({**CONFIG, "model": {"name": str(policy)}}))
    assert good.problems == [] and good.estimates["trainer memory"]["weights"] > 0
    other = shutil.copytree(policy, tmp_path / "other")
    about = json.loads((other / "config.json").read_text())
    del about["num_hidden_layers"], about["hidden_size"]
    (other / "config.json").write_text(json.dumps(about))
    unknown = await run(acts.check_model, CheckInput({**CONFIG, "model": {"name": str(other)}}))
    assert unknown.problems == [] and unknown.estimates == {}, "its size is not known"


def test_what_may_go() -> None:
    assert expendable([1, 2, 3, 4], newest=4, keep=2) == [1, 2]
    assert expendable([1, 9, 10, 11], newest=1, keep=2) == []
    assert expendable([], newest=3, keep=2) == []


async def test_socket_paths_are_short_and_fresh(tmp_path: Path) -> None:
    host = HostInput(run_id="r" * 60, role="trainer", index=0, queue="q")
    deep = tmp_path / ("d" * 90)
    for home in (tmp_path, deep):
        one, other = socket_path(home, host, 1), socket_path(home, host, 1)
        assert one != other and one.parent.is_dir()
        assert len(str(one)) <= SOCKET_PATH_LIMIT
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config(host.run_id), CONFIG)
    spec = await trainer_spec(ctx, host, 2)
    assert spec.address.startswith("unix:///") and await spec.probe() is False


async def test_a_trainer_is_given_its_share_of_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostInput(run_id="r", role="trainer", index=0, queue="q")
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config(host.run_id), CONFIG)
    plain = await trainer_spec(ctx, host, 1)
    monkeypatch.setattr(SharedDevices, "share", lambda self, host, config: {"SHARE": host.role})
    assert (await trainer_spec(ctx, host, 1)).env == {**plain.env, "SHARE": "trainer"}


def test_a_checkpoint_takes_old_rollouts_along(tmp_path: Path) -> None:
    """As many steps' as the config says, and nothing that the oldest kept checkpoint names."""
    ctx = context(tmp_path, tmp_path, retention={"rollouts": 2})
    groups = [keys.group(RUN, f"train/{number}") for number in range(6)]

    def state(step: int, ready: str) -> str:
        generations = [{"lease": {"next_train": 6}}]
        parts = {"steps": {"step": step}, "dispatch": {"generations": generations}}
        return json.dumps({"state": {**parts, "train": {"ready": [ready]}, "evals": {}}})

    def save(step: int, ready: str) -> list[str]:
        (folder := tmp_path / f"step-{step}").mkdir()
        (folder / keys.RUN_STATE_FILE).write_text(state(step, ready))
        ctx.store.put_folder(keys.checkpoint(RUN, step), folder, attempt="t")
        target = TrainerTarget(1, "unix://none")
        input = SaveCheckpointInput(RUN, step, target, state(step, ready))
        TrainerActivities(ctx)._prune(input, ctx.config(RUN))
        return ctx.store.committed_keys(groups[0].rpartition("/")[0])

    for key in groups:
        ctx.store.put(key, b"")
    for step, number in enumerate((0, 1, 2, 3, 4), start=1):
        cut = {"step": step, "groups": [f"train/{number}"]}
        ctx.store.put_json(keys.step_groups(RUN, step, "ab"), cut)
    assert save(2, "train/1") == groups, "all steps are new"
    assert save(4, "train/4") == groups[1:], "the checkpoint of step 2 may need one"
    assert save(5, "train/5") == groups[3:], "steps 4 and 5 are kept"
