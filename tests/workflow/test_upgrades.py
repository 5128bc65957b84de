"""Runs of earlier builds go on under the code as it is, and those of newer ones wait for theirs.

What is recorded (`tests/recorded`) is sent to the server as the JSON that it was; only queues and
addresses are those of the doubles.
"""

import asyncio
import json
import re
import uuid
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import Queues, attempt_id
from ratchet.activities.contracts.training import RestoreInput
from ratchet.configs.upgrades import CONFIG, config_document, read_config
from ratchet.configs.versions import Versions
from ratchet.workflows.protocol.messages import DISPATCH, HOST, TRAINING_RUN, RunInput
from ratchet.workflows.protocol.upgrades import RUN_INPUT, RUN_STATE
from tests.recorded import item
from tests.workflow.running import WITHIN_S, start, worker, world_of
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

RUN = "recorded-c8060e"
CHECKPOINT = item("checkpoints/step-00000006/run_state")
Handle = WorkflowHandle[Any, Any]


def same(data: Any) -> Any:
    """An upgrader of a schema that differs by nothing but its number."""
    return data


def new_world(client: Client) -> World:
    """A world that no worker serves yet."""
    return World(client, Queues(*[f"q-{uuid.uuid4().hex[:8]}"] * 5))


def moved(world: World, run: str, recorded: Any) -> Any:
    """A recorded value as one of `run` in `world`."""
    text = json.dumps(recorded).replace(RUN, run)
    text = re.sub(r'"ratchet-(orchestrator|rollout|trainer|inference|env)[^"]*"', "QUEUE", text)
    text = re.sub(r'"tcp://[^"]*"', '"env/0@1"', text)
    return json.loads(text.replace("QUEUE", json.dumps(world.queues.orchestrator)))


async def begin(world: World, **changes: Any) -> Handle:
    """Everything of the recorded run at step 5, as its executions stood there. `changes` are made
    to the input that the run continued as new with.
    """
    run, queue = f"run-{uuid.uuid4().hex[:8]}", world.queues.orchestrator

    async def execute(kind: str, name: str, place: str = "", **changed: Any) -> Handle:
        arg = {**moved(world, run, item(name)), **changed}
        return await world.client.start_workflow(kind, arg, id=run + place, task_queue=queue)

    for role in ("trainer", "engine", "env"):
        await execute(HOST, f"host_input.{role}", f"/host/{role}/0")
    handle = await execute(TRAINING_RUN, "run_input.step-5", **changes)
    await execute(DISPATCH, "dispatch_input.3", "/dispatch/3")
    world.trainer_step, world.trainer_epoch, world.trained = 5, 1, [1, 2, 3, 4, 5]
    return handle


def check_goes_on(world: World, before: list[int], last: int) -> None:
    """All steps after those `before` were trained once, on the examples that follow theirs."""
    first = before[-1] + 1
    assert world.trained == [*before, *range(first, last + 1)] and world.replayed == []
    shipped = [group for step in sorted(world.batches) for group in world.batches[step]]
    assert max(world.rolled_out.values()) == 1 and len(shipped) == len(set(shipped))
    # Batches of 8 groups; 6 of them were shipped when the items were recorded.
    counters = {int(group.partition(".")[0].removeprefix("train/")) for group in shipped}
    assert counters == set(range(48, 8 * last))


async def test_a_recorded_run_goes_on_to_its_end(temporal: Client) -> None:
    world = new_world(temporal)
    handle = await begin(world)
    async with worker(world):
        result = await temporal.get_workflow_handle(handle.id).result()
    assert (result["status"], result["step"], result["name"]) == ("succeeded", 14, "recorded")
    assert result["created_at"] == "2026-11-22T16:01:31.125Z"
    assert result["metadata"] == {"owner": "ana"} and result["config_revision"] == 1
    # Those of before are counted, too: a batch of 32 rollouts was shipped for every step.
    assert result["rollouts"] == {"train": 14 * 32, "eval": 8 + 3 * 8}
    check_goes_on(world, [1, 2, 3, 4, 5], 14)
    assert set(world.revisions.values()) == {1} and world.loaded == []
    assert world.epochs == {"trainer/0": 1, "engine/0": 1, "env/0": 1}, "nothing restarted"
    # Its last continue-as-new and its checkpoint carry the numbers.
    saved = json.loads(world.saved[handle.id][14])
    assert (saved["schema"], saved["state"]["schema"], saved["config"]["schema"]) == (1, 1, 1)


