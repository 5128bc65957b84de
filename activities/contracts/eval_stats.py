"""How sure an eval's numbers are: pass@k, confidence intervals, two models on the same examples.

Pure. The rollouts of one example are not independent of each other, so examples are what counts:
standard errors are clustered by example, and two models are compared by their differences on each
example (Miller, "Adding Error Bars to Evals", arXiv:2411.00640). Intervals hold 95 % and take
Student's t for the number of examples. Where all examples say the same, or there are fewer than
FEWEST, nothing is known of the spread and there is no interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
FEWEST = 5
"""Examples below which a spread says nothing."""

Rewards = Mapping[int, Sequence[float]]
"""The rewards of an eval's valid rollouts, by example."""


@dataclass(frozen=True)
class Estimate:
    """A mean over examples and the bounds of its interval; None for both: not known."""

    mean: float
    low: float | None = None
    high: float | None = None


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Chance that one of k attempts drawn from `attempts` is among the `correct` ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Codex (arXiv:2107.03374, section 2.1).
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= attempts and 1 <= k <= attempts):
        raise ValueError(f"pass@{k} of {correct} correct in {attempts} attempts is undefined")
    return 1.0 - math.comb(attempts - correct, k) / math.comb(attempts, k)


def student_t(freedom: int) -> float:
    """The two-sided quantile of Student's t at CONFIDENCE, for `freedom` degrees, 4 or more: within
    0.002 (Cornish and Fisher's expansion; Abramowitz and Stegun 26.7.5).
    """
    assert freedom >= FEWEST - 1
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def estimate(clusters: Sequence[Sequence[float]], *, bounded: bool = True) -> Estimate:
    """The mean of all values, at least one, with the interval that clusters of them leave. If
    `bounded` it stays within 0 and 1 where all values do.

    Standard error: the root of the summed squares of each cluster's summed deviations, over the
    number of values, times the root of n / (n - 1) for n clusters.
    """
    values = [value for cluster in clusters for value in cluster]
    mean, n = fmean(values), sum(map(bool, clusters))
    deviations = [math.fsum(value - mean for value in cluster) for cluster in clusters]
    spread = math.fsum(deviation**2 for deviation in deviations)
    if n < FEWEST or math.isclose(min(values), max(values)):
        return Estimate(mean)
    half = student_t(n - 1) * math.sqrt(spread * n / (n - 1)) / len(values)
    low, high = mean - half, mean + half
    if bounded and min(values) >= 0 and max(values) <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high)


def solved_or_not(rewards: Rewards) -> bool:
    """Whether every reward is 0 or 1, without which there is no pass@k."""
    return all(reward in (0.0, 1.0) for each in rewards.values() for reward in each)


def scores(rewards: Rewards, k: int | None) -> dict[int, list[float]]:
    """What each example counts for: its rewards, or with a `k` its pass@k. Examples without a
    reward, or with fewer than `k`, count for nothing.
    """
    if k is None:
        return {example: [*each] for example, each in rewards.items() if each}
    return {
        example: [pass_at_k(len(each), sum(reward == 1.0 for reward in each), k)]
        for example, each in rewards.items()
        if len(each) >= k
    }


@dataclass(frozen=True)
class Pair:
    """One model against another on the examples that both have: `difference` is the second one's
    score less the first one's. `wins` of the second, `losses` and `ties` count examples; `differ`
    are those that are no ties, the largest difference first, with the score of each.
    """

    difference: Estimate
    wins: int
    losses: int
    ties: int
    differ: list[tuple[int, float, float]]


def compare(first: Rewards, second: Rewards, k: int | None) -> Pair | None:
    """The pair of two evals of the same examples; None if they have none in common."""
    one, other = scores(first, k), scores(second, k)
    both = [(e, fmean(one[e]), fmean(other[e])) for e in sorted(one.keys() & other.keys())]
    if not both:
        return None
    differ = [(e, a, b) for e, a, b in both if not math.isclose(a, b, abs_tol=1e-12)]
    wins = sum(b > a for _, a, b in differ)
    return Pair(
        estimate([[b - a] for _, a, b in both], bounded=False),
        wins=wins,
        losses=len(differ) - wins,
        ties=len(both) - len(differ),
        differ=sorted(differ, key=lambda it: (-abs(it[2] - it[1]), it[0])),
    )
