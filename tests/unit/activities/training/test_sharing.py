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
from ratchet.activities.training import attention
from ratchet.activities.training.batching import WORTH_SHARING, micro_batches, pack
from ratchet.activities.training.model import load_model, score_batch
from tests.unit.activities.training.conftest import make_sample

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(LENGTHS)
def test_every_place_of_a_row_has_its_token(drawn: list[tuple[int, int]]) -> None:
    lengths = [length for length, _ in drawn]
    shares = [(0, min(s, n, lengths[0]) if place else 0) for place, (n, s) in enumerate(drawn)]
    made = attention.layout(lengths, shares)
    own = sum(length - shared for length, (_, shared) in zip(lengths, shares, strict=True))
    joined = torch.cat([group.flatten() for group in made.groups])
    assert torch.equal(joined[made.back], torch.arange(own))
    if own == sum(lengths):
        assert made.own is made.of is made.before is None
        return
    assert made.own is not None and made.of is not None and made.before is not None
    assert torch.equal(made.of[made.own], torch.arange(own))
    # A token carries its own name, or that of the one that the first sequence shares with it.
    names = [
        (0 if k < shared else place, k)
        for place, (length, (_, shared)) in enumerate(zip(lengths, shares, strict=True))
        for k in range(length)
    ]
    kept = [names[place] for place in made.own.tolist()]
    assert [kept[place] for place in made.of.tolist()] == names
    rows = [row for group in made.groups for row in group.tolist()]
    order = [place for chosen in attention._alike(lengths) for place in chosen]
    for place, row in zip(order, rows, strict=True):
        start = sum(lengths[:place])
        assert [kept[k] for k in row[: lengths[place]]] == names[start : start + lengths[place]]
    for (sequence, k), token in zip(kept, made.before.tolist(), strict=True):
        assert k == 0 or kept[token] in ((sequence, k - 1), (0, k - 1))


def grouped(size: int = 3) -> list[Sample]:
    """Groups of samples with one prompt each, of which some go on alike and two are the same."""
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


def test_scores_and_gradients_are_those_of_samples_alone(policy: Path) -> None:
    samples = grouped()
    alone = [replace(s, group=f"train/{place}") for place, s in enumerate(samples)]
    scores, gradient, computed = gradients(policy, samples)
    plain, expected, all_tokens = gradients(policy, alone)
    assert all_tokens == 3 * 4 * 40 and computed == 3 * (40 + 16 + 10 + 0)
    assert scores == pytest.approx(plain, abs=1e-5)
    for name, value in gradient.items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name
    again = gradients(policy, samples)
    assert again[0] == scores
    assert all(torch.equal(value, again[1][name]) for name, value in gradient.items())


def test_other_groups_temperatures_and_short_beginnings_share_nothing() -> None:
    first = replace(make_sample(random.Random(1), length=40), group="train/1")
    few = WORTH_SHARING - 1
    others = [(token + 1) % 100 for token in first.token_ids[few:]]
    short = replace(first, token_ids=first.token_ids[:few] + others)
    for other in (replace(first, group="train/2"), replace(first, temperature=0.5), short):
        layout = pack([0, 1], [first, other]).layout
        assert layout is not None and layout.own is None
