"""A trainer goes on with its own bits, whatever a late writer committed under its keys."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import (
    LoadTrainerInput,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainStepInput,
)
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact
from ratchet.activities.training.activities import TrainerActivities
from ratchet.configs.versions import NewerSchema
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.processes import trainer_process
from tests.unit.activities.training.test_activities import RUN, context, run


def foreign(store: ArtifactStore, made: ArtifactRef, key: str, scratch: Path) -> None:
    """Commits, under `key`, an export that differs from `made` in the last bit of one weight."""
    scratch.mkdir()
    for file in store.fetch_folder(made).iterdir():
        if file.name != "manifest.json":
            (scratch / file.name).write_bytes(file.read_bytes())
    tensors = load_file(scratch / "model.safetensors")
    weight = tensors["lm_head.weight"].view(-1).view(torch.int32)
    weight[0] ^= 1
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    store.put_folder(key, scratch, attempt="late")


@pytest.mark.timeout(180)
@pytest.mark.long
async def test_a_late_writer_decides_nothing(tmp_path: Path, policy: Path) -> None:
    ctx = context(tmp_path, policy, retention={"batches": "all"})
    acts, store = TrainerActivities(ctx), ctx.store
    v0 = (await run(acts.prepare_policy, PreparePolicyInput(RUN))).weights
    foreign(store, v0, keys.weights(RUN, 1), tmp_path / "w1")
    foreign(store, v0, keys.checkpoint(RUN, 1), tmp_path / "c1")
    batches = [store.put(keys.batch(RUN, n), encode_batch(make_batch(n))) for n in (1, 2)]
    async with trainer_process(tmp_path / "s", 5) as process:
        target = process.target
        await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        given = TrainStepInput(RUN, 1, batches[0], target)
        trained = await run(acts.train_step, given)
        assert trained.weights.key == keys.weights(RUN, 1) + ".e5"
        assert trained.metrics_ref.key.endswith(".json.e5")
        scores = keys.token_logprobs(RUN, 1)
        assert store.committed_keys(f"runs/{RUN}/token_logprobs") == [f"{scores}.e5"]
        assert await run(acts.train_step, given) == trained

        early = SaveCheckpointInput(RUN, 1, target, '{"moment": 1}')
        saved = await run(acts.save_checkpoint, early)
        assert saved.ref.key == keys.checkpoint(RUN, 1) + ".e5"
        own = store.fetch_folder(saved.ref)
        exported = store.fetch_folder(trained.weights)
        weights = [(f / "model.safetensors").read_bytes() for f in (own, exported)]
        assert weights[0] == weights[1]

        # A later moment at the same step adopts the earlier one, with the state that it came with.
        late = SaveCheckpointInput(RUN, 1, target, '{"moment": 2}')
        assert await run(acts.save_checkpoint, late) == saved
        assert json.loads((own / "run_state.json").read_text()) == {"moment": 1}

        # Where the state is another, so is the checkpoint: nothing of the two is ever mixed.
        foreign(store, trained.weights, keys.weights(RUN, 2), tmp_path / "w2")
        foreign(store, saved.ref, keys.checkpoint(RUN, 2), tmp_path / "c2")
        assert (await run(acts.train_step, TrainStepInput(RUN, 2, batches[1], target))).step == 2
        other = SaveCheckpointInput(RUN, 2, target, '{"moment": 3}')
        second = await run(acts.save_checkpoint, other)
        assert second.ref.key == keys.checkpoint(RUN, 2) + ".e5"
        state = store.fetch_folder(second.ref) / "run_state.json"
        assert json.loads(state.read_text()) == {"moment": 3}

        # A trainer that cannot repeat its own bits is not trusted with them.
        store.delete(trained.weights)
        foreign(store, v0, keys.weights(RUN, 1) + ".e5", tmp_path / "w1e5")
        await run(acts.load_trainer, LoadTrainerInput(RUN, target))
        with pytest.raises(ApplicationError) as caught:
            await run(acts.train_step, given)
        assert caught.value.type == names.TRAINER_LOST

        # What is damaged or of a later schema is refused before the trainer loses its state.
        optimizer = own / "optimizer.safetensors"
        optimizer.write_bytes(optimizer.read_bytes()[:-7])
        with pytest.raises(CorruptArtifact, match=r"optimizer\.safetensors"):
            await run(acts.load_trainer, LoadTrainerInput(RUN, target, saved.ref))
        optimizer.unlink()
        with pytest.raises(CorruptArtifact, match=r"optimizer\.safetensors is missing"):
            await run(acts.load_trainer, LoadTrainerInput(RUN, target, saved.ref))
        assert await process.client.ping() == 1

        newer = tmp_path / "newer"
        newer.mkdir()
        for file in store.fetch_folder(second.ref).iterdir():
            if file.name != "manifest.json":
                (newer / file.name).write_bytes(file.read_bytes())
        result = json.loads((newer / "trainer.json").read_text())
        (newer / "trainer.json").write_text(json.dumps({**result, "schema": 4}))
        ref = store.put_folder(keys.checkpoint(RUN, 9), newer, attempt="newer")
        with pytest.raises(NewerSchema, match=r"trainer\.json has schema 4, .* newer build"):
            await run(acts.load_trainer, LoadTrainerInput(RUN, target, ref))
