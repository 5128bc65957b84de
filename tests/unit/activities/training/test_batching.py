"""Micro-batches: everything once, bounded, aligned, in a fixed order."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.training.batching import cut, member_counts, micro_batches, plan
from tests.unit.activities.training.conftest import make_batch, make_sample


@given(st.lists(st.integers(1, 64), min_size=1, max_size=50), st.integers(64, 400))
def test_plan_covers_everything_once_within_the_bound(lengths: list[int], limit: int) -> None:
    bins = plan(lengths, limit)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(lengths)))
    for chosen in bins:
        assert len(chosen) * max(lengths[index] for index in chosen) <= limit
    assert plan(lengths, limit) == bins


def test_plan_gives_an_oversized_sample_a_row_of_its_own() -> None:
    assert plan([5, 100, 5], 20) == [[1], [0, 2]]


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(3, 30))
def test_rows_hold_the_samples_and_padding_is_masked(seed: int, size: int, seq_len: int) -> None:
    samples = make_batch(seed, size)
    seen = []
    for batch in micro_batches(samples, seq_len, 64):
        for row, index in enumerate(batch.indices):
            sample, length = samples[index], batch.lengths[row]
            seen.append(index)
            assert length == min(len(sample.token_ids), seq_len)
            assert batch.token_ids[row, :length].tolist() == sample.token_ids[:length]
            assert batch.loss_mask[row, :length].tolist() == sample.loss_mask[:length]
            assert batch.logprobs[row, :length].tolist() == pytest.approx(sample.logprobs[:length])
            assert batch.advantages[row, :length].tolist() == sample.advantages[:length]
            assert not batch.loss_mask[row, length:].any()
    assert sorted(seen) == list(range(size))
    masks = sum(int(b.loss_mask.sum()) for b in micro_batches(samples, seq_len, 64))
    assert masks == member_counts(samples, seq_len).rl


@given(st.integers(1, 30))
def test_cut_keeps_lists_aligned(seq_len: int) -> None:
    sample = make_sample(random.Random(0), length=20)
    short = cut(sample, seq_len)
    assert short.token_ids == sample.token_ids[:seq_len]
    assert short.versions == sample.versions[:seq_len]


def test_greedy_samples_are_refused() -> None:
    sample = replace(make_sample(random.Random(0)), temperature=0.0)
    with pytest.raises(ValueError, match="temperature"):
        list(micro_batches([sample], 32, 64))


@pytest.mark.parametrize("packing", [False, True])
def test_what_only_learns_to_say_needs_no_advantages(packing: bool) -> None:
    (played,) = make_batch(0, 1)
    learnt = [
        replace(s, advantages=None, rl_weights=[0.0] * len(s.token_ids)) for s in make_batch(1, 2)
    ]
    (batch,) = micro_batches(learnt, 32, 200, packing=packing)
    assert batch.advantages.shape == batch.token_ids.shape and not batch.advantages.any()
    (mixed,) = micro_batches([*learnt, played], 32, 200, packing=packing)
    for index, (row, start, stop) in zip(mixed.indices, mixed.spans(), strict=True):
        expected = played.advantages if index == 2 else [0.0] * (stop - start)
        assert mixed.advantages[row, start:stop].tolist() == expected
