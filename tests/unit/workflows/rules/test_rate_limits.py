"""Rate limit and burst cap: how much may start, and when to look again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.workflows.rules.rate_limits import (
    LEAST_BURST,
    WINDOW_S,
    BurstCap,
    RateLimiter,
    burst_of,
)

# -- rate -----------------------------------------------------------------------------------

costs = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 6)), max_size=60)


@given(per_minute=st.integers(1, 6000), arrivals=costs)
def test_no_stretch_of_time_spends_more_than_its_share_and_a_window(
    per_minute: int, arrivals: list[tuple[float, int]]
) -> None:
    limiter = RateLimiter(per_minute, least=6, tokens=0.0)
    now, spent = 0.0, 0
    for pause, cost in arrivals:
        now += pause
        limiter.refill(now)
        if limiter.wait_s(cost) == 0:
            limiter.take(cost)
            spent += cost
        assert 0 <= limiter.tokens <= limiter.capacity
        assert spent <= now * per_minute / 60 + 1e-6
    assert limiter.capacity == max(per_minute * WINDOW_S / 60, 6)


@given(
    per_minute=st.integers(1, 6000),
    cost=st.integers(1, 8),
    tokens=st.floats(0, 8),
    at=st.floats(0, 1e9),
)
def test_waiting_as_told_is_enough(per_minute: int, cost: int, tokens: float, at: float) -> None:
    limiter = RateLimiter(per_minute, least=8, tokens=tokens, at=at)
    waits = limiter.wait_s(cost)
    assert (waits == 0) == (tokens >= cost)
    limiter.refill(at + waits)
    assert limiter.tokens >= cost or limiter.tokens == pytest.approx(cost, abs=1e-3)


def test_bucket_holds_the_largest_part_however_slow_it_fills() -> None:
    limiter = RateLimiter(1, least=8, tokens=0.0)
    limiter.refill(1e6)
    assert limiter.tokens == 8 and limiter.wait_s(8) == 0


def test_time_that_goes_back_gives_nothing() -> None:
    limiter = RateLimiter(60, least=1, tokens=0.0, at=10.0)
    limiter.refill(5.0)
    limiter.refill(10.0)
    assert limiter.tokens == 0


def test_limit_that_is_lifted_costs_nothing_and_one_that_comes_starts_from_what_was_left() -> None:
    limiter = RateLimiter(60, least=2, tokens=1.0)
    limiter.per_minute = None
    limiter.refill(100.0)
    assert limiter.wait_s(1000) == 0
    limiter.take(1000)
    limiter.per_minute = 60
    limiter.refill(101.0)
    assert limiter.tokens == 2.0, "one second's worth: the time without a limit earns nothing"


def test_rate_that_falls_leaves_no_more_than_its_own_window() -> None:
    limiter = RateLimiter(6000, least=1, tokens=500.0)
    limiter.per_minute = 60
    limiter.refill(0.0)
    assert limiter.tokens == 5


# -- bursts ---------------------------------------------------------------------------------


@given(
    burst=st.integers(1, 10),
    events=st.lists(st.tuples(st.integers(0, 16), st.integers(-8, 8)), max_size=80),
)
def test_a_window_grows_by_a_burst_at_most(burst: int, events: list[tuple[int, int]]) -> None:
    cap, now, executing = BurstCap(0, -WINDOW_S), 0.0, 0
    at_start = 0
    for quarters, change in events:
        now += quarters / 4
        if change <= 0:
            executing = max(executing + change, 0)
            continue
        window = cap.at
        waits = cap.wait_s(now, executing, change, burst)
        if cap.at != window:
            at_start = executing
        if waits == 0:
            executing += change
            assert executing <= at_start + max(burst, change), "one activity may always start"
        else:
            assert executing + change > at_start + burst, "held back for nothing"
            assert 0 < waits <= WINDOW_S


def test_what_ends_makes_room_at_once() -> None:
    cap = BurstCap(0, -WINDOW_S)
    assert cap.wait_s(0.0, 0, 8, 8) == 0
    assert cap.wait_s(1.0, 8, 1, 8) == pytest.approx(4.0)
    assert cap.wait_s(1.0, 5, 3, 8) == 0
    assert cap.wait_s(1.0, 8, 1, 8) == pytest.approx(4.0)
    assert cap.wait_s(5.0, 8, 8, 8) == 0, "the next window"


def test_no_setting_is_no_cap() -> None:
    assert BurstCap(0, 0.0).wait_s(0.0, 0, 10**6, None) == 0


@pytest.mark.parametrize(
    ("setting", "permits", "largest_group", "burst"),
    [
        (None, 1000, 8, None),
        (3, 1000, 2, 3),
        ("auto", 1000, 8, 100),
        ("auto", 10, 2, LEAST_BURST),
        ("auto", 10, 16, 16),
    ],
)
def test_burst_is_as_set_or_a_tenth_of_the_permits(
    setting: int | str | None, permits: int, largest_group: int, burst: int | None
) -> None:
    assert burst_of(setting, permits, largest_group) == burst
