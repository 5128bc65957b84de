"""Pausing and resuming on a real server: nothing runs meanwhile, and nothing is lost by it."""

from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from ratchet.workflows.rules.fleet import MAX_DOWNS
from tests.workflow.running import at_rest, check_exactly_once, start, status, until, world_of
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def rests(world: World, handle: WorkflowHandle[Any, Any]) -> None:
    """The witness of a pause: nothing is rolled out, trained or served."""
    assert world.serving == 0
    # Nobody waits for rollouts that were given up; they hear of it a moment later.
    await until(lambda: world.executing == 0)
    done = (len(world.started), len(world.trained), len(world.pushes))
    await at_rest(handle, world.client)
    assert done == (len(world.started), len(world.trained), len(world.pushes))
    assert world.executing == 0 and world.serving == 0


@pytest.mark.parametrize("mode", ["drain", "cancel"])
async def test_pause_frees_every_server_and_resume_goes_on_where_it_stood(
    temporal: Client, mode: str
) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.3
        handle = await start(world, max_steps=8)
        await until(lambda: len(world.trained) >= 2)
        world.flowing.clear()
        await until(lambda: world.executing > 0)
        await handle.signal("pause", {"mode": mode, "reason": "the machine is needed"})
        if mode == "drain":
            world.flowing.set()
        seen = await status(handle, "paused")
        world.flowing.set()
        assert world.checkpoints[-1] == seen["step"] == len(world.trained) < 8
        assert seen["pause_reason"] == "the machine is needed" and seen["paused_because"] is None
        await rests(world, handle)
        cancelled = [event for event in world.events if event.startswith("cancelled")]
        assert bool(cancelled) == (mode == "cancel")
        assert (await handle.query("status"))["waiting_for"]["name"] == "resume"
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 8
        assert world.epochs["trainer/0"] == 2 and world.epochs["engine/0"] == 2
        assert set(result["restarts"].values()) == {0}, "a pause is no restart"
        assert result["pause_reason"] is None
        assert world.loaded == [0, seen["step"]], "the trainer came back from the checkpoint"
        if mode == "drain":
            check_exactly_once(world, 8)
        assert world.trained == list(range(1, 9)) and not world.replayed
        shipped = [group for groups in world.batches.values() for group in groups]
        assert len(set(shipped)) == len(shipped) == 32
        # Under its own id what a group had finished is adopted: none begins anew under another.
        assert not [group for group in shipped if "." in group]
        assert sorted((e.step, e.num_examples) for e in world.evals) == [
            (0, 4),
            (3, 4),
            (6, 4),
            (8, 4),
        ]


async def test_an_env_whose_server_dies_again_and_again_pauses_its_run(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        handle = await start(world, max_steps=2, eval={})
        for epoch in range(1, MAX_DOWNS + 1):
            await until(lambda epoch=epoch: world.epochs["env/0"] == epoch and world.executing > 0)
            world.kill("env/0")
        seen = await status(handle, "paused")
        assert f"reverse-text failed {MAX_DOWNS} times in a row" in seen["paused_because"]
        # The next attempt may have come up before the pause closed the host.
        assert world.serving == 0
        last = world.epochs["env/0"]
        await handle.signal("resume")
        await until(lambda: world.epochs["env/0"] == last + 1 and world.executing > 0)
        # The deaths before the pause count no longer.
        world.kill("env/0")
        await until(lambda: world.epochs["env/0"] == last + 2)
        world.flowing.set()
        result = await handle.result()
        assert result["status"] == "succeeded" and world.epochs["env/0"] == last + 2


async def test_requests_that_wait_for_a_step_are_shown_at_once(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"step 2"}
        handle = await start(world, max_steps=1000, eval={})
        await until(lambda: len(world.trained) == 1 and 2 in world.batches)
        await handle.signal("pause", {"reason": "the machine is needed"})
        seen = await status(handle, "pausing")
        assert seen["pause_reason"] == "the machine is needed"
        await handle.signal("resume")
        seen = await status(handle, "running")
        assert seen["pause_reason"] is None
        await handle.signal("stop", "enough")
        await status(handle, "stopping")
        assert world.trained == [1], "the step goes on"
        world.holds = set()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 2


@pytest.mark.long
async def test_two_pauses_with_hand_overs_between_them(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=16, dispatch={"generation_events": 120})
        for trained in (3, 8):
            await until(lambda trained=trained: len(world.trained) >= trained)
            world.flowing.clear()
            await handle.signal("pause")
            world.flowing.set()
            await status(handle, "paused")
            await rests(world, handle)
            await handle.signal("resume")
        result = await handle.result()
        assert result["step"] == 16 and world.epochs["engine/0"] == 3
        check_exactly_once(world, 16)


async def test_stop_ends_a_paused_run_and_resume_of_a_running_one_does_nothing(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000)
        await until(lambda: len(world.trained) >= 1)
        await handle.signal("resume")
        await handle.signal("pause", "drain")
        seen = await status(handle, "paused")
        await handle.signal("stop", "enough")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == seen["step"]
        assert world.checkpoints[-1] == seen["step"]
