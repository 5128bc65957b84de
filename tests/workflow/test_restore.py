"""From a checkpoint: an ended run that goes on under its id, and forks of a run."""

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDReusePolicy

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.contracts.training import RestoreInput
from ratchet.workflows.protocol.messages import MEMO_KEY, RunInput
from tests.workflow.running import (
    WITHIN_S,
    config,
    generations_of,
    memo,
    settled,
    start,
    status,
    until,
    world_of,
)
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def resume(
    world: World, run: str, attempt: int, shown: dict[str, Any] | None = None, **overrides: Any
) -> WorkflowHandle[Any, Any]:
    """Goes on with an ended run, as attempt `attempt`, which the API shows as `shown`."""
    before, after = attempt_id(run, attempt - 1), attempt_id(run, attempt)
    arg = RunInput(after, config(**overrides), world.queues, restore=RestoreInput(after, before))
    return await world.client.start_workflow(
        "TrainingRun",
        arg,
        id=run,
        task_queue=world.queues.orchestrator,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        memo={MEMO_KEY: shown or {}},
    )


async def fork(
    world: World, source: str, step: int | None = None, **overrides: Any
) -> WorkflowHandle[Any, Any]:
    """A run of its own that begins with a checkpoint of `source`."""
    run = f"{source}-fork"
    restore = RestoreInput(run, source, step)
    arg = RunInput(run, config(**overrides), world.queues, created_at="2026-02-02", restore=restore)
    return await world.client.start_workflow(
        "TrainingRun", arg, id=run, task_queue=world.queues.orchestrator
    )


async def ended(handle: WorkflowHandle[Any, Any]) -> None:
    """Waits for a run that does not succeed."""
    with pytest.raises(WorkflowFailureError):
        await handle.result()


@pytest.mark.parametrize("how", ["cancel", pytest.param("terminate", marks=pytest.mark.long)])
async def test_ended_run_goes_on_from_its_last_checkpoint_under_its_id(
    temporal: Client, how: str
) -> None:
    async with world_of(temporal) as world:
        # Long enough that rollouts are still to be done, however late the checkpoint is noticed.
        handle = await start(world, max_steps=24)
        await until(lambda: 4 in world.checkpoints)
        # Whatever was under way when the run ends would be done all the same.
        world.flowing.clear()
        await settled(handle, temporal)
        while not world.executing:
            world.flowing.set()
            await until(lambda: world.executing > 0)
            world.flowing.clear()
            await settled(handle, temporal)
        await (handle.cancel() if how == "cancel" else handle.terminate("as an operator would"))
        await ended(handle)
        await until(lambda: world.executing == 0 or how == "terminate")
        world.flowing.set()
        step = world.checkpoints[-1]
        lost = [n for n in world.batches if n > step]
        for n in lost:
            del world.batches[n]
        world.trained = [n for n in world.trained if n <= step]
        again = await resume(world, handle.id, 2, max_steps=24)
        result = await again.result()
        assert result["status"] == "succeeded" and result["step"] == 24
        assert (result["attempt"], result["lineage"]) == (
            2,
            {"source": handle.id, "step": step, "kind": "resume"},
        )
        assert f"restored {handle.id} at {step}" in world.events
        assert world.restored == [False, True]
        assert world.trained == list(range(1, 25)) and world.loaded[-1] == step
        shipped = [group for groups in world.batches.values() for group in groups]
        assert len(shipped) == len(set(shipped)) == 96
        assert {group.split(".")[0] for group in shipped} == {f"train/{n}" for n in range(96)}
        # Its generations carry the id of the attempt.
        assert await generations_of(temporal, f"{handle.id}+2")


async def test_terminated_run_leaves_no_server_to_the_attempt_that_follows(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000)
        await until(lambda: 2 in world.checkpoints)
        world.flowing.clear()
        await settled(handle, temporal)
        left = await generations_of(temporal, handle.id)
        await handle.terminate("as an operator would")
        world.flowing.set()
        again = await resume(world, handle.id, 2, max_steps=1000)
        await until(lambda: any(e.startswith("restored") for e in world.events))
        step = len(world.trained)
        await until(lambda: len(world.trained) + len(world.replayed) > step + 3)
        seen = await memo(again)
        assert seen["attempt"] == 2 and seen["status"] == "running"
        for generation in left:
            # Nothing else ends it: the run that it belonged to is gone.
            await temporal.get_workflow_handle(generation).result()
        await again.signal("stop")
        assert (await again.result())["status"] == "succeeded"


async def test_fork_begins_with_a_checkpoint_and_a_config_of_its_own(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=6)
        assert (await handle.result())["step"] == 6
        before = {n: list(groups) for n, groups in world.batches.items()}
        world.batches.clear()
        world.trained.clear()
        forked = await fork(world, handle.id, 4, max_steps=8, trainer={"optim": {"lr": 1e-4}})
        result = await forked.result()
        assert (result["step"], result["attempt"]) == (8, 1)
        assert result["lineage"] == {"source": handle.id, "step": 4, "kind": "fork"}
        assert result["created_at"] == "2026-02-02"
        assert world.trained == [5, 6, 7, 8] and world.loaded[-1] == 4
        drawn = {group.split(".")[0] for groups in world.batches.values() for group in groups}
        earlier = {group.split(".")[0] for n in range(1, 5) for group in before[n]}
        assert len(drawn) == 16 and not drawn & earlier, "the data go on where they stood"
        assert (await memo(handle))["step"] == 6


