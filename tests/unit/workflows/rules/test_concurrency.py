"""Adaptive concurrency: each rule as a sequence of polls, and what holds over any sequence."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ratchet.activities.contracts.hosting import EngineLoad
from ratchet.workflows.rules.concurrency import (
    POLL_S,
    Concurrency,
    ConcurrencyLimits,
    ConcurrencyState,
    Decision,
)

CLEAR = EngineLoad(0, 1, 0.3, 50, 0, 0, kv_tokens=100_000, max_model_len=1000)


class Polls:
    """A controller and a clock: each poll is 5 s after the last."""

    def __init__(self, initial: int | None = 100, **limits: int) -> None:
        self.controller = Concurrency(
            ConcurrencyLimits(initial=initial, **limits), ConcurrencyState()
        )
        self.now = 1000.0
        self.done = 0

    @property
    def state(self) -> ConcurrencyState:
        return self.controller.state

    def poll(
        self, *loads: EngineLoad, inflight: int = 100, finished: int = 0, after: float = POLL_S
    ) -> Decision:
        self.now += after
        self.done += finished
        return self.controller.observe(self.now, loads or (CLEAR,), inflight, self.done)

    def limits(self, count: int, *loads: EngineLoad, **kinds: int) -> list[int]:
        return [self.poll(*loads, **kinds).limit for _ in range(count)]


# -- the start ------------------------------------------------------------------------------


def test_start_is_what_the_cache_holds_of_longest_contexts() -> None:
    polls = Polls(None, unit=8)
    assert polls.controller.limit == 8
    assert polls.poll(inflight=8) == Decision(100, False)
    both = [CLEAR, replace(CLEAR, index=1)]
    assert polls.poll(*both, inflight=8).limit == 200
    assert polls.controller.gauges() == {
        "concurrency/max_inflight": 200.0,
        "concurrency/turnover": 0.0,
        "concurrency/capacity": 200_000.0,
        "concurrency/signal": 0.0,
    }


def test_start_is_bounded_by_what_engines_run_at_once_and_by_the_limits() -> None:
    assert Polls(None, seats=64).poll().limit == 64
    assert Polls(None, max_inflight=40).poll().limit == 40
    assert Polls(None, min_inflight=120).poll().limit == 120
    assert Polls(16).poll().limit == 16


def test_start_no_longer_follows_the_engines_once_something_moved_it() -> None:
    polls = Polls(None)
    polls.poll()
    assert polls.poll(replace(CLEAR, preemptions=1)).limit == 80
    assert polls.poll(replace(CLEAR, preemptions=1), inflight=80).limit == 80


# -- growth ---------------------------------------------------------------------------------


def test_a_turnover_grows_by_a_quarter() -> None:
    polls = Polls()
    assert polls.poll(finished=100).limit == 100, "the first poll only opens the gate"
    grown = polls.poll(finished=100)
    assert (grown.limit, grown.trim, grown.reason) == (125, False, "2.0 turnovers")


def test_parts_of_a_turnover_compound_to_the_same() -> None:
    polls = Polls()
    polls.poll()
    # 100 of 118 do not bind.
    assert polls.limits(4, finished=25) == [105, 111, 118, 118]
    assert polls.state.cap == pytest.approx(100 * 1.25**0.75)


def test_a_poll_grows_by_one_turnover_at_most() -> None:
    polls = Polls()
    polls.poll()
    assert polls.poll(finished=1000).limit == 125
    assert polls.state.turnover == 10


@pytest.mark.parametrize(
    "load",
    [replace(CLEAR, kv_usage=0.6), replace(CLEAR, waiting=1), replace(CLEAR, preemptions=1)],
)
def test_growth_needs_clear_engines_at_both_polls(load: EngineLoad) -> None:
    polls = Polls()
    polls.poll()
    assert polls.poll(load, finished=100).limit <= 100
    polls = Polls()
    polls.poll(replace(load, preemptions=0))
    assert polls.poll(load, finished=100).limit <= 100
    if not load.preemptions:
        assert polls.poll(finished=100).limit == 100
        assert polls.poll(finished=100).limit == 125


def test_growth_needs_permits_that_bind() -> None:
    polls = Polls()
    polls.poll(inflight=89)
    assert polls.poll(inflight=89, finished=100).limit == 100
    assert polls.poll(inflight=90, finished=90).limit == 125


def test_permits_bind_when_the_next_group_does_not_fit() -> None:
    polls = Polls(24, unit=16)
    polls.poll(inflight=16)
    assert polls.poll(inflight=16, finished=16).limit == 30
    polls = Polls(32, unit=16)
    polls.poll(inflight=16)
    assert polls.poll(inflight=16, finished=16).limit == 32


def test_growth_stops_15_s_after_the_last_clear_poll() -> None:
    polls = Polls()
    polls.poll()
    assert polls.poll(finished=100, after=15).limit == 125
    assert polls.poll(inflight=125, finished=125, after=15.1).limit == 125
    assert polls.poll(inflight=125, finished=125).limit == 156


def test_growth_ends_at_the_limit() -> None:
    polls = Polls(max_inflight=110)
    assert polls.limits(4, finished=110, inflight=110) == [100, 110, 110, 110]


# -- trims ----------------------------------------------------------------------------------


def test_above_08_permits_fall_to_what_fills_07_and_nothing_is_cancelled() -> None:
    polls = Polls()
    assert polls.poll(replace(CLEAR, kv_usage=0.8)) == Decision(100, False)
    trimmed = polls.poll(replace(CLEAR, kv_usage=0.875), inflight=80)
    assert trimmed == Decision(64, False, "KV cache used to 0.88")
    assert polls.controller.gauges()["concurrency/signal"] == 1


def test_above_09_the_youngest_go_until_no_more_than_permitted_is_in_flight() -> None:
    polls = Polls()
    full = replace(CLEAR, kv_usage=1.0)
    assert polls.poll(full) == Decision(70, True, "KV cache used to 1.00")
    assert polls.controller.gauges()["concurrency/signal"] == 2
    assert polls.poll(full, inflight=80) == Decision(70, True)
    assert polls.poll(full, inflight=70) == Decision(70, False)


def test_at_09_nothing_is_cancelled_yet() -> None:
    assert not Polls().poll(replace(CLEAR, kv_usage=0.9)).trim
    assert Polls().poll(replace(CLEAR, kv_usage=0.91)).trim


def test_the_fullest_engine_counts() -> None:
    assert Polls().poll(CLEAR, replace(CLEAR, index=1, kv_usage=1.0)).limit == 70


def test_a_trim_rests_for_6_polls() -> None:
    full = replace(CLEAR, kv_usage=0.875)
    assert Polls().limits(8, full) == [80] * 8
    falling = [100, 80, 80, 80, 80, 80, 80, 80]
    polls = Polls()
    assert [polls.poll(full, inflight=n).limit for n in falling] == [80] * 6 + [64] * 2


def test_a_trim_never_raises_permits() -> None:
    polls = Polls(50)
    assert polls.poll(replace(CLEAR, kv_usage=0.875), inflight=100).limit == 50


# -- cuts -----------------------------------------------------------------------------------


def test_a_preemption_cuts_to_08_and_cancels() -> None:
    polls = Polls()
    polls.poll(replace(CLEAR, preemptions=7))
    cut = polls.poll(replace(CLEAR, preemptions=8))
    assert cut == Decision(80, True, "preemptions") and polls.state.signal == "overload"
    assert polls.poll(replace(CLEAR, preemptions=8), inflight=80) == Decision(80, False)


def test_with_nothing_in_flight_there_is_nothing_to_cut() -> None:
    polls = Polls()
    polls.poll()
    late = replace(CLEAR, preemptions=1, kv_usage=0.95)
    assert polls.poll(late, inflight=0) == Decision(100, False)


def test_preemptions_of_an_earlier_epoch_are_not_counted_again() -> None:
    polls = Polls()
    polls.poll(replace(CLEAR, preemptions=7))
    restarted = replace(CLEAR, epoch=2, preemptions=9)
    assert polls.limits(2, restarted) == [100, 100]
    assert list(polls.state.preemptions) == ["0.2"]


def test_a_queue_cuts_to_09_at_its_sixth_poll() -> None:
    queue = replace(CLEAR, running=50, waiting=26)
    polls = Polls()
    assert polls.limits(6, queue) == [100] * 5 + [90]
    assert polls.state.trim
    assert Polls().limits(12, replace(queue, waiting=25)) == [100] * 12
    assert Polls().limits(12, replace(queue, running=0)) == [100] * 12, "paused engines run none"


def test_a_queue_must_persist() -> None:
    queue = replace(CLEAR, running=50, waiting=26)
    polls = Polls()
    polls.limits(5, queue)
    polls.poll(CLEAR)
    assert polls.limits(5, queue) == [100] * 5
    polls.poll(queue, after=16)
    assert polls.poll(queue).limit == 100, "nobody knows what was in between"
    polls = Polls()
    polls.limits(5, queue)
    assert polls.poll(queue, after=15).limit == 90


def test_overload_soon_after_a_cut_halves() -> None:
    def again_after(quiet: int) -> int:
        polls = Polls()
        polls.poll()
        polls.poll(replace(CLEAR, preemptions=1))
        # The poll that ends the cut, and then quiet ones.
        polls.limits(1 + quiet, replace(CLEAR, preemptions=1), inflight=80)
        return polls.poll(replace(CLEAR, preemptions=2), inflight=80).limit

    assert [again_after(quiet) for quiet in (0, 5, 6)] == [40, 40, 64]


def test_nothing_follows_a_cut_until_the_pool_came_down_and_the_engines_settled() -> None:
    polls = Polls()
    polls.poll()
    overload = [replace(CLEAR, preemptions=n, kv_usage=0.95) for n in range(20)]
    assert polls.poll(overload[1]).limit == 80
    assert [polls.poll(overload[n], inflight=90).limit for n in (2, 3)] == [80, 80]
    assert polls.poll(overload[4], inflight=80).limit == 80, "still preempting"
    assert polls.state.drain > 0
    assert polls.poll(replace(CLEAR, preemptions=4), inflight=80).limit == 80
    assert polls.state.drain == 0


def test_a_cut_lasts_12_polls_at_most() -> None:
    polls = Polls()
    polls.poll()
    overload = [replace(CLEAR, preemptions=n) for n in range(1, 15)]
    seen = [polls.poll(load, inflight=80).limit for load in overload]
    assert seen == [64] * 12 + [40] * 2


def test_no_growth_during_a_cut() -> None:
    polls = Polls()
    polls.poll()
    polls.poll(replace(CLEAR, preemptions=1))
    still = replace(CLEAR, preemptions=1)
    assert polls.poll(still, inflight=90, finished=90).limit == 80
    assert polls.poll(still, inflight=80, finished=80).limit == 80, "the gate opens only here"
    assert polls.poll(still, inflight=80, finished=80).limit == 100


# -- polls ----------------------------------------------------------------------------------


def test_reports_between_polls_change_nothing_and_lose_nothing() -> None:
    polls = Polls()
    polls.poll()
    before = json.dumps(asdict(polls.state))
    assert polls.poll(replace(CLEAR, preemptions=3), finished=50, after=2.0).limit == 100
    assert json.dumps(asdict(polls.state)) == before
    assert polls.poll(finished=50, after=3.0).limit == 125
    assert polls.poll(replace(CLEAR, preemptions=3)).limit == 80


def test_no_engine_no_poll() -> None:
    polls = Polls()
    assert polls.controller.observe(1.0, [], 5, 5) == Decision(100, False)
    assert polls.state.polled_at is None


def test_polls_of_a_silence_count_as_passed() -> None:
    polls = Polls()
    full = replace(CLEAR, kv_usage=0.875)
    polls.poll(full)
    assert polls.poll(full, inflight=80, after=30).limit == 64


def test_pinned_limits_hold() -> None:
    polls = Polls(None, min_inflight=32, max_inflight=32)
    assert polls.limits(3, finished=32, inflight=32) == [32] * 3
    assert polls.poll(replace(CLEAR, preemptions=1, kv_usage=1.0), inflight=32).limit == 32


# -- any sequence ---------------------------------------------------------------------------

LOADS = st.builds(
    EngineLoad,
    index=st.integers(0, 2),
    epoch=st.integers(1, 2),
    kv_usage=st.floats(0, 1),
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    preemptions=st.integers(0, 3),
    kv_tokens=st.just(100_000),
    max_model_len=st.just(1000),
)
CALM, CLOSE = (
    EngineLoad(0, 1, usage, 50, 0, 0, kv_tokens=100_000, max_model_len=1000)
    for usage in (0.3, 0.95)
)
STEPS = st.lists(
    # Anything; polls that follow each other while permits bind; a cache that is all but full.
    st.one_of(
        st.tuples(st.floats(0, 40), st.lists(LOADS, max_size=3), st.floats(0, 2)),
        st.tuples(st.just(POLL_S), st.just([CALM]), st.floats(0.8, 1.2)),
        st.tuples(st.just(POLL_S), st.just([CALM]), st.just(1.0)),
        st.tuples(st.just(POLL_S), st.just([CLOSE]), st.floats(0.1, 1.0)),
    ),
    min_size=10,
    max_size=60,
)
LIMITS = st.builds(
    lambda low, more, unit, share: ConcurrencyLimits(
        low, low + unit + more, None if share is None else low + int(share * more), unit
    ),
    st.integers(1, 50),
    st.integers(0, 500),
    st.integers(1, 32),
    st.none() | st.floats(0, 1),
)


def test_what_holds_over_any_sequence() -> None:
    moved: Counter[str] = Counter()

    # A smaller example of a fault would take minutes to find.
    @settings(phases=[Phase.generate])
    @given(LIMITS, STEPS, st.integers(0, 400))
    def holds(
        limits: ConcurrencyLimits,
        steps: list[tuple[float, list[EngineLoad], float]],
        finished: int,
    ) -> None:
        state, now, done = ConcurrencyState(), 0.0, 0
        for pause, loads, used in steps:
            now += pause
            done += finished
            # Continue-as-new at every poll: nothing but the state's JSON is carried over.
            stored = ConcurrencyState(**json.loads(json.dumps(asdict(state))))
            controller = Concurrency(limits, stored)
            before, settled = controller.limit, controller.state.settled
            inflight = int(used * before)
            decision = controller.observe(now, loads, inflight, done)
            state = controller.state
            assert decision.limit == controller.limit
            assert limits.floor <= decision.limit <= limits.max_inflight
            if decision.limit > before and settled:
                moved["up"] += 1
                assert max(load.kv_usage for load in loads) < 0.6
                assert sum(load.waiting for load in loads) == 0
                assert decision.limit <= before * 1.25 + 1
                # A trim goes on until as much is in flight as was permitted.
                assert not decision.trim or inflight > before
            if decision.limit < before and settled:
                moved["down"] += 1
                assert inflight > 0 and decision.reason
                if decision.trim:
                    moved["trimmed"] += 1
                    assert state.signal == "overload"
            assert len(state.preemptions) <= 3

    holds()
    assert all(moved[way] for way in ("up", "down", "trimmed")), moved


def test_it_settles_on_engines_that_fill_up() -> None:
    """A closed loop: each rollout holds 1/400 of the cache, and lasts 6 polls on average."""
    polls = Polls(20)
    inflight, preemptions, usages, cuts = 20, 0, [], 0
    for _ in range(400):
        finished = inflight // 6
        inflight = max(inflight - finished, 0)
        inflight = max(inflight, min(polls.controller.limit, inflight + 40))
        usage = min(inflight / 400, 1.0)
        preemptions += usage >= 1.0
        load = replace(CLEAR, kv_usage=usage, preemptions=preemptions)
        decision = polls.poll(load, inflight=inflight, finished=finished)
        cuts += decision.reason == "preemptions"
        if decision.trim:
            inflight = decision.limit
        usages.append(usage)
    assert cuts == 0
    assert min(usages[100:]) > 0.55 and max(usages[100:]) < 0.8
