"""Layers that compute their insides again give the same bits, and keep less."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training import attention, recomputing
from ratchet.activities.training.batching import micro_batches
from ratchet.activities.training.bits import WEIGHTS, first_difference
from ratchet.activities.training.model import load_model, score_batch
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG


def kept(model: Any, *, packing: bool) -> int:
    """Bytes that a forward pass keeps for its backward pass, weights not counted."""
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    (batch,) = micro_batches(make_batch(0), 64, 4096, packing=packing)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs, _ = score_batch(model, batch)
    assert logprobs.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("packing", [False, True])
def test_layers_keep_less(policy: Path, packing: bool) -> None:
    plain, less = load_model(policy), load_model(policy)
    for model in (plain, less) if packing else ():
        assert attention.enable(model) is None
    recomputing.enable(less)
    # One layer of width 32 and a head of 128 words: most of what is kept is the head's.
    assert kept(less, packing=packing) < 0.75 * kept(plain, packing=packing)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", None), ("bfloat16", None), ("bfloat16", {"rank": 4})]
)
def test_a_step_has_the_same_bits(
    tmp_path: Path, policy: Path, dtype: str, lora: dict[str, Any] | None
) -> None:
    files = []
    for on in (False, True):
        trainer = Trainer()
        section = {**CONFIG["trainer"], "compute_dtype": dtype, "activation_checkpointing": on}
        section["lora"] = lora
        trainer.load(policy, {**CONFIG, "trainer": section}, checkpoint=False)
        layers = [m for m in trainer._model.modules() if getattr(m, "gradient_checkpointing", 0)]
        assert bool(layers) == on
        out = tmp_path / str(on)
        trainer.train(1, encode_batch(make_batch(0)), out)
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert first_difference(tmp_path / "True", policy, WEIGHTS) is not None


def test_dropout_is_refused() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=16, dropout=0.5,
    )  # fmt: skip
    with pytest.raises(ValueError, match="dropout of the model's config to 0"):
        recomputing.enable(AutoModelForCausalLM.from_config(config).eval())
    config.dropout = 0.0
    recomputing.enable(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_that_cannot_is_named(policy: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match=r"trainer\.activation_checkpointing.*Qwen3ForCausalLM"):
        recomputing.enable(model)
