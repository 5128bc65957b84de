"""Several ranks train as one process does: the same losses, weights that any number reads, and
checkpoints that go on at any number.
"""

import asyncio
import json
import math
import os
import resource
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.training import PreparePolicyInput, TrainerTarget
from ratchet.activities.runtime import machine
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.storage.keys import OPTIMIZER_FOLDER
from ratchet.activities.training import rl_loss as rl_losses
from ratchet.activities.training import shards
from ratchet.activities.training.batching import (
    STREAMS,
    MicroBatch,
    cut,
    member_counts,
    micro_batches,
)
from ratchet.activities.training.bits import first_difference
from ratchet.activities.training.check import check_model
from ratchet.activities.training.client import (
    DiskFailed,
    NonFinite,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from ratchet.activities.training.loss import LossInputs, MemberCounts, total_loss
from ratchet.activities.training.memory import Shape, problem, trainer_parts
from ratchet.activities.training.model import load_model
from ratchet.activities.training.process import TrainerServer, rank_socket
from ratchet.activities.training.ranks import ALONE
from ratchet.activities.training.server import process_spec
from ratchet.activities.training.shards import write_weights
from ratchet.activities.training.totals import Totals
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.trainer import DefaultLossConfig, TrainerConfig
from tests.scoring import rescore
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.processes import until_it_answers
from tests.unit.activities.training.rank_processes import Launched, ranks_of, with_ranks
from tests.unit.activities.training.test_activities import RUN, context, run
from tests.unit.activities.training.test_check import config as check_config
from tests.unit.activities.training.test_kills import Recorded, replay
from tests.unit.activities.training.test_packing import streamed
from tests.unit.activities.training.test_process import CONFIG

STEPS = 4
SAME = ("loss", "entropy", "mismatch_kl", "is_masked", "grad_norm", "tokens")
"""Metrics that do not depend on the number of ranks."""


def alone(
    policy: Path, out: Path, config: dict[str, Any], steps: int = STEPS
) -> list[dict[str, float]]:
    """What a trainer of one process makes of the batches; with its checkpoint of step 2."""
    trainer = Trainer()
    trainer.load(policy, config, checkpoint=False)
    trained = []
    for step in range(1, steps + 1):
        trained.append(trainer.train(step, encode_batch(make_batch(step, 9)), out / str(step)))
        if step == 2:
            trainer.save(2, out / "checkpoint")
    return trained


async def train(
    client: TrainerClient, steps: range, out: Path, **more: Any
) -> list[dict[str, float]]:
    trained = []
    out.mkdir(parents=True, exist_ok=True)
    for step in steps:
        batch = out / f"batch-{step}"
        batch.write_bytes(encode_batch(make_batch(step, 9)))
        trained.append(await client.step(step, batch, out / str(step), timeout_s=120, **more))
    return trained


def close(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    for name in SAME:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("model*.safetensors") for n, t in load_file(file).items()}


def near(ours: Path, theirs: Path, atol: float = 1e-5) -> None:
    mine, other = weights(ours), weights(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.allclose(tensor, other[name], atol=atol), name


# -- what needs no other process ----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from([1, 2, 3, 4]), st.booleans())
@example(seed=0, size=1, workers=2, packing=False)
def test_each_sample_is_trained_by_one_rank_and_all_make_as_many_passes(
    seed: int, size: int, workers: int, packing: bool
) -> None:
    samples = streamed(seed, size)
    own = [
        list(micro_batches(samples, 32, 64, packing=packing, worker=worker, workers=workers))
        for worker in range(workers)
    ]
    assert len({len(made) for made in own}) == 1
    flat = [batch for made in own for batch in made]
    assert sorted(i for batch in flat for i in batch.indices) == list(range(size))
    sampled = Counter(int(batch.loss_mask.sum()) for batch in flat if not batch.indices)
    assert set(sampled) <= {0}, "a dummy trains nothing"
    total = sum(int(batch.loss_mask.sum()) for batch in flat)
    assert total == sum(sum(cut(sample, 32).loss_mask) for sample in samples)
    counts = member_counts(samples, 32)
    each = [added_up(made, samples, counts) for made in own]
    scored = [(place, len(row)) for totals in each for place, row in totals.scores.items()]
    assert sorted(scored) == [(i, min(len(s.token_ids), 32)) for i, s in enumerate(samples)]
    assert sum(totals.sums["tokens"] for totals in each) == total
    alone = list(micro_batches(samples, 32, 64, packing=packing))
    loss = added_up(alone, samples, counts).sums["loss"]
    assert sum(totals.sums["loss"] for totals in each) == pytest.approx(loss, abs=1e-5)


def added_up(made: list[MicroBatch], samples: list[Sample], counts: MemberCounts) -> Totals:
    """What a trainer adds up of its micro-batches that gives every token some log-probability."""
    totals, rl_loss = Totals(), rl_losses.build(DefaultLossConfig())
    for batch in made:
        streams = {name: getattr(batch, name) for name in STREAMS}
        given = (batch.logprobs - 0.1, batch.logprobs, batch.advantages, batch.loss_mask)
        inputs = LossInputs(*given, **streams)
        share = total_loss(inputs, rl_loss(inputs, batch.spans()), counts)
        totals.add(batch, samples, inputs, torch.ones_like(batch.logprobs), share)
    return totals


def test_one_process_is_started_as_before_and_several_by_the_launcher(tmp_path: Path) -> None:
    host = HostInput("r", "trainer", 0, "q")
    one = process_spec(tmp_path, host, 1, TrainerConfig())
    assert "torch.distributed.run" not in one.argv and "--ranks" not in one.argv
    assert "OMP_NUM_THREADS" not in one.env
    assert one.env["OMP_WAIT_POLICY"] == "PASSIVE", "no thread spins on a core that engines need"
    several = process_spec(tmp_path, host, 1, TrainerConfig(ranks=2, deterministic=True))
    at = several.argv.index
    assert several.argv[at("torch.distributed.run") - 1] == "-m"
    assert several.argv[at("--nproc-per-node") + 1] == several.argv[at("--ranks") + 1] == "2"
    assert several.argv[at("--max-restarts") + 1] == "0", "a lost rank is a lost trainer"
    assert several.argv[at("--rdzv-backend") + 1] == "static", "it unpickles nothing"
    assert several.argv[at("--master-addr") + 1] == "127.0.0.1"
    again = process_spec(tmp_path, host, 2, TrainerConfig(ranks=2))
    ports = {spec.argv[spec.argv.index("--master-port") + 1] for spec in (several, again)}
    assert len(ports) == 2, "trainers of one machine do not meet"
    assert "--deterministic" in several.argv
    assert several.env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert several.env["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("gpus", "what"), [([], "CPU core"), ([1, 1], "GPU")])
def test_more_ranks_than_the_machine_has_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], what: str
) -> None:
    monkeypatch.setattr(machine, "cpu_torch", lambda: not gpus)
    monkeypatch.setattr(machine, "gpus", lambda: [80 * 2**30 for _ in gpus])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    (problem,) = check_model(check_config({}, ranks=3))
    assert problem.pointer == "/trainer/ranks" and what in problem.message
    assert "3 ranks" in problem.message and "set it to 2 or less" in problem.message
    assert check_model(check_config({}, ranks=2)) == []


def test_a_gpu_holds_a_share_and_a_machine_holds_all() -> None:
    shape = Shape(layers=36, hidden=2560, heads=4096, kv_heads=1024, inner=9728, vocab=151936)
    one, gpu, cpu = (
        trainer_parts(shape, check_config({}, ranks=ranks), gpu=on_gpu)
        for ranks, on_gpu in ((1, True), (4, True), (4, False))
    )
    for name in ("weights", "gradients", "moments"):
        assert gpu[name] == one[name] // 4 and cpu[name] == 4 * gpu[name]
    assert gpu["activations"] == one["activations"] and cpu["activations"] == 4 * gpu["activations"]
    ends = 4 * 2 * shape.vocab * shape.hidden
    assert gpu["gathered weights"] >= ends and "gathered weights" not in one
    assert cpu["libraries"] == 4 * 450 * 2**20 and cpu["launcher"] > 0


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_a_gpu_of_several_holds_all_weights_while_they_are_loaded(
    lora: dict[str, Any] | None,
) -> None:
    shape = Shape(layers=36, hidden=2560, heads=4096, kv_heads=1024, inner=9728, vocab=151936)

    def parts(ranks: int, gpu: bool = True) -> dict[str, int]:
        run = check_config({}, ranks=ranks, lora=lora, micro_batch_tokens=256, seq_len=256)
        return trainer_parts(shape, run, gpu=gpu)

    whole = 4 * shape.parameters
    assert parts(64)["loading"] > 0 and sum(parts(64).values()) == whole
    assert sum(parts(2).values()) >= whole
    assert "loading" not in parts(1) and "loading" not in parts(64, gpu=False)
    run = check_config({}, ranks=64, lora=lora, micro_batch_tokens=256, seq_len=256)
    assert problem(shape, run, room=whole, gpu=True) is None
    told = problem(shape, run, room=whole - 1, gpu=True)
    assert told is not None and "loading" in told and "a smaller model" in told


def test_weights_are_written_in_files_with_an_index(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    model = load_model(policy)
    taken = write_weights(model.state_dict(), tmp_path, "float32", ["bfloat16"], ALONE)
    assert set(taken.dtypes) == {"float32", "bfloat16"} and taken.shapes.keys() == {
        *model.state_dict()
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {file.name for file in tmp_path.glob("model-*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == files
    assert first_difference(policy, tmp_path, "model*.safetensors") is None
    (tmp_path / "config.json").write_text((policy / "config.json").read_text())
    again = load_model(tmp_path).state_dict()
    assert all(torch.equal(again[name], t) for name, t in model.state_dict().items())


class Double:
    """A backend that saves, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.step: int | None = 3
        self.error = error

    def prepare(self, deterministic: bool) -> None:
        pass

    def load(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise NotImplementedError

    def train(self, *_: Any, **__: Any) -> dict[str, float]:
        raise NotImplementedError

    def save(self, step: int, out: Path) -> Any:
        if self.error is not None:
            raise self.error
        return {"step": step}


@pytest.mark.parametrize("others", ["well", "alike", "alone"])
async def test_what_fails_on_one_rank_alone_ends_the_trainer(tmp_path: Path, others: str) -> None:
    socket = tmp_path / "s"
    full = OSError(28, "No space left on device")
    doubles = {
        "well": (Double(), Double()),
        "alike": (Double(full), Double(full)),
        "alone": (Double(), Double(ValueError("a loss of another shape"))),
    }[others]
    second = TrainerServer(doubles[1])
    first = TrainerServer(doubles[0], others=[TrainerClient(f"unix://{rank_socket(socket, 1)}")])
    serving = [
        asyncio.ensure_future(server.serve(rank_socket(socket, rank)))
        for rank, server in enumerate((first, second))
    ]
    client = TrainerClient(f"unix://{socket}")
    for rank in (1, 0):
        await until_it_answers(TrainerClient(f"unix://{rank_socket(socket, rank)}"), timeout_s=10)
    assert await client.ping() == 3
    if others == "alone":
        with pytest.raises(TrainerFailed, match="another shape") as caught:
            await client.save(3, tmp_path)
        assert caught.value.kind == "ValueError"
        await asyncio.wait_for(serving[0], 10)
        assert first.lost and not second.lost
        await TrainerClient(f"unix://{rank_socket(socket, 1)}").shutdown()
    else:
        if others == "well":
            await client.save(3, tmp_path)
        else:
            with pytest.raises(DiskFailed, match="No space"):
                await client.save(3, tmp_path)
        assert not first.lost and await client.ping() == 3
        await client.shutdown()
    await asyncio.wait_for(asyncio.gather(*serving), 10)


# -- on real ranks ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_two_ranks_train_as_one_process_does_and_go_on_where_it_stood(
    tmp_path: Path, policy: Path
) -> None:
    expected = alone(policy, tmp_path / "one", CONFIG)
    config = with_ranks(CONFIG, 2)
    async with ranks_of(tmp_path / "s", 2) as trainer:
        client = trainer.client
        listening = {rank: listens(trainer.rank(rank)) for rank in (0, 1)}
        assert all(ip == "127.0.0.1" for ips in listening.values() for ip in ips), listening
        assert len(listens(psutil.Process(trainer.launcher.pid))) == 1, "docs/security.md"
        await client.load(policy, config, checkpoint=False)
        trained = await train(client, range(1, 3), tmp_path / "two", config=config)
        for ours, theirs in zip(trained, expected, strict=False):
            close(ours, theirs)
        near(tmp_path / "two" / "2", tmp_path / "one" / "2")

        # What fails on all ranks, or on one that tells the others, changes nothing.
        bad = tmp_path / "bad"
        samples = make_batch(3, 9)
        samples[0] = replace(samples[0], advantages=[math.nan] * len(samples[0].advantages))
        bad.write_bytes(encode_batch(samples))
        with pytest.raises(NonFinite):
            await client.step(3, bad, tmp_path / "no", config=config, timeout_s=120)
        may_write(trainer.rank(1), 1000)
        with pytest.raises(DiskFailed, match="File too large"):
            await client.save(2, tmp_path / "no")
        may_write(trainer.rank(1), -1)
        await client.save(2, tmp_path / "two" / "checkpoint")
        await client.save(2, tmp_path / "two" / "again")
        trained = await train(client, range(3, 5), tmp_path / "two", config=config)
        for ours, theirs in zip(trained, expected[2:], strict=True):
            close(ours, theirs)

        # Its own checkpoint, at as many ranks: the same bits, file by file.
        checkpoint, again = (tmp_path / "two" / name for name in ("checkpoint", "again"))
        files = sorted(f.relative_to(checkpoint) for f in checkpoint.rglob("*") if f.is_file())
        assert sum(file.parts[0] == OPTIMIZER_FOLDER for file in files) == 2
        for file in files:
            assert (checkpoint / file).read_bytes() == (again / file).read_bytes(), file
        loaded = await client.load(checkpoint, config, checkpoint=True)
        assert (loaded.step, loaded.warnings) == (2, [])
        await train(client, range(3, 5), tmp_path / "resumed", config=config)
        for pattern in ("model*.safetensors", "fingerprints.json", "canary.json"):
            for file in (tmp_path / "two" / "4").glob(pattern):
                assert file.read_bytes() == (tmp_path / "resumed" / "4" / file.name).read_bytes()

        # That of one process, which holds all moments in one file.
        loaded = await client.load(tmp_path / "one" / "checkpoint", config, checkpoint=True)
        assert loaded.step == 2 and "ranks was 1 and is 2" in loaded.warnings[0]
        trained = await train(client, range(3, 5), tmp_path / "from-one", config=config)
        for ours, theirs in zip(trained, expected[2:], strict=True):
            close(ours, theirs)
        near(tmp_path / "from-one" / "4", tmp_path / "one" / "4")
        await client.shutdown()
        assert await asyncio.wait_for(trainer.launcher.wait(), 30) == 0

    # And the other way round.
    single = Trainer()
    about = single.load(checkpoint, CONFIG, checkpoint=True)
    assert about["step"] == 2 and "ranks was 2 and is 1" in about["warnings"][0]
    for step in (3, 4):
        metrics = single.train(
            step, encode_batch(make_batch(step, 9)), tmp_path / "back" / str(step)
        )
        close(metrics, expected[step - 1])
    near(tmp_path / "back" / "4", tmp_path / "one" / "4")
    samples = make_batch(7)
    ours = rescore(load_model(checkpoint), samples, seq_len=32, micro_batch_tokens=256)
    assert all(-20 < value <= 0 for row in ours for value in row)


def listens(process: psutil.Process) -> list[str]:
    """The addresses at which a process takes TCP connections."""
    made = process.net_connections(kind="tcp")
    return [one.laddr.ip for one in made if one.status == psutil.CONN_LISTEN]


def may_write(process: psutil.Process, most: int) -> None:
    """Files of a process may grow to this many bytes, as if the disk were full then; -1: any."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, hard))


async def gone(trainer: Launched, family: list[psutil.Process]) -> None:
    """Waits until nothing of a trainer is left; fails if something stays."""
    assert await asyncio.wait_for(trainer.launcher.wait(), 60) != 0
    _, left = await asyncio.to_thread(psutil.wait_procs, family, 30)
    assert left == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_is_a_lost_trainer(tmp_path: Path, policy: Path, rank: int) -> None:
    config = with_ranks(CONFIG, 2)
    async with ranks_of(tmp_path / "s", 2) as trainer:
        await trainer.client.load(policy, config, checkpoint=False)
        family = psutil.Process(trainer.launcher.pid).children()
        witness, victim = trainer.rank(1 - rank), trainer.rank(rank)
        # The other one stands still, so that the step is under way when this one dies.
        witness.suspend()
        step = asyncio.ensure_future(train(trainer.client, range(1, 2), tmp_path / "out"))
        async with asyncio.timeout(30):
            while not (tmp_path / "out" / "batch-1").exists():
                await asyncio.sleep(0.01)
        victim.kill()
        witness.resume()
        with pytest.raises(TrainerGone):
            await step
        await gone(trainer, family)
    with pytest.raises(TrainerGone):
        await trainer.client.ping()


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_a_trainer_one_of_whose_ranks_stands_still_answers_no_ping(
    tmp_path: Path, policy: Path
) -> None:
    async with ranks_of(tmp_path / "s", 2) as trainer:
        await trainer.client.load(policy, with_ranks(CONFIG, 2), checkpoint=False)
        assert await trainer.client.ping() == 0
        trainer.rank(1).suspend()
        with pytest.raises(TimeoutError):
            await trainer.client.ping(timeout_s=2.0)
        # As its host does with a server that is silent for too long.
        family = psutil.Process(trainer.launcher.pid).children()
        trainer.rank(1).send_signal(signal.SIGKILL)
        await gone(trainer, family)


ROUGH = {"bfloat16": 5e-3, "signsgd": 1e-4, "muon": 1e-4}
"""How far losses may lie apart where rounding grows: in bfloat16, which Muon, too, computes in, and
where a gradient next to 0 has another sign.
"""
LORA = {"rank": 4, "alpha": 12, "modules_to_save": ["lm_head"]}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "recomputed": {"activation_checkpointing": True},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "sgd": {"optim": {"type": "sgd", "lr": 1e-2}},
    "signsgd": {"optim": {"type": "signsgd", "lr": 1e-3}},
    "muon": {"optim": {"type": "muon", "lr": 1e-2}},
    "offloaded": {"offload_optimizer": True},
    "lora": {"lora": LORA},
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 4])
async def test_every_setting_trains_on_several_ranks_as_in_one_process(
    tmp_path: Path, policy: Path, count: int
) -> None:
    async with ranks_of(tmp_path / "s", count) as trainer:
        for kind, section in {"plain": {}, **KINDS}.items():
            config = with_ranks(CONFIG, 1, **section)
            expected = alone(policy, tmp_path / f"{kind}-1", config)
            many = with_ranks(config, count)
            await trainer.client.load(policy, many, checkpoint=False)
            out = tmp_path / kind
            trained = await train(trainer.client, range(1, 3), out)
            await trainer.client.save(2, out / "checkpoint")
            trained += await train(trainer.client, range(3, STEPS + 1), out)
            for ours, theirs in zip(trained, expected, strict=True):
                if kind in ROUGH:
                    assert ours["loss"] == pytest.approx(theirs["loss"], abs=ROUGH[kind]), kind
                else:
                    close(ours, theirs)
            if kind not in ROUGH:
                near(out / str(STEPS), tmp_path / f"{kind}-1" / str(STEPS))
            base = policy if "lora" in section else None
            await trainer.client.load(out / "checkpoint", many, checkpoint=True, base=base)
            again = await train(trainer.client, range(3, STEPS + 1), tmp_path / f"{kind}-again")
            assert [t["loss"] for t in again] == [t["loss"] for t in trained[2:]], kind
            for file in (out / str(STEPS)).glob("*.safetensors"):
                theirs = tmp_path / f"{kind}-again" / str(STEPS) / file.name
                assert file.read_bytes() == theirs.read_bytes(), (kind, file.name)
            # One process goes on with it, too.
            single = Trainer()
            single.load(out / "checkpoint", config, checkpoint=True, base=base)
            step = encode_batch(make_batch(3, 9))
            metrics = single.train(3, step, tmp_path / f"{kind}-back")
            assert metrics["loss"] == pytest.approx(expected[2]["loss"], abs=1e-3)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_a_trainer_that_comes_back_commits_the_same_bits_and_is_replayed(
    tmp_path: Path, policy: Path
) -> None:
    section = {**CONFIG["trainer"], "ranks": 2}
    kept = {"weights": "all", "batches": "all"}
    ctx = context(tmp_path, policy, trainer=section, retention=kept, max_steps=STEPS)
    ctx.store.put_json(keys.config(RUN, 1), ctx.config(RUN).model_dump(mode="json"))
    done = Recorded(ctx)
    await run(done.acts.prepare_policy, PreparePolicyInput(RUN))

    def host(trainer: Launched, epoch: int) -> Any:
        return SimpleNamespace(target=TrainerTarget(epoch, f"unix://{trainer.client.path}"))

    async with ranks_of(tmp_path / "s", 2) as trainer:
        first = host(trainer, 1)
        await done.restore(first)
        for step in (1, 2):
            await done.train(first, step)
        await done.save(first)
        await done.train(first, 3)
        family = psutil.Process(trainer.launcher.pid).children()
        trainer.rank(1).kill()
        await gone(trainer, family)
        with pytest.raises(ApplicationError) as caught:
            await done.train(first, 4)
        assert caught.value.type == names.TRAINER_LOST
    async with ranks_of(tmp_path / "s", 2) as trainer:
        second = host(trainer, 2)
        # It trains step 3 again, and commits what is there already: the bits are the same.
        await done.restore(second)
        await done.train(second, 4)
        await done.save(second)
    checkpoint = ctx.store.require(keys.checkpoint(RUN, 4))
    files = ctx.store.manifest(checkpoint)
    assert sum(name.startswith(f"{OPTIMIZER_FOLDER}/") for name in files) == 2
    status, report, said = await replay(RUN, "--from", "0", "--store", ctx.store.url)
    assert status == 0 and report["equal"] and report["steps"] == STEPS, said
    compared = {(row["step"], row["kind"]) for row in report["compared"]}
    assert {(2, "checkpoint"), (4, "checkpoint"), (3, "weights")} <= compared
