"""Splits never share an example, and demonstrations come from the warm split."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.names import WARM_START_ENVS
from ratchet.activities.envs.datasets import (
    Split,
    demonstrations,
    reverse_retry_hint,
    reverse_text_words,
    split_of,
)

SPLITS: tuple[Split, ...] = ("train", "eval", "warm")


@given(
    seeds=st.tuples(*[st.integers(0, 2**32)] * 3),
    counts=st.tuples(*[st.integers(0, 40)] * 3),
    low=st.integers(2, 6),
    extra=st.integers(0, 6),
)
def test_splits_are_disjoint(
    seeds: tuple[int, int, int], counts: tuple[int, int, int], low: int, extra: int
) -> None:
    """Whatever seeds, counts and lengths are asked for."""
    found = [
        reverse_text_words(split, count, seed, low, low + extra)
        for split, seed, count in zip(SPLITS, seeds, counts, strict=True)
    ]
    for split, words, count in zip(SPLITS, found, counts, strict=True):
        assert len(words) == len(set(words)) == count
        assert all(split_of(word) == split for word in words)
        assert all(low <= len(word) <= low + extra for word in words)
    assert not set(found[0]) & set(found[1]) and not set(found[1]) & set(found[2])


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000))
def test_a_larger_count_extends(few: int, more: int, seed: int) -> None:
    assert reverse_text_words("train", few + more, seed)[:few] == reverse_text_words(
        "train", few, seed
    )


def test_words_that_run_out_are_refused() -> None:
    with pytest.raises(ValueError, match="too few words of 1 to 1 letters"):
        reverse_text_words("eval", 100, 0, 1, 1)
    with pytest.raises(ValueError, match="min_len <= max_len"):
        reverse_text_words("eval", 1, 0, 5, 4)


@pytest.mark.parametrize("env", WARM_START_ENVS)
def test_demonstrations(env: str) -> None:
    """All from the warm split, ending right, short, and steady under a larger count."""
    shown = demonstrations(env, 200, 7)
    assert shown[:50] == demonstrations(env, 50, 7)
    lengths = {"reverse-text": {2}, "reverse-retry": {2, 4}, "reverse-shown": {2, 3}}
    assert {len(talk) for talk in shown} == lengths[env]
    for talk in shown:
        if talk[0]["role"] == "system":
            assert talk[0]["content"] == talk[-1]["content"], "it shows the right reply"
            talk = talk[1:]
        word = talk[0]["content"].removeprefix("reverse ")
        assert split_of(word) == "warm"
        assert talk[-1] == {"role": "assistant", "content": word[::-1]}
        assert [message["role"] for message in talk[:2]] == ["user", "assistant"]
        for message in talk:
            assert message["role"] == "assistant" or len(message["content"]) < 24
            assert re.fullmatch(r"[a-z0-9/ ]+", message["content"])
        tokens = sum(len(message["role"]) + len(message["content"]) + 4 for message in talk)
        assert tokens < 200


def test_unknown_env_names_the_known() -> None:
    known = "envs that have: 'reverse-text', 'reverse-retry', 'reverse-shown'"
    with pytest.raises(ValueError, match=known):
        demonstrations("chess", 1, 0)


def test_hint_counts_places() -> None:
    assert reverse_retry_hint("abcd", "dcbx") == "3/4 reverse abcd"
    assert reverse_retry_hint("abcd", "") == "0/4 reverse abcd"