@pytest.mark.parametrize("kind", ["resume", "fork"])
async def test_a_recorded_checkpoint_goes_on(temporal: Client, kind: str) -> None:
    async with world_of(temporal) as world:
        source = f"run-{uuid.uuid4().hex[:8]}"
        run = attempt_id(source, 2) if kind == "resume" else f"{source}-fork"
        world.saved[source] = {6: json.dumps(moved(world, source, CHECKPOINT))}
        plain = config_document(read_config(item("config.1")))
        arg = RunInput(run, plain, world.queues, restore=RestoreInput(run, source))
        handle: Handle = await temporal.start_workflow(
            TRAINING_RUN, arg, id=run.partition("+")[0], task_queue=world.queues.orchestrator
        )
        world.trained = [1, 2, 3, 4, 5, 6]
        result = await handle.result()
        assert (result["status"], result["step"]) == ("succeeded", 14)
        assert result["lineage"] == {"source": source, "step": 6, "kind": kind}
        assert world.loaded == [6]
        check_goes_on(world, [1, 2, 3, 4, 5, 6], 14)


async def refusal(handle: Handle) -> str:
    """Why the run's newest workflow task failed, once it did."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            async for event in handle.fetch_history_events():
                failure = event.workflow_task_failed_event_attributes.failure
                while failure.HasField("cause"):
                    failure = failure.cause
                if failure.message:
                    return f"{failure.application_failure_info.type}: {failure.message}"
            await asyncio.sleep(0.1)


async def check_waits_for(
    handle: Handle, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stands still, unharmed, until its worker knows the next schema."""
    reason = await refusal(handle)
    assert reason.startswith(f"NewerSchema: {versions.what} has schema 2")
    assert "Start a worker of the newer build" in reason
    assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    monkeypatch.setitem(versions.upgrades, 1, same)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [RUN_INPUT, RUN_STATE, CONFIG], ids=["input", "state", "config"])
async def test_a_newer_input_waits_for_the_worker_that_reads_it(
    temporal: Client, monkeypatch: pytest.MonkeyPatch, part: Versions
) -> None:
    world = new_world(temporal)
    recorded = item("run_input.step-5")
    plain = {**recorded["config"], "max_steps": 7}
    state = moved(world, RUN, recorded["state"])
    changes = {
        RUN_INPUT.what: {"schema": 2, "config": plain},
        RUN_STATE.what: {"state": {**state, "schema": 2}, "config": plain},
        CONFIG.what: {"config": {**plain, "schema": 2}},
    }
    handle = await begin(world, **changes[part.what])
    async with worker(world):
        await check_waits_for(handle, part, monkeypatch)
        assert world.started == []
        result = await temporal.get_workflow_handle(handle.id).result()
    assert (result["status"], result["step"]) == ("succeeded", 7)
    check_goes_on(world, [1, 2, 3, 4, 5], 7)


async def test_a_newer_checkpoint_waits_for_the_worker_that_reads_it(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(temporal) as world:
        run = f"run-{uuid.uuid4().hex[:8]}"
        newer = {**CHECKPOINT, "state": {**CHECKPOINT["state"], "schema": 2}}
        world.saved["source"] = {6: json.dumps(moved(world, "source", newer))}
        plain = {**item("config.1"), "max_steps": 8}
        arg = RunInput(run, plain, world.queues, restore=RestoreInput(run, "source"))
        handle: Handle = await temporal.start_workflow(
            TRAINING_RUN, arg, id=run, task_queue=world.queues.orchestrator
        )
        world.trained = [1, 2, 3, 4, 5, 6]
        await check_waits_for(handle, RUN_STATE, monkeypatch)
        result = await temporal.get_workflow_handle(run).result()
        assert (result["status"], result["step"]) == ("succeeded", 8)
        check_goes_on(world, [1, 2, 3, 4, 5, 6], 8)


async def test_checks_by_workers_that_are_too_old_are_waited_for(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.store_fails[names.CHECK_ENVS] = 2
        handle = await start(world, max_steps=1)
        assert (await handle.result())["status"] == "succeeded"
        assert world.events.count("no store for check_envs") == 2
