"""Model FLOPs by PaLM's formula, and the share of a known device's peak."""

from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.batching import micro_batches
from ratchet.activities.training.flops import model_flops, peak
from ratchet.activities.training.memory import Shape
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG

QWEN3 = Shape(layers=28, hidden=1024, heads=2048, kv_heads=1024, inner=3072, vocab=151936)
"""Qwen3-0.6B."""


def test_it_is_palms_formula() -> None:
    layer = 1024 * (2 * 16 + 2 * 8) * 128 + 3 * 1024 * 3072
    weights = 28 * layer + 1024 * 151936
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert weights + norms == 596_049_920, "as the hub counts them, the embedding tied"
    lengths = [512, 2048]
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    palm = sum(n * (6 * weights + 12 * 28 * 16 * 128 * n) for n in lengths)
    assert model_flops(QWEN3, tokens, squares) == palm
    frozen = palm - 2 * weights * tokens
    mixture = replace(QWEN3, experts=8, met=2)
    more = 6 * 28 * 3 * 1024 * 3072 * tokens
    assert model_flops(mixture, tokens, squares) == palm + more, "experts that a token meets"
    assert model_flops(QWEN3, tokens, squares, frozen=True) == frozen


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX A1000", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, most: float | None) -> None:
    assert peak(name) == most


def test_what_samples_share_is_computed_once() -> None:
    one, other = make_batch(1, size=2)
    (apart,) = micro_batches([one, other], 256, 4096, packing=True)
    assert apart.work() == (sum(apart.lengths), sum(n * n for n in apart.lengths))
    (shared,) = micro_batches([one, one], 256, 4096, packing=True)
    length = len(one.token_ids)
    assert shared.work() == (length, length**2)
    half = length // 2
    ids = one.token_ids[:half] + [(token + 1) % 100 for token in one.token_ids[half:]]
    (fork,) = micro_batches([one, replace(one, token_ids=ids)], 256, 4096, packing=True)
    assert fork.work() == (2 * length - half, 2 * length**2 - half**2)
    (padded,) = micro_batches([one, other], 256, 4096)
    assert padded.work() == apart.work(), "padding is no work"
    (row,) = micro_batches([one], 256, 4096, packing=True)
    assert row.work() == (length, length**2)


@pytest.mark.parametrize("lora", [None, {}], ids=["all", "adapter"])
def test_a_step_reports_it_on_a_known_device(
    tmp_path: Path, policy: Path, lora: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    document = {**CONFIG, "trainer": {**CONFIG["trainer"], "lora": lora}}
    trainer.load(policy, document, checkpoint=False)
    shape = Shape.read(trainer._model.config.to_dict())
    assert shape is not None
    # The model is the same at each step.
    monkeypatch.delattr(Shape, "read")
    metrics = trainer.train(1, encode_batch(make_batch(1)), tmp_path / "1")
    assert "perf/mfu" not in metrics, "nobody knows the peak of a CPU"
    monkeypatch.setattr(trainer, "_peak", 1e9)
    metrics = trainer.train(2, encode_batch(make_batch(2)), tmp_path / "2")
    lengths = [len(sample.token_ids) for sample in make_batch(2)]
    flops = model_flops(shape, sum(lengths), sum(n * n for n in lengths), frozen=lora is not None)
    assert metrics["perf/mfu"] == pytest.approx(flops / metrics["seconds_train"] / 1e9)
