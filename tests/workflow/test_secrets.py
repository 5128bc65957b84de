"""Secrets in what activities say: none of them enters a history, whatever way they come."""

import uuid

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput, CheckResult
from ratchet.activities.contracts.names import Queues
from ratchet.activities.runtime.failing import final
from tests.workflow.running import memo, start, worker
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


class _Talks(World):
    """Its check of environments fails with secrets: in the message, in the cause, and in the lines
    of both that stack traces show.
    """

    @activity.defn(name=names.CHECK_ENVS)
    async def check_envs(self, arg: CheckInput) -> CheckResult:
        try:
            raise ConnectionError("https://judge.example/?key=hunter2")
        except ConnectionError as error:
            text = "OPENAI_API_KEY=hunter2 was refused"
            raise final(names.BAD_INPUT, text) from error


async def test_failures_enter_no_history_with_a_secret(temporal: Client) -> None:
    world = _Talks(temporal, Queues(*[f"q-{uuid.uuid4().hex[:8]}"] * 5))
    async with worker(world):
        handle = await start(world)
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    events = (await handle.fetch_history()).events
    failed = [
        event.activity_task_failed_event_attributes.failure
        for event in events
        if event.HasField("activity_task_failed_event_attributes")
    ]
    assert [failure.message for failure in failed] == ["OPENAI_API_KEY=[hidden] was refused"]
    assert failed[0].cause.message == "https://judge.example/?key=[hidden]"
    assert "in check_envs" in failed[0].stack_trace
    whole = b"".join(event.SerializeToString() for event in events)
    assert b"hunter2" not in whole, "nor the run's own failure, its memo, its signals"
    assert "OPENAI_API_KEY=[hidden] was refused" in (await memo(handle))["end_reason"]
