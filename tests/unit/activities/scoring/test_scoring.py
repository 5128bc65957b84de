"""Metrics of evals and batches against golden numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.rollouts import FilterTally
from ratchet.activities.scoring import batches, evals
from ratchet.activities.scoring.batches import BatchGroup, BatchRollout
from ratchet.activities.scoring.evals import EvalRollout
from ratchet.activities.scoring.filters import Verdict


def _rollout(example: str, reward: float, tokens: int = 4) -> EvalRollout:
    return EvalRollout(example, reward, tokens, turns=1, truncated=False, responded=tokens > 0)


def test_eval_summary() -> None:
    rollouts = [_rollout("a", 1.0), _rollout("a", 0.0), _rollout("b", 1.0, 8)]
    metrics = evals.summarize(rollouts, errored=1, cancelled=4, group_size=2)
    assert metrics["avg@2"] == pytest.approx(2 / 3)
    assert metrics["pass@1"] == pytest.approx(0.75)
    assert metrics["pass@2"] == 1.0, "only example a has two valid attempts"
    assert (metrics["completion_len/min"], metrics["completion_len/max"]) == (4, 8)
    assert (metrics["errored_count"], metrics["cancelled_count"]) == (1, 4)
    assert metrics["valid_rate"] == 3 / 8
    graded = evals.summarize([_rollout("a", 0.5, 0)], 0, 0, 1)
    assert not any(name.startswith("pass@") for name in graded)
    assert graded["no_response/mean"] == 1.0
    assert evals.summarize([], 3, 1, 2) == {
        "valid_count": 0.0,
        "errored_count": 3.0,
        "cancelled_count": 1.0,
        "valid_rate": 0.0,
    }


def test_an_eval_of_enough_examples_has_intervals() -> None:
    rollouts = [
        _rollout(str(n), reward) for n in range(8) for reward in (float(n % 2), float(n > 5))
    ]
    metrics = evals.summarize(rollouts, 0, 0, 2)
    for name in ("avg@2", "pass@1", "pass@2"):
        assert 0 <= metrics[f"{name}/low"] < metrics[name] < metrics[f"{name}/high"] <= 1
    assert metrics["avg@2/low"] == pytest.approx(metrics["pass@1/low"]), "the same, by example"
    few = evals.summarize(rollouts[:8], 0, 0, 2)
    assert "avg@2" in few and not any(name.endswith(("/low", "/high")) for name in few)


def _member(reward: float, advantage: float | None, seq_len: int = 10) -> BatchRollout:
    return BatchRollout(reward, seq_len, 4, 1, False, 1, advantage, versions=(3, 4))


def test_batch_summary_is_of_group_means() -> None:
    groups = [
        BatchGroup("a", 2, 0, 3, [_member(1.0, 0.5), _member(0.0, -0.5)]),
        BatchGroup("a", 2, 0, 4, [_member(1.0, 0.0, 20), _member(1.0, 0.0, 20)]),
        BatchGroup("b", 2, 1, 4, [_member(0.0, 0.0)]),
    ]
    metrics = batches.summarize(groups, step=6)
    assert metrics["reward/all/mean"] == pytest.approx(0.5)
    assert metrics["reward/a/mean"] == pytest.approx(0.75)
    assert (metrics["seq_len/a/min"], metrics["seq_len/a/max"]) == (10, 20)
    assert metrics["solve_none/all"] == pytest.approx(1 / 3)
    assert metrics["solve_all/all"] == pytest.approx(1 / 3)
    assert metrics["effective_batch_size/all"] == pytest.approx(1 / 3)
    assert metrics["errored/all/mean"] == pytest.approx(1 / 6)
    assert metrics["zero_advantage/all"] == pytest.approx(3 / 5)
    assert metrics["staleness/mean"] == pytest.approx(4 / 3)
    assert metrics["staleness/max"] == 2
    assert metrics["batch/a"] == pytest.approx(2 / 3)


def test_groups_that_the_policy_did_not_play_have_no_age() -> None:
    played = BatchGroup("a", 1, 0, 3, [_member(1.0, None)])
    frozen = BatchGroup("b", 1, 0, 9, [replace(_member(1.0, None), versions=None)])
    metrics = batches.summarize([played, frozen], step=6)
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2
    assert not any(key.startswith("staleness") for key in batches.summarize([frozen], step=6))


def test_rollouts_without_advantages_are_not_of_zero_advantage() -> None:
    members = [_member(1.0, None), _member(1.0, 0.0), _member(0.0, None), _member(0.0, 0.5)]
    metrics = batches.summarize([BatchGroup("a", 4, 0, 3, members)], step=4)
    assert metrics["zero_advantage/a"] == metrics["zero_advantage/all"] == 0.25


@pytest.mark.parametrize(
    ("step", "first", "last", "expected"),
    [
        (6, 3, 3, (0, 2)),
        (6, 3, 4, (1, 1)),
        (6, 3, 5, (2, 0)),
        (6, 3, 9, (2, 0)),
        (6, 5, 5, (0, 0)),
        (1, 0, 0, (0, 0)),
        (3, 7, 8, (0, 0)),
    ],
)
def test_off_policy_golden(step: int, first: int, last: int, expected: tuple[int, int]) -> None:
    assert batches.off_policy(step, first, last) == expected


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_off_policy_parts_add_up(step: int, first: int, span: int) -> None:
    in_flight, in_queue = batches.off_policy(step, first, first + span)
    assert in_flight >= 0 and in_queue >= 0
    assert in_flight + in_queue == max(0, step - 1 - first)


REMOVED = Verdict(("zero_advantage",), removed=True)
SEEN = Verdict(("gibberish",), removed=False)


def test_batch_metric_families() -> None:
    groups = [
        BatchGroup(
            "a",
            3,
            0,
            3,
            [
                replace(_member(1.0, 0.5), versions=(3, 4), stop="agent_completed"),
                replace(_member(0.0, 0.0), versions=(4, 4), post_batch=REMOVED),
                replace(_member(0.0, 0.0), versions=(0, 5), pre_batch=REMOVED),
            ],
        ),
        BatchGroup(
            "b",
            2,
            1,
            5,
            [
                replace(
                    _member(0.5, 0.5),
                    versions=(5, 5),
                    stop="max_turns",
                    truncated=True,
                    timing={"model": 3.0, "total": 5.0},
                    metrics={"lcs": 0.25},
                    pre_batch=SEEN,
                )
            ],
        ),
    ]
    metrics = batches.summarize(
        groups,
        step=6,
        pre_batch=["gibberish", "zero_advantage"],
        post_batch=["gibberish", "zero_advantage"],
        barren=FilterTally(4, 4, {"zero_advantage": 4}),
    )
    expected = {
        "off_policy/mean": (2 + 1 + 0) / 3,
        "off_policy/max": 2,
        "off_policy/in_flight/mean": 1 / 3,
        "off_policy/in_flight/max": 1,
        "off_policy/in_queue/mean": 2 / 3,
        "off_policy/in_queue/max": 1,
        "filters/all/is_filtered": 1 / 3,
        "filters/a/is_filtered": 1 / 2,
        "filters/a/zero_advantage": 1 / 2,
        "filters/b/zero_advantage": 0,
        "filters/all/gibberish": 0,
        "pre_filters/all/dropped_rate": 5 / 8,
        "pre_filters/all/gibberish/rate": 1 / 8,
        "pre_filters/all/zero_advantage/rate": 5 / 8,
        "stop_condition/all/agent_completed": 1 / 4,
        "stop_condition/all/none": 1 / 2,
        "stop_condition/b/max_turns": 1,
        "stop_condition/b/generation_truncated": 1,
        "stop_condition/all/generation_truncated": 1 / 4,
        "timing/all/model/mean": 3,
        "timing/b/total/max": 5,
        "metrics/b/lcs": 0.25,
        "prefill_len/all/mean": 6,
        "batch/trainable": 2 / 3,
        "batch/empty": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in metrics if name.startswith(("timing/a/", "metrics/a/"))]


def test_a_prompt_that_is_too_long_is_no_truncated_generation() -> None:
    long = replace(_member(0.0, 0.0), truncated=True, stop=batches.PROMPT_TOO_LONG)
    metrics = batches.summarize([BatchGroup("a", 2, 0, 0, [long, long])], step=1)
    assert metrics["is_truncated/all/mean"] == 1.0
    assert metrics["stop_condition/all/generation_truncated"] == 0.0


def test_tallies_add_up() -> None:
    both = FilterTally(2, 1, {"a": 1}).plus(FilterTally(3, 2, {"a": 1, "b": 2}))
    assert both == FilterTally(5, 3, {"a": 2, "b": 2})
    assert both.plus(FilterTally()) == FilterTally().plus(both) == both
