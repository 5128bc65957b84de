"""Starts runs in a world of doubles, and reads what became of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.names import HOST_SERVER, RUN_ROLLOUTS, Queues
from ratchet.api.schemas.events import EVENT_TYPES
from ratchet.api.temporal.event_log import EventBuilder
from ratchet.api.temporal.histories import _decode
from ratchet.configs.load import validate
from ratchet.worker.compat import Worker
from ratchet.worker.roles import HEARTBEATS_AT_LEAST_EVERY
from ratchet.worker.sandbox import SANDBOX
from ratchet.workflows.dispatch import Dispatch
from ratchet.workflows.host import Host
from ratchet.workflows.preflight import Preflight
from ratchet.workflows.protocol.messages import MEMO_KEY, RunInput
from ratchet.workflows.training_run import TrainingRun
from tests.workflow.world import World

WITHIN_S = 180.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""
BEATS: dict[str, Any] = {
    "max_heartbeat_throttle_interval": HEARTBEATS_AT_LEAST_EVERY,
    "default_heartbeat_throttle_interval": HEARTBEATS_AT_LEAST_EVERY,
}
"""As in `ratchet.worker.roles`: by default the SDK holds heartbeats back for 0.8 of their time-out,
so that a moment without a core would lose every server.
"""


def config(**overrides: Any) -> dict[str, Any]:
    """A small run: batches of 8 rollouts in groups of 2."""
    data: dict[str, Any] = {
        "name": "test",
        "max_steps": 6,
        "train": {"env": [{"id": "reverse-text"}], "batch_size": 8, "group_size": 2},
        "eval": {"env": [{"id": "reverse-text"}], "interval": 3, "num_examples": 4},
        "checkpoint": {"interval": 2},
    }
    return validate({**data, **overrides}).model_dump(mode="json")


@asynccontextmanager
async def world_of(client: Client, cached: int = 100) -> AsyncIterator[World]:
    """A world with its own task queues and one worker for all roles."""
    queue = f"q-{uuid.uuid4().hex[:8]}"
    world = World(client, Queues(*[queue] * 5))
    async with worker(world, cached):
        yield world


def worker(world: World, cached: int = 100) -> Worker:
    """A worker for every role of `world`; with `cached=0` every workflow task is a replay."""
    return Worker(
        world.client,
        task_queue=world.queues.orchestrator,
        workflows=[TrainingRun, Dispatch, Host, Preflight],
        activities=world.activities(),
        workflow_runner=SANDBOX,
        max_cached_workflows=cached,
        max_concurrent_workflow_task_polls=2 if cached else 1,
        **BEATS,
    )


async def start(
    world: World,
    signal: tuple[str, Any] | None = None,
    checked: CheckResult | None = None,
    **overrides: Any,
) -> WorkflowHandle[Any, Any]:
    """Starts a run in `world`; its first task brings `signal`, a name and a payload. With `checked`
    the preflight was made before.
    """
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    found = {} if checked is None else {"examples": checked.examples, "cores": checked.cores}
    created = {"created_at": "2026-01-01T00:00:00Z", **found}
    return await world.client.start_workflow(
        "TrainingRun",
        RunInput(run_id, config(**overrides), world.queues, **created),  # type: ignore[arg-type]
        id=run_id,
        task_queue=world.queues.orchestrator,
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        **({} if signal is None else {"start_signal": signal[0], "start_signal_args": [signal[1]]}),
    )


async def memo(handle: WorkflowHandle[Any, Any]) -> dict[str, Any]:
    """The run as the API would read it."""
    value: dict[str, Any] = (await (await handle.describe()).memo()).get(MEMO_KEY, {})
    return value


async def status(handle: WorkflowHandle[Any, Any], wanted: str) -> dict[str, Any]:
    """The run once it has a status."""
    async with asyncio.timeout(WITHIN_S):
        while (seen := await memo(handle)).get("status") != wanted:
            await asyncio.sleep(0.05)
    return seen


async def until(predicate: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    """Waits for something in the world."""
    async with asyncio.timeout(within_s):
        while not predicate():
            await asyncio.sleep(0.02)


async def generations_of(client: Client, run: str, least: int = 1) -> set[str]:
    """Ids of a run's generations, or of an attempt's. The server lists what it has a moment later,
    so that `least` are waited for.
    """
    query = f"WorkflowId STARTS_WITH '{run}/dispatch/'"
    async with asyncio.timeout(WITHIN_S):
        while len(found := {w.id async for w in client.list_workflows(query)}) < least:
            await asyncio.sleep(0.2)
    return found


async def settled(handle: WorkflowHandle[Any, Any], client: Client) -> None:
    """Waits until everything is done that can be without another rollout that ends."""
    await at_rest(handle, client, playing=True)


async def at_rest(
    handle: WorkflowHandle[Any, Any], client: Client, *, playing: bool = False
) -> None:
    """Waits until the server has nothing for the workers of a run, neither a task nor an activity,
    servers that are up left out: nothing goes on before somebody tells it to. Rollouts that have
    begun may be `playing`.
    """
    begun = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED

    def counts(work: PendingActivityInfo) -> bool:
        kind = work.activity_type.name
        plays = playing and kind == RUN_ROLLOUTS and work.state == begun
        return not (kind == HOST_SERVER or plays)

    async def pending(workflow_id: str) -> int:
        described = await client.get_workflow_handle(workflow_id).describe()
        raw = described.raw_description
        below = [await pending(child.workflow_id) for child in raw.pending_children]
        waits = raw.HasField("pending_workflow_task")
        return waits + sum(map(counts, raw.pending_activities)) + sum(below)

    async with asyncio.timeout(WITHIN_S):
        while await pending(handle.id):
            await asyncio.sleep(0.1)


async def change(handle: WorkflowHandle[Any, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Changes the config; a run that is about to continue as new takes it afterwards."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                changes: dict[str, Any] = await handle.execute_update("change_config", patch)
                return changes
            except RPCError as error:
                assert error.status == RPCStatusCode.FAILED_PRECONDITION
            await asyncio.sleep(0.2)


def check_exactly_once(world: World, steps: int) -> None:
    """Every batch trained once and in order; every group and example used once."""
    assert world.trained == list(range(1, steps + 1))
    shipped = [group for step in sorted(world.batches) for group in world.batches[step]]
    assert len(shipped) == len(set(shipped))
    assert max(world.rolled_out.values()) == 1
    trained = [world.example_of[group] for group in shipped]
    assert len(trained) == len(set(trained))
    # Tokens of a push that failed are rolled out again, as the next attempt of their group.
    drawn = {(group.partition(".")[0], example) for group, example in world.example_of.items()}
    examples = [example for group, example in drawn if group.startswith("train/")]
    assert len(examples) == len(set(examples))
    assert sorted(world.recorded) == list(range(1, steps + 1))


async def events(world: World, handle: WorkflowHandle[Any, Any], kind: str) -> list[str]:
    """Messages of the events of one type, over all executions of a run."""
    told: list[str] = []
    execution = handle.first_execution_run_id or ""
    while execution:
        builder = EventBuilder(execution, _decode)
        one = world.client.get_workflow_handle(handle.id, run_id=execution)
        async for event in one.fetch_history_events():
            taken = await builder.take(event)
            assert {e.type for e in taken} <= set(EVENT_TYPES)
            told += [e.message for e in taken if e.type == kind]
        execution = builder.successor
    return told
