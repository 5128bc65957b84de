"""A trainer that is killed again and again, in whatever it does, ends at the bits of one that is
not. The undisturbed one is the replay tool's.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import (
    LoadTrainerInput,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainStepInput,
)
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.activities import TrainerActivities
from tests import ROOT
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.processes import Process, trainer_process
from tests.unit.activities.training.test_activities import RUN, context, run
from tests.unit.activities.training.test_process import CONFIG

STEPS = 8
LR = {0: 1e-2, 1: 3e-3}
"""Learning rates of the two revisions."""


class Recorded:
    """What a run's workflow holds: the last checkpoint, and the batches, each with its revision."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx
        self.acts = TrainerActivities(ctx)
        self.checkpoint: ArtifactRef | None = None
        self.checkpointed = 0
        self.batches: list[TrainStepInput] = []

    async def train(self, process: Process, step: int) -> None:
        """Trains the next step by the second revision from step 5 on."""
        batch = self.ctx.store.put(keys.batch(RUN, step), encode_batch(make_batch(step)))
        given = TrainStepInput(RUN, step, batch, process.target, revision=int(step >= 5))
        await run(self.acts.train_step, given)
        self.batches.append(given)

    async def save(self, process: Process) -> None:
        step = len(self.batches)
        saved = await run(
            self.acts.save_checkpoint,
            SaveCheckpointInput(RUN, step, process.target, f'{{"at": {step}}}', revision=1),
        )
        self.checkpoint, self.checkpointed = saved.ref, step

    async def restore(self, process: Process) -> None:
        """A fresh process: the checkpoint, and what was trained since."""
        loaded = await run(
            self.acts.load_trainer, LoadTrainerInput(RUN, process.target, self.checkpoint)
        )
        assert loaded.step == self.checkpointed
        for given in self.batches[self.checkpointed :]:
            again = TrainStepInput(RUN, given.step, given.batch, process.target, given.revision)
            result = await run(self.acts.train_step, again)
            assert result.weights.key == keys.weights(RUN, given.step), "its bits are the same"


def two_revisions(tmp_path: Path, policy: Path) -> WorkerContext:
    ctx = context(tmp_path, policy, retention={"weights": "all", "batches": "all"}, max_steps=STEPS)
    optim = {**CONFIG["trainer"]["optim"], "lr": LR[1]}
    config = ctx.config(RUN).model_dump(mode="json")
    ctx.store.put_json(
        keys.config(RUN, 1), {**config, "trainer": {**config["trainer"], "optim": optim}}
    )
    return ctx


async def replay(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, last line, and all that was said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ratchet.activities.training.replay", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = (data.decode() for data in await process.communicate())
    last = out.splitlines()[-1] if out else ""
    report = json.loads(last) if last.startswith("{") else {}
    assert process.returncode is not None
    return process.returncode, report, out + err


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_five_kills_leave_no_trace_in_the_bits(tmp_path: Path, policy: Path) -> None:
    ctx = two_revisions(tmp_path, policy)
    done = Recorded(ctx)
    await run(done.acts.prepare_policy, PreparePolicyInput(RUN))
    sockets, scratch = tmp_path / "s", ctx.home / "scratch" / "training"

    async with trainer_process(sockets, 1) as process:
        await done.restore(process)
        for step in (1, 2):
            await done.train(process, step)
        await process.kill()
        with pytest.raises(ApplicationError) as caught:
            await done.save(process)
        assert caught.value.type == names.TRAINER_LOST

    async with trainer_process(sockets, 2) as process:
        await done.restore(process)
        await done.train(process, 3)
        await process.killed_while_writing(
            done.save(process),
            scratch,
            "checkpoint/trainer.json",
            "checkpoint/optimizer.safetensors",
        )
        assert ctx.store.committed_keys(keys.checkpoints(RUN)) == [] and done.checkpoint is None

    async with trainer_process(sockets, 3) as process:
        await done.restore(process)
        await done.save(process)
        await done.train(process, 4)
        # The optimizer has moved, and the weights are half exported.
        await process.killed_while_writing(
            done.train(process, 5),
            scratch,
            blocked="weights/.canary.json.part",
            witness="weights/config.json",
        )
        assert ctx.store.committed(keys.weights(RUN, 5)) is None and len(done.batches) == 4

    async with trainer_process(sockets, 4) as process:
        loading = asyncio.ensure_future(done.restore(process))
        await process.kill()
        with pytest.raises(ApplicationError) as caught:
            await loading
        assert caught.value.type == names.TRAINER_LOST

    async with trainer_process(sockets, 5) as process:
        await done.restore(process)
        for step in (5, 6):
            await done.train(process, step)
        await done.save(process)
        await process.kill()

    async with trainer_process(sockets, 6) as process:
        await done.restore(process)
        for step in (7, 8):
            await done.train(process, step)
        await done.save(process)

    assert list(scratch.iterdir()) == []
    rates = [
        ctx.store.get_json(
            ctx.store.require(keys.train_metrics(RUN, given.step, given.batch.sha256))
        )
        for given in done.batches
    ]
    assert [(reported["lr"], reported["config_revision"]) for reported in rates] == [
        (LR[step >= 5], float(step >= 5)) for step in range(1, STEPS + 1)
    ]

    status, report, said = await replay(RUN, "--from", "0", "--store", ctx.store.url)
    assert status == 0, said
    assert report["equal"] and (report["from"], report["to"], report["steps"]) == (0, STEPS, STEPS)
    assert report["torch_threads"] == 1 and report["first_difference"] is None
    compared = [(row["step"], row["kind"]) for row in report["compared"]]
    # keep_last is 2, and the first of three checkpoints was let go.
    assert compared == [
        *[(step, "weights") for step in range(1, 7)],
        *[(6, "checkpoint"), (7, "weights"), (8, "weights"), (8, "checkpoint")],
    ]
