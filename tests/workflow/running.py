"""Starts runs in a world of doubles, and reads what became of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy
from temporalio.worker import Worker

from activities.contracts.names import Queues
from configs.load import validate
from tests.workflow.world import World
from workflows.dispatch import Dispatch
from workflows.host import Host
from workflows.messages import MEMO_KEY, RunInput
from workflows.preflight import Preflight
from workflows.training_run import TrainingRun


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
        max_cached_workflows=cached,
        max_concurrent_workflow_task_polls=2 if cached else 1,
    )


async def start(world: World, **overrides: Any) -> WorkflowHandle[Any, Any]:
    """Starts a run in `world`."""
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    return await world.client.start_workflow(
        "TrainingRun",
        RunInput(run_id, config(**overrides), world.queues, created_at="2026-01-01T00:00:00Z"),
        id=run_id,
        task_queue=world.queues.orchestrator,
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
    )


async def memo(handle: WorkflowHandle[Any, Any]) -> dict[str, Any]:
    """The run as the API would read it."""
    value: dict[str, Any] = (await (await handle.describe()).memo()).get(MEMO_KEY, {})
    return value


async def until(predicate: Callable[[], bool], within_s: float = 30) -> None:
    """Waits for something in the world."""
    async with asyncio.timeout(within_s):
        while not predicate():
            await asyncio.sleep(0.02)


def check_exactly_once(world: World, steps: int) -> None:
    """Every batch trained once and in order; every group and example used once."""
    assert world.trained == list(range(1, steps + 1))
    shipped = [group for step in sorted(world.batches) for group in world.batches[step]]
    assert len(shipped) == len(set(shipped))
    assert max(world.rolled_out.values()) == 1
    train = [n for (env, _), n in world.examples.items() if env.startswith("train/")]
    assert max(train) == 1
    assert sorted(world.recorded) == list(range(1, steps + 1))
