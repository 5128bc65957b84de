"""Runs of earlier builds go on under the code as it is, and those of newer ones wait for theirs.

What is recorded (`tests/recorded`) is sent to the server as the JSON that it was; only queues and
addresses are those of the doubles.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import Queues, attempt_id
from ratchet.activities.contracts.training import RestoreInput
from ratchet.activities.contracts.upgrades import HOST_INPUT
from ratchet.configs.upgrades import CONFIG, config_document, read_config
from ratchet.configs.versions import Versions
from ratchet.workflows.protocol.messages import DISPATCH, HOST, TRAINING_RUN, RunInput
from ratchet.workflows.protocol.upgrades import (
    DISPATCH_INPUT,
    HOST_WORKFLOW_INPUT,
    RUN_INPUT,
    RUN_STATE,
)
from tests.recorded import item
from tests.workflow.running import WITHIN_S, start, worker, world_of
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Handle = WorkflowHandle[Any, Any]
Newer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """A recorded run, which goes on at step 5 with env servers `envs`. Of a `generation` under way
    there is the input; without one the run finds that its generation is gone.
    """

    build: str
    run: str
    last: int
    revision: int
    created_at: str
    envs: tuple[str, ...]
    generation: str

    def item(self, name: str) -> Any:
        """A recorded JSON value."""
        return item(name, self.build)

    @property
    def checkpoint(self) -> Any:
        """That of step 6."""
        return self.item("checkpoints/step-00000006/run_state")

    @property
    def config(self) -> Any:
        """The newest revision."""
        return self.item(f"config.{self.revision}")


FIRST = Recorded(
    "c20687b", "recorded-c8060e", 14, 1, "2026-11-22T16:01:31.125Z", ("env",), "dispatch_input.3"
)
FLAT = Recorded(
    "c49e718", "recorded-8bc05a", 12, 2, "2026-11-22T23:04:12.183Z", ("env", "env-1"), ""
)
RUNS = pytest.mark.parametrize(
    "recorded",
    [FIRST, pytest.param(FLAT, marks=pytest.mark.long)],
    ids=lambda recorded: recorded.build,
)


def same(data: Any) -> Any:
    """An upgrader of a schema that differs by nothing but its number."""
    return data


def new_world(client: Client) -> World:
    """A world that no worker serves yet."""
    return World(client, Queues(*[f"q-{uuid.uuid4().hex[:8]}"] * 5))


def moved(world: World, run: str, recorded: Any) -> Any:
    """A recorded value as one of `run` in `world`."""
    text = json.dumps(recorded).replace(FIRST.run, run).replace(FLAT.run, run)
    text = re.sub(r'"ratchet-(orchestrator|rollout|trainer|inference|env)[^"]*"', "QUEUE", text)
    text = re.sub(r'"tcp://[^"]*"', '"env/0@1"', text)
    return json.loads(text.replace("QUEUE", json.dumps(world.queues.orchestrator)))


async def begin(
    world: World, recorded: Recorded, newer: Mapping[str, Newer] | None = None, **changes: Any
) -> Handle:
    """Everything of the recorded run at step 5, as its executions stood there. `newer` makes other
    inputs of the items that it names, and `changes` are made to the one that the run continued as
    new with.
    """
    run, queue = f"run-{uuid.uuid4().hex[:8]}", world.queues.orchestrator

    async def execute(kind: str, name: str, place: str = "", **changed: Any) -> Handle:
        arg = {**moved(world, run, recorded.item(name)), **changed}
        arg = (newer or {}).get(name, same)(arg)
        return await world.client.start_workflow(kind, arg, id=run + place, task_queue=queue)

    for index, env in enumerate(recorded.envs):
        await execute(HOST, f"host_input.{env}", f"/host/env/{index}")
    for role in ("trainer", "engine"):
        await execute(HOST, f"host_input.{role}", f"/host/{role}/0")
    handle = await execute(TRAINING_RUN, "run_input.step-5", **changes)
    if name := recorded.generation:
        await execute(DISPATCH, name, f"/dispatch/{name.rpartition('.')[2]}")
    world.trainer_step, world.trainer_epoch, world.trained = 5, 1, [1, 2, 3, 4, 5]
    return handle


def check_goes_on(world: World, before: list[int], last: int) -> None:
    """All steps after those `before` were trained once, on the examples that follow theirs."""
    first = before[-1] + 1
    assert world.trained == [*before, *range(first, last + 1)] and world.replayed == []
    shipped = [group for step in sorted(world.batches) for group in world.batches[step]]
    assert max(world.rolled_out.values()) == 1 and len(shipped) == len(set(shipped))
    # Batches of 8 groups; 6 of them were shipped when the items were recorded. A group that the
    # pause gave up is rolled out under its old id.
    counters = {int(group.partition(".")[0].removeprefix("train/")) for group in shipped}
    assert counters == set(range(48, 8 * last))


@RUNS
async def test_a_recorded_run_goes_on_to_its_end(temporal: Client, recorded: Recorded) -> None:
    world, last = new_world(temporal), recorded.last
    handle = await begin(world, recorded)
    async with worker(world):
        result = await temporal.get_workflow_handle(handle.id).result()
    assert (result["status"], result["step"], result["name"]) == ("succeeded", last, "recorded")
    assert result["created_at"] == recorded.created_at
    assert result["metadata"] == {"owner": "ana"}
    assert result["config_revision"] == recorded.revision
    # Those of before are counted, too: a batch of 32 rollouts was shipped for every step.
    evals = len(range(0, last + 1, recorded.config["eval"]["interval"]))
    evals += last % recorded.config["eval"]["interval"] > 0
    assert result["rollouts"] == {"train": last * 32, "eval": evals * 8}
    check_goes_on(world, [1, 2, 3, 4, 5], last)
    assert set(world.revisions.values()) == {recorded.revision} and world.loaded == []
    envs = {f"env/{index}": 1 for index in range(len(recorded.envs))}
    assert world.epochs == {"trainer/0": 1, "engine/0": 1, **envs}, "nothing restarted"
    # Its last continue-as-new and its checkpoint carry the numbers.
    saved = json.loads(world.saved[handle.id][last])
    assert (saved["schema"], saved["state"]["schema"], saved["config"]["schema"]) == (1, 4, 7)


@RUNS
@pytest.mark.parametrize("kind", ["resume", "fork"])
async def test_a_recorded_checkpoint_goes_on(
    temporal: Client, kind: str, recorded: Recorded
) -> None:
    async with world_of(temporal) as world:
        source = f"run-{uuid.uuid4().hex[:8]}"
        run = attempt_id(source, 2) if kind == "resume" else f"{source}-fork"
        world.saved[source] = {6: json.dumps(moved(world, source, recorded.checkpoint))}
        plain = config_document(read_config(recorded.config))
        # The doubles' preflight would count other examples than those that its curriculum knows.
        examples = recorded.checkpoint["state"]["examples"]
        restore = RestoreInput(run, source)
        arg = RunInput(run, plain, world.queues, examples, restore=restore)
        handle: Handle = await temporal.start_workflow(
            TRAINING_RUN, arg, id=run.partition("+")[0], task_queue=world.queues.orchestrator
        )
        world.trained = [1, 2, 3, 4, 5, 6]
        result = await handle.result()
        assert (result["status"], result["step"]) == ("succeeded", recorded.last)
        assert result["lineage"] == {"source": source, "step": 6, "kind": kind}
        assert world.loaded == [6]
        check_goes_on(world, [1, 2, 3, 4, 5, 6], recorded.last)


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
    reason, number = await refusal(handle), versions.current
    assert reason.startswith(f"NewerSchema: {versions.what} has schema {number + 1}")
    assert "Start a worker of the newer build" in reason
    assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    monkeypatch.setitem(versions.upgrades, number, same)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [RUN_INPUT, RUN_STATE, CONFIG], ids=["input", "state", "config"])
async def test_a_newer_input_waits_for_the_worker_that_reads_it(
    temporal: Client, monkeypatch: pytest.MonkeyPatch, part: Versions
) -> None:
    world = new_world(temporal)
    recorded = FIRST.item("run_input.step-5")
    plain = {**recorded["config"], "max_steps": 7}
    state = RUN_STATE.upgraded(moved(world, FIRST.run, recorded["state"]))
    changes = {
        RUN_INPUT.what: {"schema": RUN_INPUT.current + 1, "cores": 0, "config": plain},
        RUN_STATE.what: {"state": {**state, "schema": RUN_STATE.current + 1}, "config": plain},
        CONFIG.what: {"config": {**CONFIG.upgraded(plain), "schema": CONFIG.current + 1}},
    }
    handle = await begin(world, FIRST, **changes[part.what])
    async with worker(world):
        await check_waits_for(handle, part, monkeypatch)
        assert world.started == []
        result = await temporal.get_workflow_handle(handle.id).result()
    assert (result["status"], result["step"]) == ("succeeded", 7)
    check_goes_on(world, [1, 2, 3, 4, 5], 7)


@pytest.mark.parametrize(
    ("part", "name", "place"),
    [
        (DISPATCH_INPUT, "dispatch_input.3", "dispatch/3"),
        (HOST_WORKFLOW_INPUT, "host_input.engine", "host/engine/0"),
        (HOST_INPUT, "host_input.engine", "host/engine/0"),
    ],
    ids=lambda part: part.what if isinstance(part, Versions) else "",
)
async def test_newer_work_of_a_run_waits_for_the_worker_that_reads_it(
    temporal: Client, monkeypatch: pytest.MonkeyPatch, part: Versions, name: str, place: str
) -> None:
    def raised(data: dict[str, Any]) -> dict[str, Any]:
        if part is HOST_INPUT and "host" in data:
            return {**data, "host": raised(data["host"])}
        return {**part.upgraded(data), "schema": part.current + 1}

    world = new_world(temporal)
    plain = {**FIRST.item("run_input.step-5")["config"], "max_steps": 7}
    handle = await begin(world, FIRST, {name: raised}, config=plain)
    async with worker(world):
        waits: Handle = temporal.get_workflow_handle(f"{handle.id}/{place}")
        await check_waits_for(waits, part, monkeypatch)
        result = await temporal.get_workflow_handle(handle.id).result()
    assert (result["status"], result["step"]) == ("succeeded", 7)
    check_goes_on(world, [1, 2, 3, 4, 5], 7)


async def test_a_newer_checkpoint_waits_for_the_worker_that_reads_it(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(temporal) as world:
        run = f"run-{uuid.uuid4().hex[:8]}"
        newer = {**FIRST.checkpoint, "state": RUN_STATE.upgraded(FIRST.checkpoint["state"])}
        newer["state"]["schema"] += 1
        world.saved["source"] = {6: json.dumps(moved(world, "source", newer))}
        plain = {**FIRST.config, "max_steps": 8}
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
