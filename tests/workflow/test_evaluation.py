"""Evaluations on a real server: runs without a trainer, and one that begins after another."""

from datetime import datetime
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from ratchet.activities.contracts.names import HOST_SERVER
from ratchet.workflows.run.pausing import PAUSED_AT_MOST
from tests.workflow.running import start, status, until, world_of
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ENVS: dict[str, Any] = {
    "env": [{"id": "reverse-text"}, {"id": "reverse-text", "name": "other"}],
    "num_examples": 6,
    "group_size": 2,
}
ALONE: dict[str, Any] = {"max_steps": 0, "train": {"env": []}, "eval": ENVS}


async def evaluated(world: World, handle: WorkflowHandle[Any, Any]) -> None:
    """The witness of an evaluation: every example of each env once, and nothing of training."""
    result = await handle.result()
    assert (result["status"], result["end_reason"]) == ("succeeded", "all evals are done")
    assert (result["step"], result["max_steps"], result["checkpoint"]) == (0, 0, None)
    assert result["envs"] == ["reverse-text", "other"]
    assert {env: found["reward"] for env, found in result["eval"].items()} == {
        "reverse-text": 0.5,
        "other": 0.5,
    }
    assert sorted((e.env, e.num_examples, e.group_size) for e in world.evals) == [
        ("other", 6, 2),
        ("reverse-text", 6, 2),
    ]
    groups = {f"eval/0-{n}/{env}/{k}" for n, env in enumerate(result["envs"]) for k in range(6)}
    assert {name.rpartition("/")[0] for name in world.rolled_out} == groups
    assert not (world.trained or world.checkpoints or world.loaded or world.batches)
    assert not [host for host in world.epochs if host.startswith("trainer/")]


async def test_an_evaluation_has_no_trainer_and_no_batch(temporal: Client) -> None:
    async with world_of(temporal, cached=0) as world:
        handle = await start(world, **ALONE)
        await evaluated(world, handle)
        attributes = (await handle.describe()).typed_search_attributes
        assert {key.name: value for key, value in attributes}["RatchetEnv"] == "reverse-text"
        assert [push.version for push in world.pushes] == [0], "its engine was verified"


async def test_an_evaluation_goes_on_over_lost_servers_and_a_pause(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        handle = await start(world, **ALONE)
        await until(lambda: world.executing > 0)
        world.kill("engine/0")
        await until(lambda: world.epochs["engine/0"] == 2)
        await handle.signal("pause", {"mode": "cancel"})
        await status(handle, "paused")
        assert world.serving == 0
        world.flowing.set()
        await handle.signal("resume")
        await evaluated(world, handle)


@pytest.mark.long
async def test_a_long_evaluation_continues_as_new(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.2
        evals = {**ENVS, "num_examples": 40}
        permits = {"max_inflight_rollouts": 2, "generation_events": 100}
        handle = await start(world, **{**ALONE, "eval": evals, "dispatch": permits})
        result = await handle.result()
        assert result["status"] == "succeeded" and result["rollouts"]["eval"] == 160
        assert sorted((e.env, e.num_examples) for e in world.evals) == [
            ("other", 40),
            ("reverse-text", 40),
        ]
        last = await temporal.get_workflow_handle(handle.id).describe()
        assert last.run_id != handle.first_execution_run_id, "it never continued as new"


async def test_an_evaluation_that_fails_alike_rests_until_it_is_resumed(temporal: Client) -> None:
    """Without a trainer there is nothing to save on the way to its rest."""
    async with world_of(temporal) as world:
        world.eval_error = "TaskError: no such column"
        handle = await start(world, **ALONE)
        seen = await status(handle, "paused")
        assert "no such column" in seen["paused_because"] and world.serving == 0
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert {found["failed"] for found in result["eval"].values()} == {12}


async def test_an_evaluation_that_paused_without_a_reward_evaluates_again(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.eval_error = "TaskError: no such column"
        handle = await start(world, **ALONE)
        await status(handle, "paused")
        world.eval_error = ""
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded"
        rewards = {env: found["reward"] for env, found in result["eval"].items()}
        assert rewards == {"reverse-text": 0.5, "other": 0.5}


async def test_a_run_begins_once_the_one_before_it_has_ended(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        first = await start(world, **ALONE)
        await until(lambda: world.executing > 0)
        second = await start(world, **ALONE, after=first.id)
        seen = await status(second, "queued")
        await until(lambda: f"looked at {first.id}" in world.events)
        assert seen["started_at"] is None
        # Neither a server nor a policy is taken for it meanwhile.
        history = await second.fetch_history()
        started = [
            event.activity_task_scheduled_event_attributes.activity_type.name
            for event in history.events
        ]
        assert HOST_SERVER not in started and "prepare_policy" not in started
        waits = (await second.query("status"))["waiting_for"]
        assert "to end" in waits["name"]
        since, until_ = (datetime.fromisoformat(waits[key]) for key in ("since", "until"))
        assert until_ - since >= PAUSED_AT_MOST, "the one before it may be paused for long"
        await first.signal("stop")
        world.flowing.set()
        await first.result()
        assert (await second.result())["status"] == "succeeded"


async def test_a_version_is_copied_before_the_run_waits(temporal: Client) -> None:
    """The run that it is of goes on, and keeps its versions for a while only."""
    async with world_of(temporal) as world:
        world.flowing.clear()
        first = await start(world, **ALONE)
        model = {"name": "run:reverse-1a2b3c@40"}
        second = await start(world, **ALONE, after=first.id, model=model)
        await until(lambda: f"looked at {first.id}" in world.events)
        started = [
            event.activity_task_scheduled_event_attributes.activity_type.name
            for event in (await second.fetch_history()).events
        ]
        assert "prepare_policy" in started and HOST_SERVER not in started
        assert (await status(second, "queued"))["started_at"] is None
        await first.signal("stop")
        world.flowing.set()
        await first.result()
        assert (await second.result())["status"] == "succeeded"


async def test_a_run_that_waits_for_another_can_be_stopped(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        first = await start(world, **ALONE)
        second = await start(world, **ALONE, after=first.id)
        await until(lambda: f"looked at {first.id}" in world.events)
        await second.signal("stop", {"reason": "not needed"})
        assert "not needed" in (await second.result())["end_reason"]
        await first.signal("stop")
        world.flowing.set()
        await first.result()
