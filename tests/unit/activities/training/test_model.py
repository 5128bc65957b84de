"""Scores agree with a plain forward pass; models are untied; exports load again."""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from ratchet.activities.training.model import canary, export, load_model, rescore, token_scores
from tests.unit.activities.training.conftest import make_batch


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
    config = Qwen3Config(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied")
    with torch.no_grad():
        model.lm_head.weight += 0.5
    before = canary(model, [1, 2, 3])
    export(model, AutoTokenizer.from_pretrained(policy), tmp_path / "untied")
    again = load_model(tmp_path / "untied")
    assert (
        json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)
    assert canary(again, [1, 2, 3]) == before


def test_export_carries_the_canary(policy: Path) -> None:
    record = json.loads((policy / "canary.json").read_text())
    assert len(record["logprobs"]) == len(record["token_ids"]) - 1
    again = canary(load_model(policy), record["token_ids"])
    assert again["logprobs"] == record["logprobs"]
