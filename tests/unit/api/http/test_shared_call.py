"""Answers of the same moment are shared, also by those who give up, and are let go after it."""

import asyncio
from typing import Any

import pytest

from ratchet.api.http.shared_call import Shared

LONG_S, SHORT_S = 600.0, 0.02


class Oracle:
    """Answers with the number of the call, while `answers` is set."""

    def __init__(self, fails: bool = False) -> None:
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._fails = fails

    async def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        await self.answers.wait()
        if self._fails:
            raise ValueError("no answer")
        return number


async def all_had_a_turn() -> None:
    """Every task that could go on has done so, on however slow a machine."""
    for _ in range(10):
        await asyncio.sleep(0)


async def let_go(shared: Shared[Any]) -> None:
    async with asyncio.timeout(60):
        while shared._calls:
            await asyncio.sleep(SHORT_S)


async def test_those_who_come_together_share_an_answer_and_later_ones_get_another() -> None:
    shared: Shared[int] = Shared(LONG_S)
    oracle = Oracle()
    oracle.answers.clear()
    asking = [asyncio.create_task(shared.get("a", oracle)) for _ in range(20)]
    await all_had_a_turn()
    oracle.answers.set()
    assert await asyncio.gather(*asking) == [1] * 20
    assert await shared.get("a", oracle) == 1
    assert await shared.get("b", oracle) == 2
    passing: Shared[int] = Shared(SHORT_S)
    assert await passing.get("a", oracle) == 3
    await let_go(passing)
    assert await passing.get("a", oracle) == 4


async def test_one_who_gives_up_leaves_the_answer_to_the_others() -> None:
    shared: Shared[int] = Shared(LONG_S)
    oracle = Oracle()
    oracle.answers.clear()
    first = asyncio.create_task(shared.get("a", oracle))
    second = asyncio.create_task(shared.get("a", oracle))
    await all_had_a_turn()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    oracle.answers.set()
    assert await second == 1 and oracle.asked == 1


async def test_what_is_forgotten_is_requested_again_and_a_late_answer_does_not_come_back() -> None:
    shared: Shared[int] = Shared(LONG_S)
    oracle = Oracle()
    oracle.answers.clear()
    slow = asyncio.create_task(shared.get("a", oracle))
    await all_had_a_turn()
    assert oracle.asked == 1
    shared.forget("a")
    later = asyncio.create_task(shared.get("a", oracle))
    await all_had_a_turn()
    oracle.answers.set()
    assert await later == 2 and await slow == 1
    assert await shared.get("a", oracle) == 2


async def test_a_failure_is_shared_and_not_kept() -> None:
    for fresh_s, asked in ((LONG_S, 1), (SHORT_S, 2)):
        shared: Shared[int] = Shared(fresh_s)
        oracle = Oracle(fails=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="no answer"):
                await shared.get("a", oracle)
            # What serves for long is not let go meanwhile.
            await (all_had_a_turn() if asked == 1 else let_go(shared))
        assert oracle.asked == asked


async def test_answers_that_are_out_of_date_are_not_held() -> None:
    shared: Shared[bytes] = Shared(SHORT_S)

    async def large() -> bytes:
        return bytes(1000)

    for number in range(50):
        await shared.get(str(number), large)
    await let_go(shared)
