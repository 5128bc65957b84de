"""Runs that fail while their trainer lives: what they trained is in a checkpoint."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from tests.workflow.running import (
    WITHIN_S,
    config,
    events,
    memo,
    start,
    status,
    until,
    world_of,
)
from tests.workflow.test_overlapped_pushes import ahead
from tests.workflow.test_restore import resume
from tests.workflow.world import Stubborn, TrainGroups, World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

TRAIN = {"env": [{"id": "reverse-text"}], "batch_size": 8, "group_size": 2}
LAGS = {**TRAIN, "max_empty_batches": 1, "max_lag": 2}
BROKEN = "credit:half: AttributeError: 'NoneType' object has no attribute 'split'"


async def failure_of(handle: WorkflowHandle[Any, Any]) -> str:
    """Why the run failed."""
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    return str(failed.value.cause)


async def busy(world: World) -> WorkflowHandle[Any, Any]:
    """A run that has trained step 3 ahead, and has a group of batch 4 in flight."""
    world.holds = {"train/13"}
    return await ahead(world, checkpoint={"interval": 1000}, eval={}, train=LAGS)


async def goes_on(
    world: World, handle: WorkflowHandle[Any, Any], steps: int, train: dict[str, Any] = TRAIN
) -> None:
    """An attempt after the run's last checkpoint skips and repeats nothing."""
    step = world.checkpoints[-1]
    assert step == max(world.trained), "something that was trained is lost"
    world.batches = {n: groups for n, groups in world.batches.items() if n <= step}
    again = await resume(world, handle.id, 2, max_steps=steps, eval={}, train=train)
    assert (await again.result())["status"] == "succeeded"
    assert world.trained == list(range(1, steps + 1)) and not world.replayed
    shipped = [group for groups in world.batches.values() for group in groups]
    assert sorted(group.split(".")[0] for group in shipped) == sorted(
        f"train/{n}" for n in range(4 * steps)
    )


async def test_an_algorithm_that_raises_ends_the_run_with_all_that_it_trained(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.holds = {"train/9"}
        handle = await start(world, max_steps=100, checkpoint={"interval": 1000}, eval={})
        # Of batch 3 all but one are there.
        await until(lambda: 2 in world.trained and len(world.order) >= 13)
        world.credit_error = BROKEN
        world.holds.clear()
        assert BROKEN in await failure_of(handle)
        seen = await memo(handle)
        assert seen["status"] == "failed" and seen["error"]["is_user_error"]
        assert seen["checkpoint"] == {"step": seen["step"]} == {"step": world.checkpoints[-1]}
        assert "no credit for train/9" in world.events
        world.credit_error = ""
        await goes_on(world, handle, seen["step"] + 3)


async def test_a_failure_waits_for_the_push_and_the_batch_that_trains_meanwhile(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await busy(world)
        world.credit_error = BROKEN
        world.holds = {"push 2"}
        await until(lambda: "no credit for train/13" in world.events)
        await handle.query("status")
        assert world.trained == [1, 2, 3] and (await memo(handle))["status"] == "running"
        world.holds.clear()
        assert BROKEN in await failure_of(handle)
        assert world.checkpoints == [3] and world.trained == [1, 2, 3] and not world.replayed
        assert [push.version for push in world.pushes] == [0, 1, 2, 3]
        world.credit_error = ""
        await goes_on(world, handle, 6, LAGS)


async def test_a_pause_for_a_failure_waits_for_the_push_too(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await busy(world)
        world.fail_group = TrainGroups()
        world.holds = {"push 2"}
        async with asyncio.timeout(WITHIN_S):
            while not await events(world, handle, "run.warning"):
                await asyncio.sleep(0.1)
        world.holds.clear()
        seen = await status(handle, "paused")
        assert "groups in a row had no rollout to train on" in seen["paused_because"]
        assert seen["step"] == 3 and seen["checkpoint"] == {"step": 3}
        world.fail_group = set()
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded"
        assert world.trained == [1, 2, 3, 4, 5, 6] and not world.replayed


async def test_a_first_eval_that_ends_the_run_ends_it_with_a_checkpoint(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.eval_error = "TaskError: boom"
        evals = {**config()["eval"], "skip_first_step": True}
        handle = await start(
            world, when_all_fail="end", eval=evals, checkpoint={"interval": 1000}, max_steps=1000
        )
        assert "boom" in await failure_of(handle)
        assert (await memo(handle))["checkpoint"] == {"step": world.checkpoints[-1]}
        assert world.checkpoints[-1] == max(world.trained) >= 3


async def test_a_batch_that_the_trainer_refuses_costs_no_step(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.refused_steps = {4}
        handle = await start(world, checkpoint={"interval": 1000}, eval={})
        assert "loss is nan at step 4" in await failure_of(handle)
        assert world.checkpoints == [3] and not world.replayed and world.loaded == [0]


async def test_a_failure_after_a_stop_goes_back_to_the_last_step_that_was_verified(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await ahead(world, checkpoint={"interval": 1000}, eval={})
        world.refuse_gate_at = Stubborn({2})
        await handle.signal("stop")
        world.holds.clear()
        assert "engine -1.5" in await failure_of(handle)
        assert world.checkpoints == [1] and world.replayed == [1]


async def test_a_checkpoint_that_fails_hides_no_failure(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=100, checkpoint={"interval": 1000}, eval={})
        await until(lambda: 2 in world.trained)
        world.broken_saves, world.credit_error = True, BROKEN
        assert BROKEN in await failure_of(handle)
        seen = await memo(handle)
        assert BROKEN in seen["error"]["message"] and seen["checkpoint"] is None
        assert any("no checkpoint of step" in text for text in seen["warnings"])


async def test_what_a_stop_gives_up_is_rolled_out_by_the_next_attempt(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"step 3", "train/14"}
        handle = await start(world, max_steps=100, checkpoint={"interval": 1000}, eval={})
        await until(lambda: "train/14/0" in world.started and 3 in world.batches)
        await handle.signal("stop")
        await until(lambda: "cancelled train/14" in world.events)
        world.holds.clear()
        assert (await handle.result())["status"] == "succeeded"
        await goes_on(world, handle, 6)
