"""Answers of the same moment are shared, also by those who give up, and are let go after it."""

import asyncio

import pytest

from api.sharing import Shared


class Oracle:
    """Answers with the number of the call, after `takes_s` seconds."""

    def __init__(self, takes_s: float = 0.0, fails: bool = False) -> None:
        self.asked = 0
        self._takes_s, self._fails = takes_s, fails

    async def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        await asyncio.sleep(self._takes_s)
        if self._fails:
            raise ValueError("no answer")
        return number


async def test_those_who_come_together_share_an_answer_and_later_ones_get_another() -> None:
    shared: Shared[int] = Shared(0.05)
    oracle = Oracle(takes_s=0.02)
    assert await asyncio.gather(*(shared.get("a", oracle) for _ in range(20))) == [1] * 20
    assert await shared.get("a", oracle) == 1
    assert await shared.get("b", oracle) == 2
    await asyncio.sleep(0.1)
    assert await shared.get("a", oracle) == 3


async def test_one_who_gives_up_leaves_the_answer_to_the_others() -> None:
    shared: Shared[int] = Shared(1.0)
    oracle = Oracle(takes_s=0.05)
    first = asyncio.create_task(shared.get("a", oracle))
    second = asyncio.create_task(shared.get("a", oracle))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await second == 1 and oracle.asked == 1


async def test_what_is_forgotten_is_asked_anew_and_a_late_answer_does_not_come_back() -> None:
    shared: Shared[int] = Shared(1.0)
    oracle = Oracle(takes_s=0.02)
    slow = asyncio.create_task(shared.get("a", oracle))
    await asyncio.sleep(0.0)
    shared.forget("a")
    assert await shared.get("a", oracle) == 2 and await slow == 1
    assert await shared.get("a", oracle) == 2


async def test_a_failure_is_shared_and_not_kept() -> None:
    shared: Shared[int] = Shared(0.02)
    oracle = Oracle(fails=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no answer"):
            await shared.get("a", oracle)
    assert oracle.asked == 1
    await asyncio.sleep(0.06)
    with pytest.raises(ValueError, match="no answer"):
        await shared.get("a", oracle)
    assert oracle.asked == 2


async def test_answers_that_are_out_of_date_are_not_held() -> None:
    shared: Shared[bytes] = Shared(0.02)

    async def large() -> bytes:
        return bytes(1000)

    for number in range(50):
        await shared.get(str(number), large)
    await asyncio.sleep(0.1)
    assert not shared._calls
