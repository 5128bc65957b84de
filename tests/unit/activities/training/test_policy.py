"""Tokenizer round trip, template layout, warm start."""

import dataclasses
import itertools
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ratchet.activities.contracts.names import WARM_START_ENVS
from ratchet.activities.envs import datasets
from ratchet.activities.training.model import token_scores
from ratchet.activities.training.policy import (
    EMBEDDING_STD,
    Recipe,
    _scrambled,
    _supervised_batch,
    build_model,
    digest,
    encode_conversation,
    recipe_of,
    scramble,
    warm_start,
)
from ratchet.activities.training.tokenizer import CHARACTERS, build_tokenizer
from tests.unit.activities.training.conftest import SMALL

TOKENIZER = build_tokenizer(256)
MESSAGES = [
    {"role": "user", "content": "reverse  ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "again"},
]


@given(st.text(alphabet="".join(CHARACTERS), max_size=60).filter(lambda text: "<|" not in text))
def test_one_token_a_character_and_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_specials() -> None:
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
    tokenizer = build_tokenizer(256)
    assert tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2, 3]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("é") == [3]
    assert len(tokenizer) == 128
    shown = tokenizer.decode([0, 1, 2, 3, 127, *tokenizer.encode("ab")], skip_special_tokens=True)
    assert shown == "ab", "reserved ones are special, too"


def test_template_layout() -> None:
    text = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nreverse  ab<|im_end|>\n"
        "<|im_start|>assistant\nba<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_conversation_encodes_as_the_template_and_learns_replies() -> None:
    ids, learn = encode_conversation(TOKENIZER, MESSAGES)
    text = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False)
    assert ids == TOKENIZER.encode(text)
    learnt = [token for token, wanted in zip(ids, learn, strict=True) if wanted]
    assert TOKENIZER.decode(learnt) == "ba<|im_end|>"


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False)
    assert again.encode(text) == TOKENIZER.encode(text)
    assert again.chat_template == TOKENIZER.chat_template


def test_scramble_keeps_classes() -> None:
    import random

    text = scramble("abc 123 XY-z", 1.0, random.Random(0))
    assert [c in string.digits for c in text] == [c in string.digits for c in "abc 123 XY-z"]
    assert text[3] == " " and text[10] == "-"
    assert scramble("abc", 0.0, random.Random(0)) == "abc"


def test_digest_covers_what_matters() -> None:
    base = digest(Recipe(), "reverse-text", 0)
    others = {
        digest(dataclasses.replace(Recipe(), noise=0.5), "reverse-text", 0),
        digest(Recipe(), "reverse-retry", 0),
        digest(Recipe(), "reverse-text", 1),
    }
    assert len(others | {base}) == 4
    assert base == digest(Recipe(), "reverse-text", 0)


def test_what_is_shown_stays_clean_and_takes_longer() -> None:
    import random

    shown = [{"role": "system", "content": "cba"}, *MESSAGES[:2]]
    noisy = dataclasses.replace(Recipe(), noise=1.0)
    assert _scrambled(shown, noisy, random.Random(0)) == shown
    (user, reply) = _scrambled(MESSAGES[:2], noisy, random.Random(0))
    assert user == MESSAGES[0] and reply["content"] != "ba"
    assert recipe_of("reverse-text") == recipe_of("reverse-retry") == Recipe()
    assert recipe_of("reverse-shown").noisy_steps > Recipe().noisy_steps


def test_embeddings_begin_small_whatever_the_other_weights_do() -> None:
    for init_std in (0.02, 0.2):
        model = build_model(dataclasses.replace(SMALL, init_std=init_std), 7)
        assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(
            EMBEDDING_STD, rel=0.1
        )
        assert float(model.lm_head.weight.detach().std()) == pytest.approx(init_std, rel=0.1)


@pytest.mark.parametrize("env", WARM_START_ENVS)
def test_warm_start_learns_and_repeats_exactly(env: str) -> None:
    recipe = dataclasses.replace(SMALL, batch=8, clean_limit=10, cooldown=4, noisy_steps=4)
    examples = datasets.demonstrations(env, 64, 0)
    runs = []
    for _ in range(2):
        losses: list[float] = []
        model = build_model(recipe, 7)
        warm_start(model, TOKENIZER, examples, recipe, 7, lambda s, t, loss: losses.append(loss))  # noqa: B023
        assert len(losses) == 18 and losses[13] < losses[0] - 0.5
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_the_learning_rate_rises_over_the_first_steps() -> None:
    examples, moved = datasets.demonstrations("reverse-text", 2, 0), []
    for rise in (1, 100):
        recipe = dataclasses.replace(
            SMALL, batch=2, rise=rise, clean_limit=1, cooldown=0, noisy_steps=0
        )
        model, before = build_model(recipe, 7), build_model(recipe, 7).state_dict()
        warm_start(model, TOKENIZER, examples, recipe, 7)
        moved.append(
            sum(float((p.detach() - before[n]).abs().sum()) for n, p in model.named_parameters())
        )
    assert moved[0] == pytest.approx(100 * moved[1], rel=0.1)


def test_the_learning_rate_falls_over_the_last_third_of_the_noisy_phase() -> None:
    recipe = dataclasses.replace(SMALL, batch=2, clean_limit=1, cooldown=0, noisy_steps=30)
    examples, model = datasets.demonstrations("reverse-text", 8, 0), build_model(recipe, 7)
    weights = model.lm_head.weight
    states = list[torch.Tensor]()
    warm_start(
        model, TOKENIZER, examples, recipe, 7, lambda *_: states.append(weights.detach().clone())
    )
    moved = [float((b - a).abs().sum()) for a, b in itertools.pairwise(states)]
    assert len(moved) == 30 and moved[29] < moved[24] < moved[20]
    assert moved[29] < 0.25 * moved[20]


def test_the_clean_phase_ends_when_the_policy_is_sure_of_most_it_learnt() -> None:
    recipe = dataclasses.replace(
        SMALL, batch=2, clean_limit=400, mastery=0.8, cooldown=0, noisy_steps=0
    )
    examples, steps = datasets.demonstrations("reverse-text", 2, 0), list[int]()
    model = build_model(recipe, 7)
    warm_start(model, TOKENIZER, examples, recipe, 7, lambda step, most, loss: steps.append(step))
    assert len(steps) < recipe.clean_limit, "it has learnt these two by heart"
    token_ids, learn = _supervised_batch(TOKENIZER, examples)
    with torch.no_grad():
        logprobs, _ = token_scores(model, token_ids, torch.ones(2, 1))
    sure = (logprobs.exp() > 0.5)[learn].float().mean().item()
    assert recipe.mastery <= sure
