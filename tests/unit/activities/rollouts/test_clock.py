"""A rollout's time-out counts execution. The event loops of these tests have a time of their own,
which jumps to whatever happens next.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import httpx

from ratchet.activities.rollouts.clock import READINGS, TICK_S, EngineClock


class _Selector(selectors.DefaultSelector):
    """Sleeps by adding to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def play(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(test)


def now() -> float:
    return asyncio.get_running_loop().time()


class Engine:
    """An engine's answers; `trouble` is raised instead."""

    def __init__(self, running: int = 0, waiting: int = 0) -> None:
        self.running, self.waiting, self.paused = running, waiting, False
        self.trouble: httpx.HTTPError | None = None
        self.polls = 0
        self.clock = EngineClock("http://e:1", httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.polls += 1
        if self.trouble is not None:
            raise self.trouble
        if request.url.path == "/is_paused":
            return httpx.Response(200, json={"is_paused": self.paused})
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0',
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0',
            'vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0',
        ]
        return httpx.Response(200, text="\n".join(lines))


async def given_up(engine: Engine, limit: float) -> float:
    """When a rollout that never ends is given up."""
    try:
        async with engine.clock.limit(limit):
            await asyncio.Event().wait()
    except TimeoutError:
        return now()
    raise AssertionError("it was not given up")


def test_an_engine_that_does_what_it_is_given_leaves_the_limit_as_it_is() -> None:
    async def test() -> None:
        assert await given_up(Engine(running=5), 10.0) == 10.0
        begun = now()
        assert await given_up(Engine(), 2.5) == begun + 2.5

    play(test())


def test_a_pause_does_not_count() -> None:
    async def test() -> None:
        engine = Engine(running=5)
        ended = asyncio.create_task(given_up(engine, 10.0))
        await asyncio.sleep(3.5)
        engine.paused = True
        await asyncio.sleep(600)
        assert not ended.done()
        engine.paused = False
        assert abs(await ended - 610.0) <= TICK_S

    play(test())


def test_queueing_counts_by_the_share_that_executes() -> None:
    async def test() -> None:
        assert abs(await given_up(Engine(running=16, waiting=48), 10.0) - 40.0) <= TICK_S

    play(test())


def test_an_engine_at_a_standstill_does_not_execute_and_one_that_is_gone_has_no_queue() -> None:
    async def test() -> None:
        engine = Engine(running=5)
        ended = asyncio.create_task(given_up(engine, 10.0))
        engine.trouble = httpx.ReadTimeout("its process loads weights")
        await asyncio.sleep(100.5)
        assert not ended.done()
        engine.trouble = httpx.ConnectError("nobody listens")
        assert abs(await ended - 110.0) <= TICK_S

    play(test())


def test_rollouts_of_one_engine_have_times_of_their_own() -> None:
    async def test() -> None:
        engine = Engine(running=1)
        first = asyncio.create_task(given_up(engine, 10.0))
        await asyncio.sleep(4.25)
        second = asyncio.create_task(given_up(engine, 10.0))
        assert abs(await first - 10.0) <= TICK_S
        assert abs(await second - 14.25) <= TICK_S

    play(test())


def test_a_short_limit_counts_beside_a_long_one() -> None:
    async def test() -> None:
        engine = Engine(running=1)
        first = asyncio.create_task(given_up(engine, 240.0))
        await asyncio.sleep(1.0)
        engine.paused = True
        second = asyncio.create_task(given_up(engine, 5.0))
        await asyncio.sleep(4.0)
        engine.paused = False
        assert abs(await second - 10.0) <= 2 * TICK_S
        assert abs(await first - 244.0) <= 2 * TICK_S

    play(test())


def test_short_rollouts_cost_the_engine_nothing() -> None:
    async def test() -> None:
        engine, tick = Engine(), 60.0 / READINGS
        assert tick > TICK_S

        async def one(after: float) -> None:
            await asyncio.sleep(after)
            async with engine.clock.limit(60.0):
                await asyncio.sleep(0.9 * tick)

        await asyncio.gather(*(one(number * tick / 2) for number in range(10)))
        assert engine.polls == 0, "there was always one, but none that lasted"
        async with engine.clock.limit(60.0):
            await asyncio.sleep(2.5 * tick)
        polls = engine.polls
        assert polls == 4
        await asyncio.sleep(60.0)
        assert engine.polls == polls, "nobody executes any more"

    play(test())
