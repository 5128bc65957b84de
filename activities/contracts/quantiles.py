"""Quantiles of what was measured."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of `values`, at least one, lie below.

    Between the two nearest ranks it is interpolated linearly, rank 0 being the lowest value and
    rank n - 1 the highest.
    """
    assert values and 0.0 <= share <= 1.0
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    # Rounding may leave neither end.
    return min(max(low + (high - low) * (rank - math.floor(rank)), low), high)
