"""Scores by blocks of rows are those of the whole head, gradients included, and hold one block."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Qwen3Config

from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.training import attention, head
from ratchet.activities.training.batching import MicroBatch, micro_batches
from ratchet.activities.training.model import computing, score_batch
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_sample
from tests.unit.activities.training.test_process import CONFIG

VOCAB = 1_000
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def made(vocab: int = VOCAB) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=vocab, tie_word_embeddings=False, **SMALL, **HEADS)
    model = AutoModelForCausalLM.from_config(config).eval()
    # Far from uniform, as trained models are.
    model.lm_head.weight.data *= 20
    return model


def drawn(vocab: int, *, alike: bool, seed: int = 1) -> list[Sample]:
    """Samples whose temperatures differ; of one prompt, or each of its own."""
    rng, samples = random.Random(seed), []
    prompt = [rng.randrange(vocab) for _ in range(12)]
    for place in range(6):
        base = make_sample(rng, length=24 - place, prompt=12)
        start = prompt if alike else [rng.randrange(vocab) for _ in prompt]
        rest = [rng.randrange(vocab) for _ in base.token_ids[12:]]
        heat = 0.7 if alike else 0.5 + 0.25 * place
        samples.append(replace(base, token_ids=[*start, *rest], temperature=heat))
    return samples


def gradients(model: Any, batch: MicroBatch, by: head.Head | None, dtype: str = "float32") -> Any:
    model.zero_grad()
    with computing("cpu", dtype):
        logprobs, entropy = score_batch(model, batch, by)
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    grads = {name: value.grad.clone() for name, value in model.named_parameters()}
    return {"logprobs": logprobs.detach(), "entropy": entropy, **grads}


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("kind", ["padded", "packed", "shared"])
def test_blocks_give_what_the_whole_gives(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    if kind != "padded":
        assert attention.enable(model) is None
    monkeypatch.setitem(head.BLOCK_LOGITS, "cpu", rows * VOCAB)
    by = head.split(model)
    assert by is not None and by.block_rows == rows
    samples = drawn(VOCAB, alike=kind == "shared")
    (batch,) = micro_batches(samples, 32, 1_000, packing=kind != "padded")
    assert (batch.layout is not None and batch.layout.own is not None) == (kind == "shared")
    whole, blocks = gradients(model, batch, None), gradients(model, batch, by)
    exact = gradients(model.double(), batch, None)

    def apart(found: Any, name: str, of: Any) -> float:
        return float((found[name].double() - of[name]).abs().max() / of[name].abs().max())

    for name in whole:
        # How far off the whole is itself depends on the kernels of the machine.
        own = apart(whole, name, exact)
        assert own <= 1e-5 and apart(blocks, name, whole) <= 1e-6 + own, name
    assert not blocks["entropy"].requires_grad


def test_blocks_compute_in_the_dtype_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setitem(head.BLOCK_LOGITS, "cpu", 7 * VOCAB)
    by = head.split(model)
    (batch,) = micro_batches(drawn(VOCAB, alike=False), 32, 1_000)
    exact, whole = (gradients(model, batch, None, dtype) for dtype in ("float32", "bfloat16"))
    blocks = gradients(model, batch, by, "bfloat16")
    for name, expected in exact.items():
        noise, apart = ((made[name] - expected).norm() for made in (whole, blocks))
        assert 0 < apart <= 1.5 * noise, name


class Largest(TorchDispatchMode):
    """Remembers the most numbers that one operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_more_than_one_block_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    (batch,) = micro_batches(drawn(VOCAB, alike=False), 32, 1_000)
    monkeypatch.setitem(head.BLOCK_LOGITS, "cpu", 20 * VOCAB)
    by = head.split(model)
    with Largest() as blocks:
        gradients(model, batch, by)
    with Largest() as whole:
        gradients(model, batch, None)
    assert blocks.numbers == 20 * VOCAB
    assert whole.numbers > 100 * VOCAB


def capped() -> Any:
    """A model that caps its logits."""
    config = Gemma2Config(vocab_size=VOCAB, final_logit_softcapping=0.5, **SMALL, **HEADS)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_that_caps_its_logits_is_not_split() -> None:
    model = capped()
    model.lm_head.weight.data *= 20
    assert head.split(model) is None


def test_a_trainer_trains_by_blocks(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers of a step are those of one that holds all logits."""
    vocab = 40_000
    made(vocab).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "model")
    batch = encode_batch([s for seed in range(5) for s in drawn(vocab, alike=False, seed=seed)])
    steps = []
    for whole in (True, False):
        trainer = Trainer()
        section = {**CONFIG["trainer"], "micro_batch_tokens": 1_000}
        trainer.load(tmp_path / "model", {**CONFIG, "trainer": section}, checkpoint=False)
        assert trainer._head is not None and trainer._head.block_rows < 500
        assert "all logits" not in caplog.text
        if whole:
            trainer._head = None
        with Largest() as largest:
            metrics = trainer.train(1, batch, tmp_path / f"out{whole}")
        steps.append((metrics, largest.numbers))
    (plain, more), (blocks, fewer) = steps
    assert fewer <= head.BLOCK_LOGITS["cpu"] < more
    for name in ("loss", "entropy", "mismatch_kl", "grad_norm"):
        assert blocks[name] == pytest.approx(plain[name], rel=1e-5), name


def test_a_trainer_of_a_model_that_is_not_split_says_so(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capped().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path)
    trainer = Trainer()
    trainer.load(tmp_path, CONFIG, checkpoint=False)
    assert trainer._head is None and "all logits of a micro-batch" in caplog.text
