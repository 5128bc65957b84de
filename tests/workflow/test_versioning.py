"""Worker upgrades: a run begins on one build of the workflows and ends on another.

The server, its worker deployments and the workflows are real. Both builds have the same code, so
what is tested is who carries out what, and that a move loses and repeats nothing.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflow.v1 import WorkflowExecutionOptions
from temporalio.api.workflowservice.v1 import (
    SetWorkerDeploymentCurrentVersionRequest,
    UpdateWorkflowExecutionOptionsRequest,
)
from temporalio.client import Client
from temporalio.common import (
    OneTimeVersioningOverride,
    VersioningBehavior,
    WorkerDeploymentVersion,
)
from temporalio.service import RPCError

from ratchet.activities.contracts.names import Queues
from ratchet.worker.compat import Worker
from ratchet.worker.sandbox import SANDBOX
from ratchet.worker.settings import Deployment
from ratchet.worker.versioning import (
    REFUSED,
    interceptors_of,
    make_first_current,
    options_of,
    workflows_of,
)
from tests import ROOT
from tests.workflow.running import BEATS, WITHIN_S, check_exactly_once, start, until
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

HAND_OVER = {"generation_events": 120}
PINNED, AUTO_UPGRADE = VersioningBehavior.PINNED, VersioningBehavior.AUTO_UPGRADE
UNVERSIONED = VersioningBehavior.UNSPECIFIED

Task = tuple[str, VersioningBehavior]
"""Of a completed workflow task: the build that did it ('' if it has no name), and how its workflow
is versioned.
"""


@pytest.fixture
def deployment() -> Deployment:
    """A worker deployment of its own, build A."""
    return Deployment(f"ratchet-{uuid.uuid4().hex[:8]}", "A")


@asynccontextmanager
async def world_of(client: Client) -> AsyncIterator[World]:
    """A world whose activities have unversioned workers; that of servers has a queue of its own."""
    name = f"q-{uuid.uuid4().hex[:8]}"
    shared, own = f"{name}-shared", f"{name}-own"
    world = World(client, Queues(f"{name}-brain", shared, own, own, shared))
    async with (
        Worker(client, task_queue=shared, activities=world.activities(), **BEATS),
        Worker(client, task_queue=own, activities=world.activities(), **BEATS),
    ):
        yield world


def build(world: World, deployment: Deployment | None) -> Worker:
    """The orchestrator worker of one build, or of none, as `ratchet.worker.roles` has it but for
    activities.
    """
    return Worker(
        world.client,
        task_queue=world.queues.orchestrator,
        workflows=workflows_of(deployment),
        workflow_runner=SANDBOX,
        activities=world.activities(),
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=2),
        interceptors=interceptors_of(deployment),
        **options_of(deployment),
    )


async def set_current(client: Client, deployment: Deployment) -> None:
    """What `set_current_command` does, once the server knows what the build's worker polls."""
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace,
        deployment_name=deployment.name,
        build_id=deployment.build_id,
    )
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await client.workflow_service.set_worker_deployment_current_version(request)
                return
            except RPCError as error:
                if error.status in REFUSED:
                    raise
            await asyncio.sleep(0.2)


async def chain(client: Client, workflow_id: str, first: str | None = None) -> list[list[Task]]:
    """The tasks of a workflow's executions: from the one with run id `first` on, or the last."""
    found: list[list[Task]] = []
    run_id = first
    while run_id or not found:
        history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        done = [
            event.workflow_task_completed_event_attributes
            for event in history.events
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        ]
        tasks = [(task.deployment_version.build_id, task.versioning_behavior) for task in done]
        found.append([(build, VersioningBehavior(how)) for build, how in tasks])
        last = history.events[-1].workflow_execution_continued_as_new_event_attributes
        run_id = last.new_execution_run_id
    return found


async def open_on(client: Client, deployment: Deployment, run: str) -> list[str]:
    """Ids of the pinned workflows of a run that only workers of this build can carry on."""
    version = f"TemporalWorkerDeploymentVersion = '{deployment.name}:{deployment.build_id}'"
    pinned = "TemporalWorkflowVersioningBehavior = 'Pinned' AND ExecutionStatus = 'Running'"
    query = f"{version} AND {pinned} AND WorkflowId STARTS_WITH '{run}'"
    return [workflow.id async for workflow in client.list_workflows(query)]


