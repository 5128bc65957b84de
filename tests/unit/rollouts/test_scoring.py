"""Advantages, pass@k and metrics against golden numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.scoring import batches, evals, grpo
from activities.scoring.batches import BatchGroup, BatchRollout
from activities.scoring.evals import EvalRollout


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 1.0], [0.0, 0.0]),
        ([0.2, 0.6, 0.7], [-0.3, 0.1, 0.2]),
        ([], []),
    ],
)
def test_grpo_golden(rewards: list[float], expected: list[float]) -> None:
    assert grpo.advantages(rewards) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=64), st.floats(-5, 5))
def test_grpo_sums_to_zero_and_ignores_an_offset(rewards: list[float], offset: float) -> None:
    found = grpo.advantages(rewards)
    assert math.fsum(found) == pytest.approx(0, abs=1e-9)
    assert grpo.advantages([r + offset for r in rewards]) == pytest.approx(found, abs=1e-9)


def test_broadcast_leaves_the_rest_alone() -> None:
    assert grpo.broadcast(0.5, [False, True, True, False]) == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 0.375), (2, 0.6428571429), (4, 0.9285714286), (8, 1.0)]
)
def test_pass_at_k_golden(k: int, expected: float) -> None:
    """n = 8 attempts, c = 3 correct."""
    assert evals.pass_at_k(8, 3, k) == pytest.approx(expected)


@given(st.integers(1, 30), st.data())
def test_pass_at_k_grows_with_k(attempts: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, attempts))
    rates = [evals.pass_at_k(attempts, correct, k) for k in range(1, attempts + 1)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(correct / attempts)
    assert rates[-1] == float(correct > 0)


def test_pass_at_k_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="undefined"):
        evals.pass_at_k(2, 3, 1)


def _rollout(example: str, reward: float, tokens: int = 4) -> EvalRollout:
    return EvalRollout(example, reward, tokens, turns=1, truncated=False, responded=tokens > 0)


def test_eval_summary() -> None:
    rollouts = [_rollout("a", 1.0), _rollout("a", 0.0), _rollout("b", 1.0, 8)]
    metrics = evals.summarize(rollouts, errored=1, group_size=2)
    assert metrics["avg@2"] == pytest.approx(2 / 3)
    assert metrics["pass@1"] == pytest.approx(0.75)
    assert metrics["pass@2"] == 1.0, "only example a has two valid attempts"
    assert (metrics["completion_len/min"], metrics["completion_len/max"]) == (4, 8)
    assert metrics["errored_count"] == 1
    graded = evals.summarize([_rollout("a", 0.5, 0)], 0, 1)
    assert not any(name.startswith("pass@") for name in graded)
    assert graded["no_response/mean"] == 1.0
    assert evals.summarize([], 4, 2) == {"valid_count": 0.0, "errored_count": 4.0}


def _member(reward: float, advantage: float, seq_len: int = 10) -> BatchRollout:
    return BatchRollout(reward, seq_len, 4, 1, False, 1, advantage)


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
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(4 / 3), 2)
    assert metrics["batch/a"] == pytest.approx(2 / 3)
