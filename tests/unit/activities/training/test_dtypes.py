"""What the trainer computes in, what it keeps, and what it exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.keys import OPTIMIZER_FILE
from ratchet.activities.training.model import load_model
from ratchet.activities.training.optimizers import Optimizer
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.trainer import AdamWConfig
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG

STEPS = 10


def config(
    *, compute: str = "float32", engine: str = "float32", lr: float = 1e-2
) -> dict[str, Any]:
    trainer = {**CONFIG["trainer"], "compute_dtype": compute}
    return {
        **CONFIG,
        "max_steps": STEPS,
        "trainer": {**trainer, "optim": {**trainer["optim"], "lr": lr}},
        "inference": {**CONFIG["inference"], "dtype": engine},
    }


def loaded(folder: Path, given: dict[str, Any], *, checkpoint: bool = False) -> Trainer:
    trainer = Trainer()
    trainer.load(folder, given, checkpoint=checkpoint)
    return trainer


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def update(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """The change of all weights that had a gradient in either run, as one vector."""
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


def ten_steps(policy: Path, out: Path, compute: str) -> torch.Tensor:
    trainer = loaded(policy, config(compute=compute, lr=1e-6))
    for step in range(1, STEPS + 1):
        trainer.train(step, encode_batch(make_batch(step)), out / f"v{step}")
    return update(tensors(policy), tensors(out / f"v{STEPS}"))


def moved(change: torch.Tensor, among: torch.Tensor) -> float:
    return (change[among] != 0).float().mean().item()


def test_bf16_compute_moves_the_weights_that_fp32_moves(tmp_path: Path, policy: Path) -> None:
    exact = ten_steps(policy, tmp_path / "fp32", "float32")
    mixed = ten_steps(policy, tmp_path / "bf16", "bfloat16")
    assert not torch.equal(exact, mixed), "the passes really compute in bf16"
    trained = exact != 0
    assert moved(mixed, trained) >= 0.98
    cosine = torch.nn.functional.cosine_similarity(exact, mixed, dim=0).item()
    assert cosine >= 0.97

    # What a trainer of bf16 weights would do, so that the bar can tell one from the other.
    weights = torch.cat([t.flatten() for _, t in sorted(tensors(policy).items())])
    rounded = weights.bfloat16() + exact.bfloat16() - weights.bfloat16()
    assert moved(rounded, trained) < 0.5


def test_engines_get_their_dtype_and_checkpoints_keep_float32(tmp_path: Path, policy: Path) -> None:
    trainer = loaded(policy, config(compute="bfloat16", engine="bfloat16"))
    trainer.train(1, encode_batch(make_batch(1)), tmp_path / "v1")
    trainer.save(1, tmp_path / "checkpoint")
    exported, kept = tensors(tmp_path / "v1"), tensors(tmp_path / "checkpoint")
    assert {t.dtype for t in exported.values()} == {torch.bfloat16}
    assert {t.dtype for t in kept.values()} == {torch.float32}
    assert all(torch.equal(kept[name].bfloat16(), exported[name]) for name in kept)
    state = load_file(tmp_path / "checkpoint" / OPTIMIZER_FILE)
    moments = {t.dtype for name, t in state.items() if name.startswith("exp_avg")}
    assert moments == {torch.float32}
    assert '"dtype": "bfloat16"' in (tmp_path / "v1" / "config.json").read_text()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_trainer_goes_on_with_the_same_bits(tmp_path: Path, policy: Path, compute: str) -> None:
    given = config(compute=compute, engine="bfloat16")
    trainer = loaded(policy, given)
    trainer.train(1, encode_batch(make_batch(1)), tmp_path / "v1")
    trainer.save(1, tmp_path / "checkpoint")
    again = loaded(tmp_path / "checkpoint", given, checkpoint=True)
    for one, name in ((trainer, "straight"), (again, "again")):
        one.train(2, encode_batch(make_batch(2)), tmp_path / name)
        one.save(2, tmp_path / f"{name}-kept")
    for file in ("model.safetensors", OPTIMIZER_FILE):
        straight, other = (tmp_path / f"{n}-kept" / file for n in ("straight", "again"))
        assert straight.read_bytes() == other.read_bytes()


def test_a_checkpoint_of_bf16_weights_goes_on_in_float32(tmp_path: Path, policy: Path) -> None:
    trainer = loaded(policy, config(lr=1e-2))
    trainer.train(1, encode_batch(make_batch(1)), tmp_path / "v1")
    trainer.save(1, tmp_path / "old")
    for file in ("model.safetensors", OPTIMIZER_FILE):
        lowered = {
            name: t.bfloat16() if t.is_floating_point() and t.ndim else t
            for name, t in load_file(tmp_path / "old" / file).items()
        }
        save_file(lowered, tmp_path / "old" / file, metadata={"format": "pt"})
    again = loaded(tmp_path / "old", config(compute="bfloat16", lr=1e-6), checkpoint=True)
    before = {name: t.float() for name, t in tensors(tmp_path / "old").items()}
    again.train(2, encode_batch(make_batch(2)), tmp_path / "v2")
    change = update(before, tensors(tmp_path / "v2"))
    assert 0 < change.abs().max().item() < 1e-4


def test_every_optimizer_restores_moments_in_the_dtype_of_the_weights(policy: Path) -> None:
    model = load_model(policy)
    optimizer = Optimizer(model, AdamWConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    state = optimizer.state()
    lowered = {n: t.bfloat16() if n.startswith("exp_avg") else t for n, t in state.items()}
    other = Optimizer(model, AdamWConfig())
    other.restore(lowered)
    assert {n: t.dtype for n, t in other.state().items()} == {n: t.dtype for n, t in state.items()}


def test_scores_are_of_the_distribution_that_was_computed(tmp_path: Path, policy: Path) -> None:
    """The mismatch with bf16 scores is that of bf16 kernels, and not zero."""
    result = {
        compute: loaded(policy, config(compute=compute)).train(
            1, encode_batch([replace(s) for s in make_batch(5)]), tmp_path / compute
        )
        for compute in ("float32", "bfloat16")
    }
    exact, mixed = result["float32"], result["bfloat16"]
    assert exact["entropy"] == pytest.approx(mixed["entropy"], rel=1e-2)
    # One statistic of so few tokens may agree to the last bit on some CPU; all of them do not.
    spread = [f"entropy/all/{of}" for of in ("min", "median", "max", "std")]
    assert any(exact[of] != mixed[of] for of in spread)


def test_products_are_as_exact_as_the_config_says(policy: Path) -> None:
    given = config()
    for precision in ("high", "highest"):
        loaded(policy, {**given, "trainer": {**given["trainer"], "matmul_precision": precision}})
        assert torch.get_float32_matmul_precision() == precision
    torch.set_float32_matmul_precision("high")
    loaded(policy, given)
    assert torch.get_float32_matmul_precision() == "highest", "set, and not what is left of another"
