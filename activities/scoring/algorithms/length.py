"""Length control: formulas that make long rollouts of a group earn less.

All take the rewards r [n] of one group as exact numbers and return advantages [n], or terms of
them, as exact numbers; `mean` below is over the group.
"""

from collections.abc import Sequence
from fractions import Fraction

from ratchet.activities.scoring.algorithms.exact import ONE, ZERO, mean


def centred(values: Sequence[Fraction], weights: Sequence[int] | None = None) -> list[Fraction]:
    """v_i - mean(v) [n]; the mean is weighted if there are weights."""
    middle = mean(values, weights)
    return [value - middle for value in values]


def efficiency(rewards: Sequence[Fraction], costs: Sequence[Fraction]) -> list[Fraction]:
    """Advantages when the best rollouts earn up to double for being cheap.

    Best is r_i = max r. With C the mean cost of the best, s_i = r_i (1 + clamp(1 - c_i / C, 0, 1))
    for the best and s_i = r_i for the rest; A = s - mean(s). Plain r - mean(r) if max r or C is
    not positive.
    """
    best = max(rewards)
    if best <= 0:
        return centred(rewards)
    cost = mean([c for r, c in zip(rewards, costs, strict=True) if r == best])
    if cost <= 0:
        return centred(rewards)
    shaped = [
        r * (1 + min(max(1 - c / cost, ZERO), ONE)) if r == best else r
        for r, c in zip(rewards, costs, strict=True)
    ]
    return centred(shaped)


def linear_term(
    rewards: Sequence[Fraction],
    lengths: Sequence[int],
    *,
    coef: float,
    seq_len: int,
    gate_by_correctness: bool,
    weights: Sequence[int] | None,
) -> list[Fraction]:
    """What the linear penalty adds to each advantage [n].

    p_i = coef * mean(r) * L_i / seq_len, times r_i if gated (for rewards between 0 and 1 that is
    not a gate on r_i = 1). The term is B(p) - p_i, where B is the baseline of the rewards: the
    mean, weighted if there are weights. mean(r) in p_i is the group's pass rate, never weighted.
    """
    scale = Fraction(coef) * mean(rewards) / seq_len
    penalties = [scale * length for length in lengths]
    if gate_by_correctness:
        penalties = [p * r for p, r in zip(penalties, rewards, strict=True)]
    return [-term for term in centred(penalties, weights)]


def group_max(
    rewards: Sequence[Fraction],
    outputs: Sequence[int],
    inputs: Sequence[int],
    turns: Sequence[int],
    weights: tuple[float, float, float],
) -> list[Fraction]:
    """Advantages with a penalty of three terms, each relative to the group's largest.

    f_i = sum over (output tokens, input tokens, turns) of w * x_i / max(max x, 1);
    s_i = r_i - mean(r) f_i; A = s - mean(s).
    """
    rate = mean(rewards)
    terms = [
        (Fraction(weight) / max(*amounts, 1), amounts)
        for weight, amounts in zip(weights, (outputs, inputs, turns), strict=True)
    ]
    shaped = [
        reward - rate * sum((scale * amounts[i] for scale, amounts in terms), ZERO)
        for i, reward in enumerate(rewards)
    ]
    return centred(shaped)
