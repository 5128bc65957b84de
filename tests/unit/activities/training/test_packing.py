"""Bins, workers and costs against golden vectors; alignment of every stream; packed scores."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.storage.batch import Sample
from ratchet.activities.training import attention
from ratchet.activities.training.batching import (
    MicroBatch,
    cut,
    member_counts,
    micro_batches,
    pack,
)
from ratchet.activities.training.model import load_model
from ratchet.activities.training.packing import (
    TOKENS,
    Cost,
    align,
    balanced_partition,
    first_fit_decreasing,
    grid,
    model_cost,
)
from tests.scoring import rescore
from tests.unit.activities.training.conftest import make_sample

FILL = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}


def streamed(seed: int, size: int) -> list[Sample]:
    """Samples in which every number tells its place, and each stream is there or not."""
    rng = random.Random(seed)
    made = []
    for _ in range(size):
        base = make_sample(rng, length=rng.randint(5, 40))
        length = len(base.token_ids)
        streams: dict[str, Any] = {
            name: [rng.choice([0.0, rng.random()]) for _ in range(length)]
            for name in FILL
            if rng.random() < 0.5
        }
        if "ref_kl_weights" in streams:
            streams["ref_logprobs"] = [-rng.random() for _ in range(length)]
        made.append(replace(base, **streams))
    return made


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([100, 90, 80, 70], 2, [[1, 2], [0, 3]]),
        ([9, 8, 7, 6, 5, 4, 3, 2], 4, [[3, 4], [2, 5], [1, 6], [0, 7]]),
        ([31, 17, 23, 5, 11, 2], 3, [[0, 5], [2, 3], [1, 4]]),
    ],
)
def test_balanced_partition(weights: list[int], parts: int, expected: list[list[int]]) -> None:
    assert balanced_partition(weights, parts) == expected


def test_balanced_partition_needs_equal_sizes() -> None:
    with pytest.raises(ValueError, match="one size"):
        balanced_partition([1, 2, 3], 2)


@given(st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, 5))), st.data())
def test_partitions_are_whole_and_of_one_size(shape: tuple[int, int], data: Any) -> None:
    parts, each = shape
    size = parts * each
    weights = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    sets = balanced_partition(weights, parts)
    assert [len(members) for members in sets] == [each] * parts
    assert sorted(i for members in sets for i in members) == list(range(size))


def test_cost_of_a_model() -> None:
    def about(h: int, heads: int, kv: int, vocab: int, ffn: int, layers: int, dim: int) -> Any:
        return SimpleNamespace(
            hidden_size=h, num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocab,
            intermediate_size=ffn, num_hidden_layers=layers, head_dim=dim,
        )  # fmt: skip

    assert model_cost(about(16, 2, 2, 32, 64, 2, 8)) == Cost(17408, 64)
    small = model_cost(about(1024, 16, 8, 151936, 3072, 28, 128))
    assert small == Cost(1_133_248_512, 114_688)
    assert Cost(3, 2).of([1, 4]) == 3 * 5 + 2 * 17
    experts = about(16, 2, 2, 32, 64, 2, 8)
    experts.moe_intermediate_size, experts.num_experts_per_tok = 24, 2
    experts.shared_expert_intermediate_size = 16
    assert model_cost(experts) == Cost(17408, 64)


@pytest.mark.parametrize(
    ("rollouts", "workers", "each"), [(4, 2, 2), (5, 2, 3), (7, 1, 7), (11, 4, 3)]
)
def test_bins_per_worker(rollouts: int, workers: int, each: int) -> None:
    slots = grid([4] * rollouts, 4, workers)
    assert [len(own) for own in slots] == [each] * workers
    assert sum(slot.dummy for own in slots for slot in own) == each * workers - rollouts


def test_bins_are_split_for_workers_before_dummies_are_made() -> None:
    slots = [slot for own in grid([6, 6, 5, 5, 4, 4], 12, 4) for slot in own]
    assert len(slots) == 4 and not any(slot.dummy for slot in slots)
    slots = [slot for own in grid([6, 6, 5, 5, 4, 4], 12, 2) for slot in own]
    assert len(slots) == 4 and not any(slot.dummy for slot in slots), "of three bins one is split"
    lengths = [100, 90, 80, 70]
    loads = [sum(lengths[i] for s in own for i in s.indices) for own in grid(lengths, 100, 2)]
    assert loads == [170, 170]


def test_halves_of_a_bin_cost_nearly_the_same() -> None:
    assert align([[0, 1, 2, 3, 4, 5]], [1, 1, 1, 1, 1, 5], 2) == [[5], [0, 1, 2, 3, 4]]


def test_first_fit_decreasing() -> None:
    assert first_fit_decreasing([3, 9, 3, 6, 1], 10) == [[1, 4], [3, 0], [2]]
    assert first_fit_decreasing([3, 30], 10) == [[1], [0]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=64),
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([TOKENS, Cost(17408, 64)]),
)
def test_grid_of_any_batch(lengths: list[int], size: int, workers: int, cost: Cost) -> None:
    lengths = [min(length, size) for length in lengths]
    slots = grid(lengths, size, workers, cost)
    assert len({len(own) for own in slots}) == 1
    flat = [slot for own in slots for slot in own]
    trained = [i for slot in flat if not slot.dummy for i in slot.indices]
    assert sorted(trained) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in slot.indices) <= size for slot in flat)
    assert grid(lengths, size, workers, cost) == slots


def check_row(batch: MicroBatch, samples: list[Sample], seq_len: int) -> None:
    """Every per-token tensor of a micro-batch holds its samples' lists at their spans."""
    for index, (row, start, stop) in zip(batch.indices, batch.spans(), strict=True):
        sample = cut(samples[index], seq_len)
        assert stop - start == min(len(samples[index].token_ids), seq_len)
        lists = {name: getattr(sample, name) for name in ("token_ids", "loss_mask")}
        lists |= {name: getattr(sample, name) for name in ("logprobs", "advantages")}
        for name, fill in FILL.items():
            values = getattr(sample, name)
            if getattr(batch, name) is None:
                assert values is None
            else:
                lists[name] = [fill] * (stop - start) if values is None else values
        for name, values in lists.items():
            dtype = getattr(batch, name).dtype
            assert torch.equal(
                getattr(batch, name)[row, start:stop], torch.tensor(values, dtype=dtype)
            )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(3, 45),
    st.booleans(),
)
def test_streams_stay_aligned(seed: int, size: int, seq_len: int, packing: bool) -> None:
    samples = streamed(seed, size)
    made = list(micro_batches(samples, seq_len, 64, packing=packing))
    for batch in made:
        check_row(batch, samples, seq_len)
    counts = member_counts(samples, seq_len)
    none = torch.zeros(1)
    ones = [torch.ones(1) if b.rl_weights is None else b.rl_weights for b in made]
    rl = sum(int((b.loss_mask & (w != 0)).sum()) for b, w in zip(made, ones, strict=True))
    ce = sum(int(((none if b.ce_weights is None else b.ce_weights) != 0).sum()) for b in made)
    ref = sum(
        int(((none if b.ref_kl_weights is None else b.ref_kl_weights) != 0).sum()) for b in made
    )
    assert (counts.rl, counts.ce, counts.ref_kl) == (rl, ce, ref)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4, 8]),
)
def test_worker_rows(seed: int, size: int, seq_len: int, workers: int, multiple: int) -> None:
    samples = streamed(seed, size)
    how: dict[str, Any] = {"packing": True, "pad_to_multiple_of": multiple}
    own = [
        list(micro_batches(samples, seq_len, seq_len, worker=worker, workers=workers, **how))
        for worker in range(workers)
    ]
    assert len({len(batches) for batches in own}) == 1
    lengths: Counter[int] = Counter()
    for batch in (b for batches in own for b in batches):
        total = batch.token_ids.shape[1]
        assert total % multiple == 0 and total == sum(batch.lengths) <= seq_len
        used = sum(stop - start for _, start, stop in batch.spans())
        assert not batch.loss_mask[:, used:].any()
        for name in FILL:
            tensor = getattr(batch, name)
            assert tensor is None or not tensor[:, used:].any()
        positions = [place for length in batch.lengths for place in range(length)]
        assert batch.positions is not None and batch.positions[0].tolist() == positions
        if batch.loss_mask.any():
            check_row(batch, samples, seq_len)
            lengths.update(stop - start for _, start, stop in batch.spans())
        elif all(len(samples[i].token_ids) > 4 and seq_len > 4 for i in batch.indices):
            assert not batch.advantages.any()
            assert batch.rl_weights is batch.ce_weights is batch.ref_kl_weights is None
    assert lengths == Counter(min(len(s.token_ids), seq_len) for s in samples)


