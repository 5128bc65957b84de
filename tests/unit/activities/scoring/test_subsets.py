"""Metrics over single rollouts: golden numbers, and how the subsets relate."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.episode import WireEpisode

from ratchet.activities.envs.samples import Reading, from_episode, to_document
from ratchet.activities.rollouts import groups as documents
from ratchet.activities.scoring import batches, subsets
from ratchet.activities.scoring.batches import BatchGroup, BatchRollout
from ratchet.activities.scoring.filters import Verdict

REMOVED = Verdict(("zero_advantage",), removed=True)


def _member(reward: float, seq_len: int = 10) -> BatchRollout:
    return BatchRollout(reward, seq_len, 4, 1, False, 1, advantage=0.5)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.1, 7.0),
        ([0.0, 1.0], 0.1, 0.1),
        ([4.0, 1.0, 3.0, 2.0, 0.0], 0.1, 0.4),
        ([4.0, 1.0, 3.0, 2.0, 0.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0, 0.0], 0.9, 3.6),
        ([5.0, 5.0, 1.0], 1.0, 5.0),
    ],
)
def test_quantile_golden(values: list[float], share: float, expected: float) -> None:
    assert subsets.quantile(values, share) == pytest.approx(expected)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_lie_between_the_extremes_and_rise(
    values: list[float], one: float, other: float
) -> None:
    low, high = (subsets.quantile(values, share) for share in sorted((one, other)))
    assert min(values) <= low <= max(values)
    assert low <= high or low == pytest.approx(high)


def test_subsets_golden() -> None:
    groups = [
        # Solved by all: nothing of it trains.
        BatchGroup("a", 2, 0, 0, [replace(_member(1.0), post_batch=REMOVED)] * 2),
        BatchGroup(
            "a",
            4,
            1,
            0,
            [
                replace(_member(0.0, 20), truncated=True, stop="max_turns", turns=3),
                replace(_member(0.5, 30), stop="agent_completed", timing={"total": 2.0}),
                replace(_member(0.25), pre_batch=REMOVED),
            ],
        ),
        BatchGroup("b", 1, 0, 0, [replace(_member(0.0), samples=2, timing={"total": 4.0})]),
        BatchGroup("b", 2, 2, 0, []),
    ]
    metrics = subsets.summarize(groups)
    expected = {
        # Rewards 1, 1, 0, 0.5, 0.25, 0 in 'all'; 0, 0.5, 0 in 'effective'.
        "train/agg/all/reward/mean": 2.75 / 6,
        "train/agg/all/reward/max": 1.0,
        "train/agg/all/reward/p10": 0.0,
        "train/agg/all/reward/p90": 1.0,
        "train/agg/effective/reward/mean": 0.5 / 3,
        "train/agg/effective/reward/p90": 0.4,
        "train/a/all/reward/min": 0.0,
        "train/a/effective/reward/mean": 0.25,
        "train/b/effective/reward/mean": 0.0,
        "train/a/effective/seq_len/p10": 21.0,
        "train/a/effective/prefill_len/max": 26.0,
        "train/a/effective/decode_len/mean": 4.0,
        "train/a/effective/num_turns/mean": 2.0,
        "train/a/effective/is_truncated/mean": 0.5,
        "train/b/all/samples_per_rollout/max": 2.0,
        "train/agg/all/timing/total/mean": 3.0,
        "train/agg/all/timing/total/p90": 3.8,
        "train/a/all/timing/total/max": 2.0,
        "train/a/all/stop_condition/max_turns": 1 / 5,
        "train/a/effective/stop_condition/max_turns": 1 / 2,
        "train/a/effective/stop_condition/generation_truncated": 1 / 2,
        "train/agg/all/solve_none": 1 / 3,
        "train/agg/all/solve_all": 1 / 3,
        "train/agg/all/effective_batch_size": 1 / 3,
        "train/agg/effective/solve_none": 1 / 2,
        "train/agg/effective/solve_all": 0.0,
        "train/a/effective/effective_batch_size": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_nothing_is_said_of_a_subset_without_rollouts() -> None:
    removed = replace(_member(1.0), post_batch=REMOVED)
    metrics = subsets.summarize([BatchGroup("a", 1, 0, 0, [removed]), BatchGroup("b", 1, 1, 0, [])])
    assert {name.split("/")[1] + "/" + name.split("/")[2] for name in metrics} == {
        "agg/all",
        "a/all",
    }
    assert subsets.summarize([BatchGroup("b", 1, 1, 0, [])]) == {}


_MEMBERS = st.builds(
    lambda reward, seq_len, pre, post: replace(
        _member(reward, seq_len), pre_batch=Verdict((), pre), post_batch=Verdict((), post)
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(4, 40),
    st.booleans(),
    st.booleans(),
)
_GROUPS = st.builds(
    lambda env, members, errored: BatchGroup(env, len(members) + errored, errored, 0, members),
    st.sampled_from(["a", "b"]),
    st.lists(_MEMBERS, max_size=4),
    st.integers(1, 2),
)


@given(st.lists(_GROUPS, min_size=1, max_size=5))
def test_subsets_agree_with_what_ships_and_with_each_other(groups: list[BatchGroup]) -> None:
    metrics = subsets.summarize(groups)
    whole = batches.summarize(groups, step=1)
    shipped = [r for group in groups for r in group.rollouts if r.shipped]
    if shipped:
        mean = fmean(rollout.reward for rollout in shipped)
        assert metrics["train/agg/effective/reward/mean"] == pytest.approx(mean)
        alone = [replace(g, rollouts=[r for r in g.rollouts if r.shipped]) for g in groups]
        again = subsets.summarize(alone)
        for name, value in metrics.items():
            # Groups are judged whole; all else is as if what does not train were not there.
            if "/effective/" in name and not name.endswith(
                ("solve_none", "solve_all", "effective_batch_size")
            ):
                assert again[name] == pytest.approx(value)
    else:
        assert not [name for name in metrics if "/effective/" in name]
    for rate in ("solve_none", "solve_all", "effective_batch_size"):
        assert metrics.get(f"train/agg/all/{rate}") == whole.get(f"{rate}/all")
    if sum(bool(group.rollouts) for group in groups) == 1:
        assert metrics["train/agg/all/reward/mean"] == pytest.approx(whole["reward/all/mean"])


# -- time -----------------------------------------------------------------------------------


def test_overhead_is_what_no_phase_took() -> None:
    timing = {"start": 100.0, "setup": 1.0, "generation": 6.0, "model": 4.0, "scoring": 0.5}
    found = documents._timing({"timing": {**timing, "end": 109.0}})
    phases = {"setup": 1.0, "generation": 6.0, "model": 4.0, "scoring": 0.5}
    assert found == {**phases, "env": 2.0, "total": 9.0, "overhead": 1.5}
    assert documents._timing({"timing": timing}) == {**phases, "env": 2.0, "total": 7.5}
    hasty = documents._timing({"timing": {**timing, "end": 100.0}})
    assert (hasty["total"], hasty["overhead"]) == (7.5, 0.0)
    assert documents._timing({}) == {}


def test_a_rollout_ends_with_its_last_phase() -> None:
    task = {"type": "T", "data": {"idx": 0, "prompt": "p"}}
    spans = {"boot": (10.5, 11.0), "agent": (11.0, 14.0), "finalize": (14.5, 15.5)}
    timing = {"start": 10.0} | {
        phase: {"start": start, "end": end} for phase, (start, end) in spans.items()
    }
    trace = {"task": task, "agent": {"config": {}}, "timing": timing}
    episode = WireEpisode.model_validate({"task": task, "traces": [trace]})
    record = to_document(from_episode(episode, Reading()))
    assert (record["timing"]["start"], record["timing"]["end"]) == (10.0, 15.5)
    assert documents._timing(record) == {
        "setup": 0.0,
        "generation": 3.0,
        "model": 0.0,
        "scoring": 0.0,
        "env": 3.0,
        "total": 5.5,
        "overhead": 2.5,
    }
