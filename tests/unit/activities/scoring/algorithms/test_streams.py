"""Per-token streams: where credit puts tokens, and that they stay with them up to the trainer."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.activities.rollouts import groups
from ratchet.activities.scoring import filters
from ratchet.activities.scoring.algorithms import (
    Algorithm,
    Credit,
    CreditError,
    RolloutView,
    lay_out,
)
from ratchet.activities.scoring.algorithms.streams import routed
from ratchet.activities.storage.batch import Sample, decode_batch, encode_batch
from ratchet.activities.storage.columns import STREAMS
from ratchet.activities.training.batching import cut, member_counts, micro_batches
from ratchet.configs.filters import ZeroAdvantageConfig
from tests.groups import score_group

MASKS = [[False, True, True], [False, True]]
FILL = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}


def sample(mask: Sequence[bool], **changes: Any) -> dict[str, Any]:
    """A sample of a stored rollout, of tokens 0, 1, 2, …"""
    length = len(mask)
    return {
        "token_ids": list(range(length)),
        "loss_mask": list(mask),
        "logprobs": [-0.5 if on else 0.0 for on in mask],
        "versions": [3 if on else -1 for on in mask],
        **changes,
    }


def document(samples: Sequence[dict[str, Any]], reward: float = 1.0) -> dict[str, Any]:
    """A stored rollout."""
    return {
        "reward": reward,
        "error": None,
        "labels": [],
        "tokens": sum(len(s["token_ids"]) for s in samples),
        "sampled_tokens": sum(sum(s["loss_mask"]) for s in samples),
        "samples": list(samples),
        "messages": [],
        "rewards": {},
        "metrics": {},
        "truncated": False,
        "responded": True,
        "turns": 1,
        "timing": {},
        "stop": None,
        "temperature": 1.0,
    }


def work(size: int) -> GroupWork:
    return GroupWork("train/0", "train", "e", 0, size)


# -- routing --------------------------------------------------------------------------------


def rolled_out() -> RolloutView:
    return RolloutView(0, 1.0, 3, samples=[sample(mask) for mask in MASKS])


def test_routing_stamps() -> None:
    on = [[0.0, 1.0, 1.0], [0.0, 1.0]]
    observed = [[0.1, 0.0, 0.0], [0.0, 0.0]]
    assert routed("rl", rolled_out()) == Credit()
    assert routed("rl", rolled_out(), observed) == Credit(ce_weights=observed)
    assert routed("ce", rolled_out()) == Credit(rl=False, ce_weights=on)
    assert routed("ref_kl", rolled_out()) == Credit(rl=False, ref_kl_weights=on)
    merged = routed("ce", rolled_out(), observed)
    assert merged == Credit(rl=False, ce_weights=[[0.1, 1.0, 1.0], [0.0, 1.0]])
    both = routed("ref_kl", rolled_out(), observed)
    assert both == Credit(rl=False, ref_kl_weights=on, ce_weights=observed)


def test_credit_laid_out() -> None:
    first, second = lay_out(Credit(), MASKS)
    assert first == dict.fromkeys(STREAMS), "nobody said anything, so nothing is there"
    first, second = lay_out(routed("ce", rolled_out()), MASKS)
    assert first == {
        **dict.fromkeys(STREAMS),
        "rl_weights": [0.0] * 3,
        "ce_weights": [0.0, 1.0, 1.0],
    }
    assert second["advantages"] is None and second["rl_weights"] == [0.0, 0.0]
    kept = lay_out(Credit(0.5, rl=False, ce_weights=[[0.0] * 3, [0.0] * 2]), MASKS)
    assert [own["advantages"] for own in kept] == [[0.0, 0.5, 0.5], [0.0, 0.5]]


@pytest.mark.parametrize("streams", [[[0.0] * 3], [[0.0] * 3, [0.0] * 3]])
def test_streams_that_do_not_fit_are_a_bug(streams: list[list[float]]) -> None:
    with pytest.raises(AssertionError, match="ref_logprobs"):
        lay_out(Credit(ref_logprobs=streams), MASKS)


def test_zero_advantage_does_not_hit_rollouts_without_advantages() -> None:
    class Quiet(Algorithm):
        name = "quiet"

        async def score_rollout(self, rollout: RolloutView) -> Credit:
            return routed("ce", rollout) if rollout.index else Credit(0.0)

    def judge(samples: Sequence[Mapping[str, Any]], *, reward: float) -> filters.Verdict:
        return filters.judge([ZeroAdvantageConfig()], samples, None)

    rollouts: list[dict[str, Any] | None] = [document([sample(MASKS[0])]) for _ in range(2)]
    made = score_group(work(2), rollouts, 3, "", Quiet(), judge)
    assert [member["filtered"] for member in made["rollouts"]] == [True, False]
    assert [member["advantage"] for member in made["rollouts"]] == [0.0, None]
    (row,) = groups.batch_samples(made)
    assert row.advantages is None and row.ce_weights == [0.0, 1.0, 1.0]
    told = groups.result(made, ArtifactRef("k", "0" * 64, 1, "p"))
    assert told.advantage_range is None and told.survivors == 1
    assert [rollout.advantage for rollout in groups.batch_group(made).rollouts] == [0.0, None]


@pytest.mark.parametrize("rl", [None, True])
def test_a_member_of_rl_without_an_advantage_is_an_error(rl: bool | None) -> None:
    """0.0 in its place would train nothing, in silence."""

    class Forgetful(Algorithm):
        name = "forgetful"

        async def score_rollout(self, rollout: RolloutView) -> Credit:
            return Credit(rl=rl) if rollout.index else Credit(0.5)

    rollouts: list[dict[str, Any] | None] = [document([sample(MASKS[0])]) for _ in range(2)]
    with pytest.raises(CreditError) as caught:
        score_group(work(2), rollouts, 3, "", Forgetful())
    for named in ("'forgetful'", "train/0", "'e'", "rollout 1", "rl component", "rl=False"):
        assert named in str(caught.value)
    nothing: list[dict[str, Any] | None] = [document([sample([False, False])])] * 2
    assert score_group(work(2), nothing, 3, "", Forgetful())["rollouts"][1]["advantage"] is None


def test_an_advantage_may_come_after_the_filters() -> None:
    class Late(Algorithm):
        name = "late"

        async def score_survivors(self, rollouts: Sequence[RolloutView]) -> list[Credit]:
            return [Credit(0.25) for _ in rollouts]

    def judge(samples: Sequence[Mapping[str, Any]], *, reward: float) -> filters.Verdict:
        return filters.judge([ZeroAdvantageConfig()], samples, None, reward)

    made = score_group(work(1), [document([sample(MASKS[0])])], 3, "", Late(), judge)
    assert made["rollouts"][0]["advantage"] == 0.25, "none yet is not the same as 0"


# -- batch files ----------------------------------------------------------------------------


def row(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "group": "train/0",
        "rollout": 0,
        "env": "e",
        "reward": 0.25,
        "temperature": 1.0,
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "logprobs": [0.0, -0.5, -2.0],
        "advantages": [0.0, 0.5, 0.5],
        "versions": [-1, 0, 1],
    }
    return Sample(**{**values, **changes})


@pytest.mark.parametrize("name", ["logprobs", "versions", *STREAMS])
def test_every_list_of_a_sample_is_aligned(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        row(**{name: [0] * 2})


def test_what_may_be_absent_from_a_sample() -> None:
    off, on = [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    for bad in (None, on):
        with pytest.raises(ValueError, match=r"train/0/0 has tokens for the rl loss, but no adv"):
            row(advantages=None, rl_weights=bad)
    assert row(advantages=None, rl_weights=off, ce_weights=on).advantages is None
    assert row(advantages=None, rl_weights=[1.0, 0.0, 0.0]).rl_weights == [1.0, 0.0, 0.0]
    assert row(advantages=None, loss_mask=[False] * 3).rl_weights is None
    with pytest.raises(ValueError, match="ref_kl loss, but no ref_logprobs"):
        row(ref_kl_weights=on)
    assert row(ref_kl_weights=off).ref_logprobs is None


def test_a_batch_file_of_schema_1_is_read() -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(encode_batch([row()])))
    old = table.drop_columns([name for name in STREAMS if name != "advantages"])
    sink = io.BytesIO()
    pq.write_table(old.replace_schema_metadata({"ratchet.batch.schema": "1"}), sink)
    assert decode_batch(sink.getvalue()) == [row()]


# -- from credit to micro-batches -----------------------------------------------------------


class Drawn(Algorithm):
    """Gives each rollout the credit that it was made with."""

    name = "drawn"

    def __init__(self, credit: Sequence[Credit]) -> None:
        self._credit = credit

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        return [
            replace(given, ref_logprobs=None)
            for given in (self._credit[rollout.index] for rollout in rollouts)
        ]

    async def score_survivors(self, rollouts: Sequence[RolloutView]) -> list[Credit]:
        return [
            Credit(ref_logprobs=self._credit[rollout.index].ref_logprobs) for rollout in rollouts
        ]


NUMBERS = st.one_of(st.just(0.0), st.floats(-4, 4, width=32, allow_subnormal=False))


@st.composite
def drawn_rollouts(draw: st.DrawFn) -> tuple[list[list[list[bool]]], list[Credit]]:
    """Masks of the samples of rollouts, and credit of any shape for them."""
    masks = draw(
        st.lists(
            st.lists(
                st.lists(st.booleans(), min_size=1, max_size=12).map(lambda m: [*m, True]),
                min_size=1,
                max_size=3,
            ),
            min_size=1,
            max_size=4,
        )
    )

    def streams(own: list[list[bool]]) -> list[list[float]]:
        return [draw(st.lists(NUMBERS, min_size=len(m), max_size=len(m))) for m in own]

    credit = []
    for own in masks:
        sampled = sum(map(sum, own))
        ref_kl = draw(st.booleans())
        rl = draw(st.sampled_from([None, True, False]))
        given_ = st.one_of(NUMBERS, st.lists(NUMBERS, min_size=sampled, max_size=sampled))
        credit.append(
            Credit(
                advantage=draw(st.one_of(st.none(), given_) if rl is False else given_),
                rl=rl,
                ce_weights=streams(own) if draw(st.booleans()) else None,
                ref_kl_weights=streams(own) if ref_kl else None,
                ref_logprobs=streams(own) if ref_kl else None,
            )
        )
    return masks, credit


@settings(max_examples=60, deadline=None)
@given(drawn_rollouts(), st.integers(2, 14), st.booleans())
def test_streams_stay_with_their_tokens(
    drawn: tuple[list[list[list[bool]]], list[Credit]], seq_len: int, packing: bool
) -> None:
    """Through the group document, the batch file, the cut and the micro-batch."""
    masks, credit = drawn
    rollouts: list[dict[str, Any] | None] = [
        document([sample(mask) for mask in own]) for own in masks
    ]
    made = score_group(work(len(masks)), rollouts, 3, "", Drawn(credit))
    rows = decode_batch(encode_batch(groups.batch_samples(json.loads(json.dumps(made)))))
    flat = [
        (laid, mask)
        for own, given_ in zip(masks, credit, strict=True)
        for laid, mask in zip(lay_out(given_, own), own, strict=True)
    ]
    assert [{name: getattr(row_, name) for name in STREAMS} for row_ in rows] == [
        laid for laid, _ in flat
    ]
    batches = list(micro_batches(rows, seq_len, 32, packing=packing))
    seen = []
    for batch in batches:
        for index, (at, start, stop) in zip(batch.indices, batch.spans(), strict=True):
            seen.append(index)
            laid, mask = flat[index]
            assert stop - start == min(seq_len, len(mask))
            assert batch.loss_mask[at, start:stop].tolist() == mask[:seq_len]
            expected = {"advantages": laid["advantages"] or [0.0] * len(mask)}
            for name, fill in FILL.items():
                if getattr(batch, name) is None:
                    assert laid[name] is None
                else:
                    expected[name] = laid[name] or [fill] * len(mask)
            for name, values in expected.items():
                assert getattr(batch, name)[at, start:stop].tolist() == values[:seq_len]
    assert sorted(seen) == list(range(len(flat)))
    counts = member_counts(rows, seq_len)
    cuts = [cut(row_, seq_len) for row_ in rows]
    assert counts.rl == sum(sum(c.loss_mask) for c in cuts if c.rl_weights is None)
    assert counts.ce == sum(sum(w != 0 for w in c.ce_weights or ()) for c in cuts)
    assert counts.ref_kl == sum(sum(w != 0 for w in c.ref_kl_weights or ()) for c in cuts)
    for batch in batches:
        padding = torch.ones_like(batch.loss_mask)
        for at, start, stop in batch.spans():
            padding[at, start:stop] = False
        for name in ("ce_weights", "ref_kl_weights"):
            tensor = getattr(batch, name)
            assert tensor is None or not tensor[padding].any()