async def test_a_fork_that_is_resumed_before_its_first_checkpoint_stays_one(
    temporal: Client,
) -> None:
    lineage = {"source": "before", "step": 4, "kind": "fork"}
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=2)
        await handle.result()
        world.holds = {"trainer/0"}
        again = await resume(world, handle.id, 2, {"lineage": lineage}, max_steps=4)
        seen = await status(again, "starting")
        assert seen["lineage"] == lineage
        world.holds = set()
        assert (await again.result())["lineage"] == lineage


async def test_fork_on_other_data_goes_through_it_from_the_start(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=4)
        await handle.result()
        world.batches.clear()
        world.trained.clear()
        train = {"env": [{"id": "reverse-retry"}], "batch_size": 8, "group_size": 2}
        result = await (await fork(world, handle.id, 4, max_steps=6, train=train)).result()
        assert result["step"] == 6 and world.trained == [5, 6]
        groups = [group for groups in world.batches.values() for group in groups]
        assert set(groups) == {f"train/{n}" for n in range(8)}


async def test_checkpoint_signal_commits_one_before_the_next_step(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, checkpoint={"interval": 500})
        await until(lambda: len(world.trained) >= 2)
        assert not world.checkpoints
        world.rollout_s = 3600
        await handle.signal("checkpoint")
        await until(lambda: len(world.checkpoints) == 1)
        async with asyncio.timeout(WITHIN_S):
            while (await memo(handle))["checkpoint"] != {"step": world.checkpoints[0]}:
                await asyncio.sleep(0.05)
        assert not (await memo(handle)).get("warnings")
        # Nothing trains meanwhile, so that there is nothing more to save.
        await handle.signal("checkpoint")
        said = f"checkpoint: step {world.checkpoints[0]} is saved, none was written"
        async with asyncio.timeout(WITHIN_S):
            while said not in ((await memo(handle)).get("warnings") or ()):
                await asyncio.sleep(0.05)
        assert len(world.checkpoints) == 1
        await handle.signal("stop")
        await handle.result()


async def statuses(handle: WorkflowHandle[Any, Any]) -> list[str]:
    """What the newest execution of a run has said that it is, in order."""
    told: list[str] = []
    async for event in handle.fetch_history_events():
        started = event.workflow_execution_started_event_attributes
        modified = event.workflow_properties_modified_event_attributes
        for fields in (started.memo.fields, modified.upserted_memo.fields):
            if MEMO_KEY in fields:
                told.append(json.loads(fields[MEMO_KEY].data).get("status"))
    return told


async def test_a_fork_that_goes_on_was_never_paused(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=6)
        await handle.result()
        world.trained.clear()
        forked = await fork(world, handle.id, 4, max_steps=6)
        await forked.result()
        said = await statuses(temporal.get_workflow_handle(forked.id))
        assert "paused" not in said and "starting" in said


async def test_a_fork_that_is_stopped_before_it_is_restored_names_the_step_it_forks(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=6)
        await handle.result()
        run = f"{handle.id}-fork"
        restore = RestoreInput(run, handle.id, 4)
        forked = await temporal.start_workflow(
            "TrainingRun",
            RunInput(run, config(max_steps=6), world.queues, restore=restore),
            id=run,
            task_queue=world.queues.orchestrator,
            memo={MEMO_KEY: {"status": "queued", "step": 4}},
            start_signal="stop",
            start_signal_args=[{"reason": "enough"}],
        )
        assert (await forked.result())["end_reason"] == "stopped at step 4: enough"
        assert not any(event.startswith("restored") for event in world.events)


async def test_a_run_that_is_cancelled_before_it_is_restored_stands_where_it_stood(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=9)
        await until(lambda: 4 in world.checkpoints)
        await handle.cancel()
        await ended(handle)
        world.holds.add("restore")
        arg = RunInput(
            f"{handle.id}+2",
            config(max_steps=9),
            world.queues,
            restore=RestoreInput(f"{handle.id}+2", handle.id),
        )
        said = {"step": 4, "checkpoint": {"step": 4}, "reward": 0.5}
        again = await world.client.start_workflow(
            "TrainingRun",
            arg,
            id=handle.id,
            task_queue=world.queues.orchestrator,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            memo={MEMO_KEY: {"status": "queued", **said}},
        )
        await until(lambda: "restoring" in world.events)
        assert (await memo(again))["step"] == 4
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await again.execute_update("change_config", {"max_steps": 20})
        assert "is being restored and accepts no changes yet" in str(refused.value.cause)
        await again.cancel()
        await ended(again)
        seen = await memo(again)
        assert seen["status"] == "cancelled"
        assert {key: seen[key] for key in said} == said
        world.holds.clear()