def test_what_a_component_lacks_is_refused() -> None:
    sample = streamed(0, 1)[0]
    ones = [1.0] * len(sample.token_ids)
    with pytest.raises(ValueError, match="ref_logprobs"):
        list(micro_batches([replace(sample, ref_kl_weights=ones, ref_logprobs=None)], 64, 64))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_layout_goes_there_and_back(lengths: list[int]) -> None:
    made = attention.layout(lengths)
    joined = torch.cat([rows.queries.flatten() for rows in made.groups])
    assert torch.equal(joined[made.back], torch.arange(sum(lengths)))
    assert all(rows.mask is None for rows in made.groups)


def test_packed_scores_are_those_of_each_sample_alone(policy: Path) -> None:
    rng = random.Random(2)
    samples = [
        replace(make_sample(rng, length=rng.randint(5, 60)), temperature=0.5 + rng.random())
        for _ in range(20)
    ]
    model = load_model(policy)
    alone = [rescore(model, [s], seq_len=64, micro_batch_tokens=64)[0] for s in samples]
    assert attention.enable(model) is None
    padded = rescore(model, samples, seq_len=64, micro_batch_tokens=256)
    for size in (64, 256, 8192):
        packed = rescore(model, samples, seq_len=64, micro_batch_tokens=size, packing=True)
        for rows in zip(packed, padded, alone, strict=True):
            for other in rows[1:]:
                assert rows[0] == pytest.approx(other, abs=1e-5)


