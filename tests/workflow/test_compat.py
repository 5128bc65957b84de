"""A workflow whose thread stands still, as on a machine that is busy elsewhere."""

import time
import uuid

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.worker.compat import Worker

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@workflow.defn
class Held:
    """Keeps its thread for longer than the SDK allows by default."""

    @workflow.run
    async def run(self) -> None:
        """Ends after 3 s."""
        time.sleep(3)


async def test_workflow_held_for_seconds_goes_on_with_no_failed_task(temporal: Client) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    runner = UnsandboxedWorkflowRunner()
    async with Worker(temporal, task_queue=queue, workflows=[Held], workflow_runner=runner):
        handle = await temporal.start_workflow(Held.run, id=queue, task_queue=queue)
        await handle.result()
    kinds = {event.event_type async for event in handle.fetch_history_events()}
    assert EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED in kinds
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds
