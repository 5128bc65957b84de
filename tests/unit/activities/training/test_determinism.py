"""Deterministic mode: it reaches the process, and changes no bit on a CPU.

What only a GPU can show is at the end: the same bits twice there, with and without a load between.
Without one it is shown that a step has no operation that torch's documentation says to be refused.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.training import determinism
from ratchet.activities.training.bits import WEIGHTS, first_difference
from ratchet.activities.training.client import TrainerClient, TrainerFailed
from ratchet.activities.training.server import trainer_spec
from ratchet.activities.training.trainer import OPTIMIZER_FILE, Trainer
from tests import ROOT
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG, trainer

FLAG = "--deterministic"
REFUSED = {
    *("histc", "bincount", "put", "put_", "median.dim", "kthvalue", "nll_loss_forward"),
    *("nll_loss2d_forward", "_ctc_loss", "max_unpool2d", "max_unpool3d", "grid_sampler_2d"),
}
"""Operations of CUDA that `torch.use_deterministic_algorithms` documents as raising an error."""
SECTIONS: list[dict[str, Any]] = [
    {"packing": True, "optim": {"type": "adamw", "lr": 1e-2}},
    {"packing": False, "optim": {"type": "muon", "lr": 1e-2}},
    {"packing": True, "optim": {"type": "sgd"}, "loss": {"type": "ipo"}},
    {"packing": True, "optim": {"type": "signsgd", "lr": 1e-3}},
]
LOSSES = """
import torch

def put(inputs):
    place = torch.zeros(1, dtype=torch.int64)
    torch.zeros(2).put_(place, torch.ones(1))
    return -inputs.advantages * inputs.trainer_logprobs
"""


def config(*, deterministic: bool, **section: Any) -> dict[str, Any]:
    return {
        **CONFIG,
        "trainer": {**CONFIG["trainer"], **section, "deterministic": deterministic},
    }


def batch(step: int) -> list[Sample]:
    """Samples, some of them members of every component of the loss."""

    def of_all(sample: Sample) -> Sample:
        length = len(sample.token_ids)
        return replace(
            sample,
            ce_weights=[0.5] * length,
            ref_kl_weights=[float(on) for on in sample.loss_mask],
            ref_logprobs=[-4.0] * length,
        )

    return [of_all(s) if place % 2 else s for place, s in enumerate(make_batch(step))]


async def trained(client: TrainerClient, given: dict[str, Any], start: Path, out: Path) -> Path:
    """Three steps, with a save and a load after the second; the folder of a last checkpoint."""
    out.mkdir()
    loaded = await client.load(start, given, checkpoint=False)
    assert loaded.deterministic is given["trainer"]["deterministic"]
    for step in (1, 2, 3):
        data = out / f"batch-{step}"
        data.write_bytes(encode_batch(batch(step)))
        await client.step(step, data, out / str(step))
        if step == 2:
            await client.save(2, out / "between")
            await client.load(out / "between", given, checkpoint=True)
    await client.save(3, out / "checkpoint")
    return out / "checkpoint"


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same bits in weights, optimizer and random numbers."""
    found = [first_difference(one, other, files) for files in (WEIGHTS, OPTIMIZER_FILE)]
    return found == [None, None]


@pytest.mark.parametrize("on", [False, True])
async def test_the_process_is_started_in_the_mode_of_the_config(tmp_path: Path, on: bool) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config("r"), config(deterministic=on))
    host = HostInput(run_id="r", role="trainer", index=0, queue="q")
    assert (FLAG in (await trainer_spec(ctx, host, 1)).argv) is on


