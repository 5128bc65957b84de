"""Beginnings that samples share are computed once, and count as often as they occur."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.storage.batch import Sample
from ratchet.activities.training import attention, batching
from ratchet.activities.training.batching import micro_batches, pack
from ratchet.activities.training.model import load_model, score_batch
from tests.unit.activities.training.conftest import make_sample

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=10)


def sample_of(token_ids: list[int], **changes: Any) -> Sample:
    base = make_sample(random.Random(0), length=max(len(token_ids), 5))
    lists = ("loss_mask", "logprobs", "advantages", "versions")
    short = {name: getattr(base, name)[: len(token_ids)] for name in lists}
    return replace(base, token_ids=token_ids, **short, **changes)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 8]))
def test_each_beginning_of_a_row_is_there_once(drawn: list[list[int]], multiple: int) -> None:
    batch = pack(list(range(len(drawn))), [sample_of(ids) for ids in drawn], multiple)
    made, row = batch.layout, batch.token_ids[0].tolist()
    beginnings = [tuple(ids[: k + 1]) for ids in drawn for k in range(len(ids))]
    padding = len(row) - len(beginnings)
    beginnings += [(-1, *[1] * k) for k in range(padding)]
    assert made is not None
    joined = torch.cat([rows.queries.flatten() for rows in made.groups])
    if made.own is None:
        assert len(set(beginnings)) > 0.9 * (len(row) - padding)
        assert torch.equal(joined[made.back], torch.arange(len(row)))
        return
    assert made.of is not None and made.before is not None
    kept = [beginnings[place] for place in made.own.tolist()]
    assert kept == list(dict.fromkeys(beginnings))
    assert [kept[place] for place in made.of.tolist()] == beginnings
    assert torch.equal(joined[made.back], torch.arange(len(kept)))
    for beginning, before in zip(kept, made.before.tolist(), strict=True):
        assert len(beginning) == 1 or kept[before] == beginning[:-1]
    seen = [
        rows.keys[k][: j + 1] if rows.mask is None else rows.keys[k][rows.mask[j]]
        for rows in made.groups
        for k in range(len(rows.queries))
        for j in range(rows.queries.shape[1])
    ]
    for beginning, place in zip(kept, made.back.tolist(), strict=True):
        ends = range(1, len(beginning) + 1)
        assert [kept[token] for token in seen[place].tolist()] == [beginning[:n] for n in ends]


def test_what_most_of_a_sequence_shares_is_attended_from_once() -> None:
    samples = grouped()
    made = pack(list(range(len(samples))), samples).layout
    assert made is not None
    pairs = sum(rows.queries.numel() * rows.keys.shape[1] for rows in made.groups)
    # Of each prompt's four samples one has all 40 queries, two the 16 after the prompt, one none.
    assert [rows.skip for rows in made.groups] == [0, 24]
    assert pairs == 3 * 40 * 40 + 6 * 16 * 40


def grouped(size: int = 3) -> list[Sample]:
    """Samples of a few prompts each, of which some go on alike and two are the same."""
    rng, made = random.Random(6), []
    for group in range(size):
        first = make_sample(rng, length=40, prompt=24)
        first = replace(first, group=f"train/{group}")
        made.append(first)
        for alike in (24, 30, 40):
            other = make_sample(rng, length=40, prompt=24)
            ids = first.token_ids[:alike] + other.token_ids[alike:]
            made.append(replace(other, group=first.group, token_ids=ids))
    return made


def gradients(policy: Path, samples: list[Sample]) -> tuple[list[float], dict[str, Any], int]:
    """Scores of all tokens, the gradient of their advantages' sum, and how many were computed."""
    model, seen = load_model(policy), []
    assert attention.enable(model) is None
    model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _out: seen.append(args[0].numel())
    )
    (batch,) = micro_batches(samples, 64, 8192, packing=True)
    logprobs, entropy = score_batch(model, batch)
    (logprobs * batch.advantages).sum().backward()
    places = {index: span for index, span in zip(batch.indices, batch.spans(), strict=True)}
    scores = [
        value
        for index in sorted(places)
        for tensor in (logprobs.detach(), entropy)
        for value in tensor[0, places[index][1] : places[index][2]].tolist()
    ]
    return scores, {n: p.grad for n, p in model.named_parameters()}, sum(seen)


def test_scores_and_gradients_are_those_of_samples_alone(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = grouped()
    scores, gradient, computed = gradients(policy, samples)
    monkeypatch.setattr(batching, "WORTH_SHARING", 1.0)
    plain, expected, all_tokens = gradients(policy, samples)
    monkeypatch.undo()
    assert all_tokens == 3 * 4 * 40 and computed == 3 * (40 + 16 + 10)
    assert scores == pytest.approx(plain, abs=1e-5)
    for name, value in gradient.items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name
    again = gradients(policy, samples)
    assert again[0] == scores
    assert all(torch.equal(value, again[1][name]) for name, value in gradient.items())


def test_other_temperatures_and_little_in_common_share_nothing() -> None:
    first = make_sample(random.Random(1), length=40)
    others = [(token + 1) % 100 for token in first.token_ids[7:]]
    little = replace(first, token_ids=first.token_ids[:7] + others)
    more = replace(first, token_ids=first.token_ids[:8] + others[1:])
    for other, shares in ((replace(first, temperature=0.5), False), (little, False), (more, True)):
        layout = pack([0, 1], [first, other]).layout
        assert layout is not None and (layout.own is not None) == shares