def test_a_neighbour_changes_nothing(policy: Path) -> None:
    rng = random.Random(4)
    one, other, third = (make_sample(rng, length=n) for n in (30, 22, 30))
    model = load_model(policy)
    assert attention.enable(model) is None
    first = rescore(model, [one, other], seq_len=64, micro_batch_tokens=64, packing=True)
    again = rescore(model, [third, other], seq_len=64, micro_batch_tokens=64, packing=True)
    assert first[1] == again[1] and first[0] != again[0]


def test_a_batch_of_nothing_is_not_packed() -> None:
    with pytest.raises(ValueError, match="without sequences"):
        grid([], 16, 2)


def test_padding_of_a_row_is_a_sequence_of_its_own() -> None:
    sample = make_sample(random.Random(0), length=10)
    batch = pack([0], [sample], 8)
    assert batch.lengths == [10, 6] and batch.token_ids[0, 10:].tolist() == [1] * 6
    assert batch.temperature[0, 10:].tolist() == [1.0] * 6


def test_a_model_with_sliding_windows_is_not_packed(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, use_sliding_window=True,
        sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    assert "sliding_attention" in str(attention.enable(model))
    plain = Qwen3Config(**{**config.to_dict(), "use_sliding_window": False, "layer_types": None})
    assert attention.enable(Qwen3ForCausalLM(plain).eval()) is None


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_no_group_is_padded_by_more_than_a_third(lengths: list[int]) -> None:
    padded = sum(rows.keys.numel() for rows in attention.layout(lengths).groups)
    assert attention.LIKE * padded <= sum(lengths)
