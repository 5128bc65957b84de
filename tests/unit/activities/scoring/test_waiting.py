"""Groups that wait for what scores them: what they hold meanwhile, and what ends with them."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.rollouts import FinalizeGroupInput, GroupResult, GroupWork
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms.teacher import Question, ref_logprobs
from ratchet.activities.scoring.references import ReferenceLost
from ratchet.activities.scoring.threads import aside
from ratchet.activities.storage import keys
from ratchet.configs.load import validate
from tests.groups import rollout_activities
from tests.unit.activities.scoring.algorithms.test_streams import document, sample
from tests.unit.activities.scoring.test_references import Server, quick, server  # noqa: F401


def _rooms(tmp_path: Path, url: str) -> RolloutActivities:
    """Activities on a real store, for a run whose teacher is at `url`."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    env = {"id": "reverse-text", "sampling": {"max_tokens": 4}}
    config = validate(
        {
            "max_steps": 1,
            "algo": {"type": "opd", "teacher": {"name": "small", "base_url": url}},
            "train": {"env": [env]},
            "trainer": {"seq_len": 16, "micro_batch_tokens": 16},
            "filters": {"pre_batch": [], "post_batch": []},
        }
    )
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    return rollout_activities(ctx)


def _finalizing(
    rooms: RolloutActivities, number: int, mask: Sequence[bool] = (False, True, True)
) -> "asyncio.Task[GroupResult]":
    work = GroupWork(f"train/{number}", "train", "reverse-text", number, 1)
    rollout = document([sample([*mask])])
    rooms.ctx.store.put_json(keys.rollout("r", work.group, 0), rollout)

    async def finalize() -> GroupResult:
        given = FinalizeGroupInput("r", work, 3)
        result: GroupResult = await ActivityEnvironment().run(rooms.finalize_group, given)
        return result

    return asyncio.create_task(finalize())


async def _asked(server: Server, count: int) -> None:  # noqa: F811
    async with asyncio.timeout(60):
        while len(server.asked) < count:
            await asyncio.sleep(0.01)


async def test_groups_that_wait_for_a_teacher_hold_no_thread(
    server: Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    """More groups than threads wait, at an address that takes a thread to look up."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    server.until_busy = 9
    rooms = _rooms(tmp_path, server.url.replace("127.0.0.1", "localhost"))
    waiting = [_finalizing(rooms, number) for number in range(8)]
    await _asked(server, 8)
    assert not any(task.done() for task in waiting)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(lambda: "free") == "free"
    server.until_busy = 0
    async with asyncio.timeout(60):
        results = await asyncio.gather(*waiting)
    assert [result.survivors for result in results] == [1] * 8


async def test_a_group_that_is_given_up_asks_no_more(
    server: Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    server.troubles = [(500, "on fire")] * 100
    rooms = _rooms(tmp_path, server.url)
    waiting = _finalizing(rooms, 0)
    await _asked(server, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    prompt = server.asked[0]["prompt"]
    asked = len(server.asked)
    # Another one, which asks at the same pace, has meanwhile asked as often as it may.
    with pytest.raises(ReferenceLost, match="on fire"):
        await _finalizing(rooms, 1, [False, True, True, True])
    assert server.asked_for(prompt) == asked < len(server.asked)


async def test_nobody_is_asked_after_one_failed() -> None:
    asked = []

    class Refusing:
        async def logprobs(self, token_ids: object) -> list[float]:
            asked.append(token_ids)
            await asyncio.sleep(0)
            raise ValueError("no")

    questions = [[Question(sample([False, True])) for _ in range(50)]]
    with pytest.raises(ValueError, match="no"):
        await ref_logprobs(Refusing(), questions, seq_len=9, max_concurrent=2)
    few = len(asked)
    # Nothing but turns of the loop lies between two questions.
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(asked) == few < 10


async def test_work_aside_returns_and_raises() -> None:
    with ThreadPoolExecutor(1) as threads:

        async def where() -> int:
            await asyncio.sleep(0)
            return threading.get_ident()

        async def broken() -> int:
            raise ValueError("broken")

        assert await aside(threads, where) != threading.get_ident()
        with pytest.raises(ValueError, match="broken"):
            await aside(threads, broken)


@pytest.mark.parametrize("begun", [True, False])
async def test_work_aside_ends_with_its_caller(begun: bool) -> None:
    started, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as threads:
        waiting = asyncio.create_task(aside(threads, endless))
        while begun and not started.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    # The pool has closed, so that nothing runs any more.
    assert ended.is_set() == started.is_set()
    assert ended.is_set() or not begun
