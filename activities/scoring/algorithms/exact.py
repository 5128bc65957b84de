"""Exact arithmetic for credit: sums and quotients of rationals, rounded to a float once.

Why not floats: a float sum depends on the order of its terms, so that two ways to write one
formula differ in the last bits, and three equal rewards can end up with an advantage of 1e-17 in
place of 0. A float is a rational number and so is every formula here; evaluated over rationals
and rounded at the very end, each advantage is the float nearest to the true value. Hence

- algebraically equal forms agree bit for bit,
- the order of a group's rollouts does not matter, and equal rollouts get equal credit,
- a group of equal rewards gets credit 0.0 exactly.

Rewards arrive rounded, however: the floats 0.7 and 0.9 do not lie equally far from the float 0.8.
So an advantage that is no larger than such rounding is 0.0, too (`rounded`).

Groups are small: one of 64 costs about a millisecond at most.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction

ZERO = Fraction(0)
ONE = Fraction(1)
NEGLIGIBLE = Fraction(1, 10**12)
"""The largest advantage, as a share of its group's largest reward, that may be rounding of the
rewards. One operation on floats rounds by 1e-16, and a reward takes many.
"""


def rationals(values: Iterable[float]) -> list[Fraction]:
    """The exact values of finite floats or ints."""
    return [Fraction(value) for value in values]


def mean(values: Sequence[Fraction], weights: Sequence[int] | None = None) -> Fraction:
    """Mean of `values` [n], n > 0; sum(w * v) / sum(w) if there are `weights` [n], not all 0."""
    if weights is None:
        return sum(values, ZERO) / len(values)
    weighted = (weight * value for weight, value in zip(weights, values, strict=True))
    return sum(weighted, ZERO) / sum(weights)


def rounded(advantages: Iterable[Fraction], rewards: Iterable[Fraction]) -> list[float]:
    """The float nearest to each advantage; 0.0 for what is rounding of `rewards`, which they are
    relative to. Raises OverflowError beyond the largest float.
    """
    least = NEGLIGIBLE * max(map(abs, rewards), default=ZERO)
    return [float(value) if abs(value) > least else 0.0 for value in advantages]
