"""How often what failed is tried again: soon at first, ever more rarely the longer it lasts."""

RESTS_S = (2.0, 300.0)
"""The shortest and the longest rest before another try."""
REST_SHARE = 1 / 8
"""The part of its past length by which a rest may make a trouble longer."""


def rest_after(seconds: float, longest_s: float | None = None) -> float:
    """Seconds until what has failed for `seconds` is tried again."""
    shortest, longest = RESTS_S
    return min(max(seconds * REST_SHARE, shortest), longest_s or longest)
