"""Scores agree with a plain forward pass; models are untied; exports load again."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from ratchet.activities.inference import fingerprints
from ratchet.activities.training.model import canary, export, load_model, token_scores, untie
from tests.scoring import rescore
from tests.unit.activities.training.conftest import make_batch

TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def test_rescore_matches_each_sample_alone(policy: Path) -> None:
    model = load_model(policy)
    plain = AutoModelForCausalLM.from_pretrained(policy)
    samples = [replace(s, temperature=0.5 + 0.25 * n) for n, s in enumerate(make_batch(1))]
    scores = rescore(model, samples, seq_len=64, micro_batch_tokens=64)
    for sample, row in zip(samples, scores, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([sample.token_ids])).logits[0] / sample.temperature
        expected = torch.log_softmax(logits, -1)
        assert len(row) == len(sample.token_ids)
        assert math.isclose(row[0], -math.log(128), abs_tol=1e-6)
        for place, token in enumerate(sample.token_ids[1:], 1):
            assert math.isclose(row[place], expected[place - 1, token].item(), abs_tol=2e-6)


def test_entropy_of_a_position(policy: Path) -> None:
    model = load_model(policy)
    ids = torch.tensor([[1, 5, 9]])
    _, entropy = token_scores(model, ids, torch.full((1, 1), 2.0))
    probs = torch.softmax(model(ids).logits[0, 1] / 2.0, -1)
    assert math.isclose(entropy[0, 2].item(), -(probs * probs.log()).sum().item(), abs_tol=1e-5)
    assert math.isclose(entropy[0, 0].item(), math.log(128), abs_tol=1e-5)
    assert not entropy.requires_grad


def test_tied_model_is_untied_and_stays_so(tmp_path: Path, policy: Path) -> None:
    config = Qwen3Config(**TINY, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied")
    with torch.no_grad():
        model.lm_head.weight += 0.5
    before = canary(model, [[1, 2, 3]])
    export(model, AutoTokenizer.from_pretrained(policy), tmp_path / "untied")
    again = load_model(tmp_path / "untied")
    assert (
        json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)
    assert canary(again, [[1, 2, 3]]) == before


def test_a_model_that_predicts_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3Model has no output embedding to untie"):
        untie(Qwen3Model(Qwen3Config(**TINY)))


def test_weights_that_are_no_safetensors_are_not_loaded(tmp_path: Path, policy: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "pickled")
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        load_model(folder)


def test_code_of_a_model_is_not_run(tmp_path: Path, policy: Path) -> None:
    """A folder whose config names a module of its own, which would leave a file behind."""
    folder = shutil.copytree(policy, tmp_path / "remote")
    about = json.loads((folder / "config.json").read_text())
    about |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(about))
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(folder)
    assert not ran.exists()


def test_export_carries_the_canary(policy: Path) -> None:
    record = json.loads((policy / "canary.json").read_text())
    sequences = record["sequences"]
    assert len(sequences) == 6 and record["noise"] == {}
    assert all(len(s["logprobs"]) == len(s["token_ids"]) - 1 for s in sequences)
    assert canary(load_model(policy), [s["token_ids"] for s in sequences]) == sequences


def test_export_carries_fingerprints_of_what_engines_will_hold(
    tmp_path: Path, policy: Path
) -> None:
    model, tokenizer = load_model(policy), AutoTokenizer.from_pretrained(policy)
    export(model, tokenizer, tmp_path / "one", "bfloat16")
    export(model, tokenizer, tmp_path / "both", "float32", served=["bfloat16", "float32"])
    one, both = (fingerprints.read(tmp_path / name) for name in ("one", "both"))
    assert one is not None and both is not None
    files = load_file(tmp_path / "one" / "model.safetensors")
    assert one == fingerprints.take(sorted(files.items()), ["bfloat16"])
    assert set(both.dtypes) == {"float32", "bfloat16"}
    assert both.dtypes["bfloat16"] == one.dtypes["bfloat16"] != both.dtypes["float32"]


def test_noise_of_kernels_is_measured_and_leaves_the_model_as_it_was(
    tmp_path: Path, policy: Path
) -> None:
    model, tokenizer = load_model(policy), AutoTokenizer.from_pretrained(policy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export(model, tokenizer, tmp_path, noise=True)
    noise = json.loads((tmp_path / "canary.json").read_text())["noise"]
    exact, coarse = noise["float32"], noise["bfloat16"]
    assert 0 < exact["mean"] < exact["largest"] <= 1e-5
    assert 1e-5 < coarse["mean"] < coarse["largest"]
    assert 1e-4 <= coarse["largest"] <= 0.5
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
