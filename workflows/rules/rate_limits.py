"""What slows admission down: a rate limit and a burst cap. Pure; the time comes from outside.

Both are shared by train and eval, and both cross hand-overs in the lease.
"""

from dataclasses import dataclass

WINDOW_S = 5.0
"""Seconds of the rate limit that may be spent at once, and the window of the burst cap."""
LEAST_BURST = 8


@dataclass
class RateLimiter:
    """A token bucket: `per_minute` tokens flow in, at most `capacity` are kept; None: no limit.

    `least` is the largest possible cost, which the bucket must be able to hold.
    """

    per_minute: int | None
    least: int
    tokens: float
    at: float = 0.0

    @property
    def capacity(self) -> float:
        """Most tokens the bucket holds."""
        return max((self.per_minute or 0) * WINDOW_S / 60, self.least)

    def refill(self, now: float) -> None:
        """Brings the bucket up to `now` (seconds)."""
        if self.per_minute is not None:
            gained = max(now - self.at, 0.0) * self.per_minute / 60
            self.tokens = min(self.tokens + gained, self.capacity)
        self.at = max(now, self.at)

    def wait_s(self, cost: int) -> float:
        """Seconds until `cost` tokens are there; 0 if they are."""
        if self.per_minute is None or self.tokens >= cost:
            return 0.0
        return (cost - self.tokens) * 60 / self.per_minute

    def take(self, cost: int) -> None:
        """Pays for `cost` rollouts."""
        if self.per_minute is not None:
            self.tokens -= cost


@dataclass
class BurstCap:
    """Executing rollouts grow by at most a burst per window; those that end make room at once.

    `base` rollouts executed at `at` (seconds), when the window began.
    """

    base: int
    at: float

    def wait_s(self, now: float, executing: int, cost: int, burst: int | None) -> float:
        """Seconds until `cost` more may start; 0 if they may. Opens a window when one is over.

        A burst covers at least one activity, otherwise nothing could start.
        """
        if burst is None:
            return 0.0
        if now - self.at >= WINDOW_S:
            self.base, self.at = executing, now
        if executing + cost <= self.base + max(burst, cost):
            return 0.0
        return self.at + WINDOW_S - now


def burst_of(setting: int | str | None, permits: int, largest_group: int) -> int | None:
    """Rollouts by which a window may grow: as set, or 'auto', a tenth of the permits."""
    if setting is None or isinstance(setting, int):
        return setting
    return max(largest_group, LEAST_BURST, permits // 10)
