"""A disk that is full under the trainer process: nothing is lost, the same work goes on later."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import (
    LoadTrainerInput,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainStepInput,
)
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.activities import TrainerActivities
from ratchet.activities.training.process import disk_failure
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.processes import trainer_process
from tests.unit.activities.training.test_activities import RUN, context, run

ANY_SIZE = -1


@pytest.mark.timeout(180)
@pytest.mark.long
async def test_a_full_disk_only_holds_the_trainer_up(tmp_path: Path, policy: Path) -> None:
    ctx = context(tmp_path, policy)
    acts = TrainerActivities(ctx)
    await run(acts.prepare_policy, PreparePolicyInput(RUN))
    data = [encode_batch(make_batch(step)) for step in (1, 2)]
    batches = [ctx.store.put(keys.batch(RUN, n), d) for n, d in enumerate(data, 1)]

    alone = Trainer()
    alone.load(policy, ctx.config(RUN).model_dump(mode="json"), checkpoint=False)
    for step in (1, 2):
        alone.train(step, data[step - 1], tmp_path / f"alone-{step}")
    alone.save(2, tmp_path / "alone")
    weights = (tmp_path / "alone" / "model.safetensors").stat().st_size

    async with trainer_process(tmp_path / "s") as process:
        target = process.target
        await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        for step, batch in enumerate(batches, 1):
            given = TrainStepInput(RUN, step, batch, target)
            for room in (0, weights // 2):
                process.may_write(room)
                with pytest.raises(
                    ApplicationError, match="trainer process: step cannot"
                ) as caught:
                    await run(acts.train_step, given)
                assert caught.value.type == names.STORE_FAILED and caught.value.non_retryable
                assert await process.client.ping() == step, "the optimizer has moved, once"
                assert ctx.store.committed(keys.weights(RUN, step)) is None
            process.may_write(ANY_SIZE)
            trained = await run(acts.train_step, given)
            made = ctx.store.fetch_folder(trained.weights) / "model.safetensors"
            expected = tmp_path / f"alone-{step}" / "model.safetensors"
            assert made.read_bytes() == expected.read_bytes()
            assert "seconds_export" in ctx.store.get_json(trained.metrics_ref)

        # There is room for the weights, and none for the optimizer, which is larger.
        process.may_write(weights + 1)
        save = SaveCheckpointInput(RUN, 2, target, "{}")
        with pytest.raises(ApplicationError, match="process: save cannot") as caught:
            await run(acts.save_checkpoint, save)
        assert caught.value.type == names.STORE_FAILED and caught.value.non_retryable
        assert ctx.store.committed(keys.checkpoint(RUN, 2)) is None
        process.may_write(ANY_SIZE)
        saved = ctx.store.fetch_folder((await run(acts.save_checkpoint, save)).ref)
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (saved / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert list((ctx.home / "scratch" / "training").iterdir()) == []


def test_refusals_of_the_system_are_known_from_any_library(tmp_path: Path) -> None:
    def met(work: object) -> OSError | None:
        with pytest.raises(Exception) as caught:
            work()  # type: ignore[operator]
        return disk_failure(caught.value)

    nowhere = tmp_path / "no" / "x"
    tokenizer = build_tokenizer(64).backend_tokenizer
    full = met(lambda: Path("/dev/full").write_text("x"))
    assert full is not None and full.errno == 28
    rust = met(lambda: tokenizer.save("/dev/full"))
    assert rust is not None and rust.errno == 28 and "No space" in str(rust)
    missing = met(lambda: save_file({"a": torch.zeros(1)}, nowhere))
    assert missing is not None and missing.errno == 2
    assert disk_failure(ValueError("step 3: no space")) is None
    assert disk_failure(OSError("this folder has no config.json")) is None
