"""The real trainer process over its socket: same bits after a restart, idempotent steps."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.client import (
    StateMismatch,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document
from tests import ROOT
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.processes import until_it_answers

CONFIG = config_document(
    RunConfig.model_validate(
        {
            "max_steps": 4,
            "train": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 16}},
            "trainer": {
                "threads": 1,
                "seq_len": 32,
                "micro_batch_tokens": 64,
                "optim": {"lr": 1e-2},
            },
        }
    )
)


@contextlib.asynccontextmanager
async def trainer(folder: Path, *flags: str) -> AsyncIterator[TrainerClient]:
    socket = folder / f"s{len(list(folder.iterdir()))}"
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "ratchet.activities.training.process",
            "--socket",
            str(socket),
            *flags,
        ),
        cwd=ROOT,
    )
    client = TrainerClient(f"unix://{socket}")
    try:
        await until_it_answers(client, timeout_s=120)
        yield client
        await client.shutdown()
        await asyncio.wait_for(process.wait(), 30)
        assert process.returncode == 0 and not socket.exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def batches(folder: Path) -> list[Path]:
    paths = [folder / f"batch-{step}" for step in range(1, 5)]
    for step, path in enumerate(paths):
        path.write_bytes(encode_batch(make_batch(step)))
    return paths


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.timeout(600)
@pytest.mark.long
async def test_resume_is_bitwise_and_steps_are_idempotent(tmp_path: Path, policy: Path) -> None:
    data = batches(tmp_path)
    straight: list[Any] = []
    async with trainer(tmp_path) as client:
        assert await client.ping(timeout_s=60) is None, "libraries are imported meanwhile"
        assert (await client.load(policy, CONFIG, checkpoint=False)).step == 0
        for step, batch in enumerate(data, 1):
            straight.append(await client.step(step, batch, tmp_path / f"a{step}"))
            if step == 2:
                await client.save(2, tmp_path / "checkpoint")
        assert await client.ping() == 4

    first = straight[0]
    assert {"loss", "entropy", "mismatch_kl", "grad_norm", "lr", "tokens", "is_masked"} <= set(
        first
    )
    assert first["tokens"] == sum(sum(s.loss_mask) for s in make_batch(0))
    assert not same_weights(policy, tmp_path / "a1")

    async with trainer(tmp_path) as client:
        loaded = await client.load(tmp_path / "checkpoint", CONFIG, checkpoint=True)
        assert (loaded.step, loaded.torch_threads, loaded.warnings) == (2, 1, [])
        # The step the checkpoint was taken at: nothing is trained, the export comes again.
        again = await client.step(2, data[1], tmp_path / "b2")
        assert again["loss"] == straight[1]["loss"]
        assert same_weights(tmp_path / "a2", tmp_path / "b2")
        for step in (3, 4):
            metrics = await client.step(step, data[step - 1], tmp_path / f"b{step}")
            assert metrics["loss"] == straight[step - 1]["loss"]
            assert same_weights(tmp_path / f"a{step}", tmp_path / f"b{step}")
        assert await client.step(4, data[3], tmp_path / "b4") == metrics

        for step, batch in ((4, data[0]), (3, data[2]), (6, data[0])):
            with pytest.raises(StateMismatch):
                await client.step(step, batch, tmp_path / "no")
        with pytest.raises(StateMismatch):
            await client.save(3, tmp_path / "no")
        with pytest.raises(TrainerFailed, match="unknown operation"):
            await client.call("dance", {}, 60)
        assert await client.ping() == 4


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(TrainerGone):
        await TrainerClient(f"unix://{tmp_path / 'nobody'}").ping()


async def test_closed_in_mid_request_and_silence(tmp_path: Path) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(close, tmp_path / "c"):
        with pytest.raises(TrainerGone, match="closed"):
            await TrainerClient(f"unix://{tmp_path / 'c'}").ping()
    async with await asyncio.start_unix_server(ignore, tmp_path / "i"):
        with pytest.raises(TimeoutError):
            await TrainerClient(f"unix://{tmp_path / 'i'}").ping(timeout_s=0.1)
