"""Retry intervals: short at first, ever longer the longer a failure lasts."""

RESTS_S = (2.0, 300.0)
"""The shortest and the longest wait before another try."""
REST_SHARE = 1 / 8
"""The wait as a fraction of how long the failure has lasted."""


def rest_after(seconds: float, longest_s: float | None = None) -> float:
    """Seconds until the next try of something that has failed for `seconds`."""
    shortest, longest = RESTS_S
    return min(max(seconds * REST_SHARE, shortest), longest_s or longest)