async def move(client: Client, workflow_id: str, to: Deployment) -> None:
    """`temporal workflow update-options --versioning-override-behavior one_time`."""
    version = WorkerDeploymentVersion(to.name, to.build_id)
    options = WorkflowExecutionOptions(
        versioning_override=OneTimeVersioningOverride(version)._to_proto()
    )
    await client.workflow_service.update_workflow_execution_options(
        UpdateWorkflowExecutionOptionsRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
            workflow_execution_options=options,
            update_mask=FieldMask(paths=["versioning_override"]),
        ),
        retry=True,
    )


async def drained(client: Client, deployment: Deployment, run: str) -> None:
    """Waits until the build's worker has nothing of a run left to do."""
    async with asyncio.timeout(WITHIN_S):
        while await open_on(client, deployment, run):
            await asyncio.sleep(0.2)


async def test_run_moves_to_the_current_build_and_loses_and_repeats_nothing(
    temporal: Client, deployment: Deployment
) -> None:
    a, b = deployment, replace(deployment, build_id="B")
    async with world_of(temporal) as world:
        world.rollout_s = 0.05
        async with AsyncExitStack() as first, AsyncExitStack() as second:
            await first.enter_async_context(build(world, a))
            assert await make_first_current(temporal, a) == "A"
            handle = await start(world, max_steps=1000, dispatch=HAND_OVER)
            await until(lambda: 1 in world.trained)
            await second.enter_async_context(build(world, b))
            assert await make_first_current(temporal, b) == "A", "only the first build may"
            await set_current(temporal, b)
            await drained(temporal, a, handle.id)
            await first.aclose()
            at_end_of_a = len(world.trained)
            await until(lambda: len(world.trained) >= at_end_of_a + 3)
            await handle.signal("stop")
            result = await temporal.get_workflow_handle(handle.id).result()
            # The run waits for none of its hosts.
            await temporal.get_workflow_handle(f"{handle.id}/host/trainer/0").result()
        assert result["status"] == "succeeded" and result["step"] >= at_end_of_a + 3
        check_exactly_once(world, result["step"])
        run = await chain(temporal, handle.id, handle.first_execution_run_id)
        assert set(run[0]) == {("A", PINNED)} and set(run[-1]) == {("B", PINNED)}
        assert all(len(set(tasks)) == 1 for tasks in run), "no execution was moved"
        generations = [
            await chain(temporal, workflow.id, workflow.run_id)
            async for workflow in temporal.list_workflows(
                f"WorkflowId STARTS_WITH '{handle.id}/dispatch/'"
            )
        ]
        builds = [{build for tasks in chained for build, _ in tasks} for chained in generations]
        assert {"A"} in builds and {"B"} in builds and {"A", "B"} not in builds
        # What lives as long as its run was closed by the build that is there.
        (host,) = await chain(temporal, f"{handle.id}/host/trainer/0")
        assert (host[0], host[-1]) == (("A", AUTO_UPGRADE), ("B", AUTO_UPGRADE))
        assert world.epochs == {"engine/0": 1, "env/0": 1, "trainer/0": 1}, "nothing restarted"


@pytest.mark.long
async def test_run_of_an_unnamed_build_moves_to_the_first_named_one_at_once(
    temporal: Client, deployment: Deployment
) -> None:
    async with world_of(temporal) as world:
        async with build(world, None):
            handle = await start(world, max_steps=1000)
            await until(lambda: 1 in world.trained)
            async with build(world, deployment):
                assert await make_first_current(temporal, deployment) == "A"
                await until(lambda: 3 in world.trained)
        async with build(world, deployment):
            trained = len(world.trained)
            await until(lambda: len(world.trained) >= trained + 3)
            await handle.signal("stop")
            result = await handle.result()
            generation = await chain(temporal, f"{handle.id}/dispatch/0")
            (run,) = await chain(temporal, handle.id)
        check_exactly_once(world, result["step"])
    for tasks in (run, generation[0]):
        assert list(dict.fromkeys(tasks)) == [("", UNVERSIONED), ("A", PINNED)]