async def test_what_the_mode_is() -> None:
    code = (
        "import json, os, torch\n"
        "from ratchet.activities.training import determinism\n"
        "before = determinism.enabled()\n"
        "determinism.enable()\n"
        "cuda, cudnn = torch.backends.cuda, torch.backends.cudnn\n"
        "print(json.dumps({'before': before, 'after': determinism.enabled(),\n"
        "  'warns': torch.is_deterministic_algorithms_warn_only_enabled(),\n"
        "  'cublas': os.environ[determinism.CUBLAS_VARIABLE],\n"
        "  'cudnn': [cudnn.benchmark, cudnn.deterministic], 'math': cuda.math_sdp_enabled(),\n"
        "  'others': [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),\n"
        "             cuda.cudnn_sdp_enabled()], 'gpu': torch.cuda.is_available()}))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        cwd=ROOT,
        env={**os.environ, determinism.CUBLAS_VARIABLE: ":16:8"},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    reported = json.loads(output)
    assert (reported["before"], reported["after"], reported["warns"]) == (False, True, False)
    assert (
        reported["cublas"] == ":4096:8" and reported["cudnn"] == [False, True] and reported["math"]
    )
    # On a CPU the choice of attention stays: another one has other bits.
    assert any(reported["others"]) is not reported["gpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")
@pytest.mark.timeout(600)
@pytest.mark.nightly
async def test_on_a_cpu_it_changes_no_bit(tmp_path: Path, policy: Path) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "on").mkdir()
    async with trainer(tmp_path / "off") as plain, trainer(tmp_path / "on", FLAG) as strict:
        for place, section in enumerate(SECTIONS):
            results = [
                await trained(
                    client,
                    config(deterministic=on, **section),
                    policy,
                    tmp_path / f"{place}-{on}",
                )
                for client, on in ((plain, False), (strict, True))
            ]
            assert same(*results), section
            assert first_difference(tmp_path / f"{place}-True" / "1", results[1], WEIGHTS)


@pytest.mark.timeout(180)
@pytest.mark.nightly
async def test_an_operation_that_is_refused_is_the_users_error(
    tmp_path: Path, policy: Path
) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    loss = {"type": "custom", "function": "losses:put", "path": str(tmp_path)}
    (tmp_path / "s").mkdir()
    data = tmp_path / "batch"
    data.write_bytes(encode_batch(make_batch(1)))
    async with trainer(tmp_path / "s", FLAG) as client:
        await client.load(policy, config(deterministic=True, loss=loss), checkpoint=False)
        with pytest.raises(TrainerFailed, match=r"trainer\.deterministic is true, and 'put_'") as e:
            await client.step(1, data, tmp_path / "out")
        assert e.value.kind == "ValueError" and await client.ping() == 0


def test_a_process_of_the_other_mode_takes_no_such_config(policy: Path) -> None:
    with pytest.raises(AssertionError, match=FLAG):
        Trainer().load(policy, config(deterministic=True), checkpoint=False)


class Operations(TorchDispatchMode):
    """Names of the operations that run; a cumsum of floats goes by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name.startswith("cumsum") and result.is_floating_point():
            name = "cumsum of floats"
        self.seen.add(name)
        return result


@pytest.mark.parametrize("section", SECTIONS)
def test_a_step_has_no_operation_that_is_refused_on_a_gpu(
    tmp_path: Path, policy: Path, section: dict[str, Any]
) -> None:
    trainer = Trainer()
    trainer.load(policy, config(deterministic=False, **section), checkpoint=False)
    with Operations() as found, sdpa_kernel(SDPBackend.MATH):
        trainer.train(1, encode_batch(batch(1)), tmp_path / "out")
    assert {"bmm", "embedding_dense_backward", "scatter_add"} <= found.seen, "backward is seen too"
    assert not found.seen & {*REFUSED, "cumsum of floats"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.timeout(600)
async def test_on_a_gpu_the_bits_are_the_same_twice(
    tmp_path: Path, policy: Path, dtype: str
) -> None:
    results: list[list[Path]] = []
    for turn in ("a", "b"):
        (tmp_path / turn).mkdir()
        async with trainer(tmp_path / turn, FLAG) as client:
            results.append([])
            for place, section in enumerate(SECTIONS):
                given = {
                    **config(deterministic=True, compute_dtype=dtype, **section),
                    "inference": {"dtype": dtype},
                }
                out = tmp_path / f"{turn}-{place}"
                results[-1].append(await trained(client, given, policy, out))
    for section, one, other in zip(SECTIONS, *results, strict=True):
        assert same(one, other), section


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("strict")
def test_only_a_refusal_of_torch_is_explained_as_one() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.zeros(2).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))
    text = determinism.refusal(refused.value)
    assert text is not None and "'put_'" in text and "set it to false" in text
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert determinism.refusal(other.value) is None
    assert determinism.refusal(ValueError(str(refused.value))) is None, "torch raises another type"
