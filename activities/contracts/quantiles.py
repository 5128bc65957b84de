"""Quantiles of what was measured."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values`, of which there is at least one, lie.

    Interpolates linearly between the two nearest ranks, rank 0 being the lowest value and rank
    n - 1 the highest.
    """
    assert values and 0.0 <= share <= 1.0
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    # Rounding must not leave the range.
    return min(max(low + (high - low) * (rank - math.floor(rank)), low), high)