@pytest.mark.long
async def test_run_of_a_named_build_goes_back_to_unnamed_ones_when_it_continues_as_new(
    temporal: Client, deployment: Deployment
) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.05
        async with AsyncExitStack() as named, AsyncExitStack() as unnamed:
            await named.enter_async_context(build(world, deployment))
            assert await make_first_current(temporal, deployment) == "A"
            handle = await start(world, max_steps=1000, dispatch=HAND_OVER)
            await until(lambda: 1 in world.trained)
            await unnamed.enter_async_context(build(world, None))
            await set_current(temporal, replace(deployment, build_id=""))
            await drained(temporal, deployment, handle.id)
            await named.aclose()
            trained = len(world.trained)
            await until(lambda: len(world.trained) >= trained + 3)
            await handle.signal("stop")
            result = await temporal.get_workflow_handle(handle.id).result()
        check_exactly_once(world, result["step"])
        run = await chain(temporal, handle.id, handle.first_execution_run_id)
        assert set(run[0]) == {("A", PINNED)} and set(run[-1]) == {("", UNVERSIONED)}
        assert all(len(set(tasks)) == 1 for tasks in run), "no execution was moved"


async def quiet(world: World) -> None:
    """Waits until what was under way has ended; work of the build that is gone stays with it."""
    before: list[int] | None = None
    async with asyncio.timeout(WITHIN_S):
        while before != (before := [len(world.started), len(world.shipped), len(world.trained)]):
            await asyncio.sleep(1.0)


@pytest.mark.long
async def test_run_whose_build_is_gone_can_be_moved(
    temporal: Client, deployment: Deployment
) -> None:
    a, b = deployment, replace(deployment, build_id="B")
    async with world_of(temporal) as world:
        async with build(world, a):
            await make_first_current(temporal, a)
            handle = await start(world, max_steps=12)
            await until(lambda: 2 in world.trained)
        async with build(world, b):
            await set_current(temporal, b)
            await quiet(world)
            stood_at = len(world.trained)
            # The run and its generation, once the server lists them.
            async with asyncio.timeout(WITHIN_S):
                while len(left := await open_on(temporal, a, handle.id)) < 2:
                    await asyncio.sleep(0.2)
            assert len(world.trained) == stood_at < 12
            for workflow_id in left:
                await move(temporal, workflow_id, b)
            result = await handle.result()
        assert result["status"] == "succeeded"
        check_exactly_once(world, 12)
        (run,) = await chain(temporal, handle.id)
        assert list(dict.fromkeys(run)) == [("A", PINNED), ("B", PINNED)]


async def test_build_leaves_an_operators_choice_of_unversioned_workers_alone(
    temporal: Client, deployment: Deployment
) -> None:
    async with world_of(temporal) as world, build(world, deployment):
        assert await make_first_current(temporal, deployment) == "A"
        await set_current(temporal, replace(deployment, build_id=""))
        assert await make_first_current(temporal, deployment) == ""


async def test_worker_process_with_a_build_id_makes_the_first_build_current(
    temporal: Client, deployment: Deployment, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    worker = subprocess.Popen(
        [sys.executable, "-m", "ratchet.worker", "--roles", "orchestrator"],
        cwd=ROOT,
        env={
            **os.environ,
            "TEMPORAL_ADDRESS": temporal.service_client.config.target_host,
            "RATCHET_HOME": str(tmp_path),
            "RATCHET_QUEUE_PREFIX": deployment.name,
            "RATCHET_DEPLOYMENT": deployment.name,
            "RATCHET_BUILD_ID": "0.1.0",
            "RATCHET_HEALTH_PORT": str(port),
        },
    )
    try:
        deadline = time.monotonic() + WITHIN_S
        while not healthy(port):
            assert worker.poll() is None and time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert await make_first_current(temporal, replace(deployment, build_id="X")) == "0.1.0"
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


def healthy(port: int) -> bool:
    """Whether a worker says at its health port that it is up."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
