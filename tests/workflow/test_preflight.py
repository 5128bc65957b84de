"""The preflight with a custom algorithm: its function is imported where it will be called."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.names import Queues
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.check import AlgorithmActivities
from ratchet.configs.load import validate
from ratchet.worker.compat import Worker
from ratchet.worker.sandbox import SANDBOX
from ratchet.workflows.preflight import Preflight
from ratchet.workflows.protocol.messages import PREFLIGHT, PreflightInput
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_custom_function_is_checked_before_a_run(temporal: Client, tmp_path: Path) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    world = World(temporal, Queues(*[queue] * 5))
    ctx = WorkerContext(home=tmp_path, store_url=f"file://{tmp_path}/store", own_queue=queue)
    (tmp_path / "my_credit.py").write_text("def half(rollouts): return [0.5 for _ in rollouts]")
    checks = AlgorithmActivities(ctx).check_algorithms

    async def preflight(function: str) -> CheckResult:
        algo: dict[str, Any] = {"type": "custom", "function": function, "path": str(tmp_path)}
        env = {"id": "reverse-text", "algo": algo}
        config = validate({"max_steps": 1, "train": {"env": [env]}})
        result: CheckResult = await temporal.execute_workflow(
            PREFLIGHT,
            PreflightInput(config.model_dump(mode="json"), world.queues),
            id=f"preflight-{uuid.uuid4().hex[:8]}",
            task_queue=queue,
            result_type=CheckResult,
        )
        return result

    activities = [*world.activities(), checks]
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=[Preflight],
        workflow_runner=SANDBOX,
        activities=activities,
    ):
        good = await preflight("my_credit:half")
        bad = await preflight("my_credit:whole")
    assert good.problems == [] and good.examples
    assert [problem.pointer for problem in bad.problems] == ["/train/env/0/algo/function"]
    assert "has no 'whole'" in bad.problems[0].message


async def test_environments_are_waited_for_as_long_as_they_may_load(temporal: Client) -> None:
    """An attempt of the check outlives the loading that it bounds."""
    queue, name = f"q-{uuid.uuid4().hex[:8]}", f"preflight-{uuid.uuid4().hex[:8]}"
    world = World(temporal, Queues(*[queue] * 5))
    env = {"id": "reverse-text", "start_timeout_s": 7200}
    config = validate({"max_steps": 1, "train": {"env": [env]}})
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=[Preflight],
        workflow_runner=SANDBOX,
        activities=world.activities(),
    ):
        handle = await temporal.start_workflow(
            PREFLIGHT,
            PreflightInput(config.model_dump(mode="json"), world.queues),
            id=name,
            task_queue=queue,
        )
        await handle.result()
    scheduled = [
        event.activity_task_scheduled_event_attributes
        async for event in handle.fetch_history_events()
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    longest = {it.activity_type.name: it.start_to_close_timeout.seconds for it in scheduled}
    assert longest == {names.CHECK_ENVS: 7200 + 60, names.CHECK_MODEL: 90}
