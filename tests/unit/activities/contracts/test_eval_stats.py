"""pass@k, confidence intervals and paired comparisons against golden numbers."""

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.eval_stats import (
    Estimate,
    compare,
    estimate,
    pass_at_k,
    scores,
    solved_or_not,
    student_t,
)

REWARDS = st.dictionaries(
    st.integers(0, 40),
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 0.375), (2, 0.6428571429), (4, 0.9285714286), (8, 1.0)]
)
def test_pass_at_k_golden(k: int, expected: float) -> None:
    """n = 8 attempts, c = 3 correct."""
    assert pass_at_k(8, 3, k) == pytest.approx(expected)


@given(st.integers(1, 30), st.data())
def test_pass_at_k_grows_with_k(attempts: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, attempts))
    rates = [pass_at_k(attempts, correct, k) for k in range(1, attempts + 1)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(correct / attempts)
    assert rates[-1] == float(correct > 0)


@pytest.mark.parametrize(("correct", "k"), [(3, 1), (1, 3), (-1, 1), (1, 0)])
def test_pass_at_k_refuses_nonsense(correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="undefined"):
        pass_at_k(2, correct, k)


@pytest.mark.parametrize(
    ("freedom", "expected"), [(4, 2.77645), (9, 2.26216), (29, 2.04523), (1000, 1.96234)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_t(freedom) == pytest.approx(expected, abs=2e-3)


def test_an_interval_by_hand() -> None:
    """Of values 0.1 to 0.5: mean 0.3, deviation 0.158114, t(4) = 2.776."""
    found = estimate([[0.1], [0.2], [0.3], [0.4], [0.5]])
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - 2.776 * 0.158114 / math.sqrt(5), abs=1e-3)
    assert found.high == pytest.approx(0.3 + 2.776 * 0.158114 / math.sqrt(5), abs=1e-3)


def test_rollouts_of_one_example_are_no_further_examples() -> None:
    """Four rollouts of each that say the same tell no more than one of each."""
    once = [[0.0], [1.0], [1.0], [0.0], [1.0], [1.0]]
    four = [cluster * 4 for cluster in once]
    one, all_of_them = estimate(once), estimate(four)
    assert one.low is not None and one.low == pytest.approx(all_of_them.low)
    split = estimate([[value] for cluster in four for value in cluster])
    assert split.low is not None and split.low > one.low, "as if they were independent"


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=30))
def test_of_clusters_of_one_it_is_the_t_interval(values: list[float]) -> None:
    found = estimate([[value] for value in values], bounded=False)
    if found.low is None or found.high is None:
        assert max(values) == pytest.approx(min(values))
        return
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    assert found.mean == pytest.approx(fmean(values), abs=1e-9)
    assert (found.high - found.low) / 2 == pytest.approx(half, abs=1e-9)


def test_an_interval_of_shares_stays_among_them() -> None:
    found = estimate([[1.0]] * 9 + [[0.0]])
    assert found.high == 1.0 and found.low is not None and found.low > 0.0
    free = estimate([[1.0]] * 9 + [[0.0]], bounded=False)
    assert free.high is not None and free.high > 1.0
    above = estimate([[2.0]] * 9 + [[0.0]])
    assert above.high is not None and above.high > 2.0, "rewards that are no shares"


@pytest.mark.parametrize("clusters", [[[1.0], [0.0], [1.0], [0.0]], [[0.5]] * 50, [[0.25]]])
def test_of_few_examples_or_ones_all_alike_no_interval_is_known(
    clusters: list[list[float]],
) -> None:
    found = estimate(clusters)
    assert (found.low, found.high) == (None, None)
    assert found.mean == pytest.approx(fmean(value for each in clusters for value in each))


def test_scores_of_examples() -> None:
    rewards = {0: [1.0, 0.0], 1: [], 2: [0.0], 3: [1.0, 1.0]}
    assert scores(rewards, None) == {0: [1.0, 0.0], 2: [0.0], 3: [1.0, 1.0]}
    assert scores(rewards, 1) == {0: [0.5], 2: [0.0], 3: [1.0]}
    assert scores(rewards, 2) == {0: [1.0], 3: [1.0]}, "2 has too few"
    assert solved_or_not(rewards) and not solved_or_not({0: [0.5]})


def test_a_comparison_by_hand() -> None:
    first = {0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0], 3: [0.0], 4: [1.0], 9: [1.0]}
    second = {0: [1.0, 1.0], 1: [1.0, 1.0], 2: [0.0], 3: [0.0], 4: [1.0], 8: [0.0]}
    pair = compare(first, second, None)
    assert pair is not None
    assert (pair.wins, pair.losses, pair.ties) == (2, 1, 2), "8 and 9 are in one alone"
    assert pair.differ == [(0, 0.0, 1.0), (2, 1.0, 0.0), (1, 0.5, 1.0)]
    assert pair.difference.mean == pytest.approx((1 + 0.5 - 1) / 5)
    assert pair.difference.low is not None and pair.difference.low < 0
    by_pass = compare(first, second, 2)
    assert by_pass is not None and by_pass.difference == Estimate(0.5), "two have two attempts"
    assert compare({0: [1.0]}, {1: [1.0]}, None) is None


@given(REWARDS, REWARDS)
def test_the_other_way_round_it_is_the_opposite(
    first: dict[int, list[float]], second: dict[int, list[float]]
) -> None:
    one, other = compare(first, second, None), compare(second, first, None)
    if one is None or other is None:
        assert one is other and not first.keys() & second.keys()
        return
    assert (one.wins, one.losses, one.ties) == (other.losses, other.wins, other.ties)
    assert one.difference.mean == pytest.approx(-other.difference.mean)
    assert (one.difference.low is None) == (other.difference.high is None)
    if one.difference.low is not None and other.difference.high is not None:
        assert one.difference.low == pytest.approx(-other.difference.high)


@given(REWARDS)
def test_a_model_ties_with_itself(rewards: dict[int, list[float]]) -> None:
    pair = compare(rewards, rewards, None)
    assert pair is not None
    assert (pair.wins, pair.losses, pair.differ) == (0, 0, []) and pair.difference.mean == 0.0
    assert pair.difference.low is None, "nothing is known of what never differs"
