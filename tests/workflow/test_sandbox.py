"""The four workflow modules run in the SDK's sandbox: each run loads them anew, with clocks barred.

A list of modules to pass through matches by prefix, so that one careless entry (`ratchet`) would
let them all through, and nothing else would fail.
"""

import ast
import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.names import Queues
from ratchet.activities.runtime.context import WorkerContext
from ratchet.worker.compat import Worker
from ratchet.worker.roles import orchestrator
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    HOST,
    PREFLIGHT,
    TRAINING_RUN,
    Control,
    DispatchInput,
    HostWorkflowInput,
    PreflightInput,
    RunInput,
)
from ratchet.workflows.protocol.state import Lease
from tests.workflow.running import WITHIN_S, config

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

EXAMPLES = {"train/reverse-text": 8, "eval/reverse-text": 4}
QUEUES = Queues(*["sandbox"] * 5)
WORKFLOWS: dict[str, tuple[str, Any]] = {
    "ratchet.workflows.training_run": (TRAINING_RUN, RunInput("r", config(), QUEUES)),
    "ratchet.workflows.dispatch": (
        DISPATCH,
        DispatchInput("r", 0, config(), EXAMPLES, QUEUES, Lease(), Control(0, 0)),
    ),
    "ratchet.workflows.host": (HOST, HostWorkflowInput(HostInput("r", "env", 0, "q"))),
    "ratchet.workflows.preflight": (PREFLIGHT, PreflightInput(config(), QUEUES)),
}
HEAVY = {"fastapi", "torch", "transformers", "uvicorn", "verifiers", "vllm"}

LOADS = """
import asyncio, json, sys
from temporalio import workflow
from ratchet.worker.sandbox import SANDBOX
from ratchet.worker.settings import Deployment
from ratchet.worker.versioning import workflows_of

class Asked:
    names = []
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)

async def main():
    for deployment in (None, Deployment("d", "1")):
        for defined in workflows_of(deployment):
            Asked.names = found[defined.__module__] = []
            prepared = workflow._Definition.must_from_class(defined)
            SANDBOX.prepare_workflow(prepared)

found = {"the worker": Asked.names}
sys.meta_path.insert(0, Asked())
asyncio.run(main())
print(json.dumps(found))
"""


class Clocked(MetaPathFinder, SourceFileLoader):
    """Loads one module with `time.time()` at the head of its `@workflow.run`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None
        found.loader = self
        return found

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(self.get_data(self.path))
        (run,) = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef)
            and "workflow.run" in map(ast.unparse, node.decorator_list)
        )
        run.body[:0] = ast.parse("import time; time.time()").body
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


def orchestrators(client: Client, home: Any, queue: str) -> list[Worker]:
    """The workers of the role, as a deployed process has them."""
    ctx = WorkerContext(home=home, store_url=f"file://{home}/store", own_queue=queue)
    return orchestrator(client, ctx, Queues(*[queue] * 5))


@pytest.mark.parametrize("module", WORKFLOWS)
async def test_a_clock_in_a_workflow_fails_its_task(
    temporal: Client, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    file = sys.modules[module].__file__
    assert file is not None
    monkeypatch.setattr(sys, "meta_path", [Clocked(module, file), *sys.meta_path])
    name, argument = WORKFLOWS[module]
    queue = f"q-{uuid.uuid4().hex[:8]}"
    (worker,) = orchestrators(temporal, tmp_path, queue)
    async with worker:
        handle = await temporal.start_workflow(name, argument, id=queue, task_queue=queue)
        async with asyncio.timeout(WITHIN_S):
            while not (failures := [m async for m in _task_failures(handle)]):
                await asyncio.sleep(0.05)
        await handle.terminate()
    assert "Cannot access time.time.__call__ from inside a workflow" in failures[0]


async def _task_failures(handle: Any) -> Any:
    async for event in handle.fetch_history_events():
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
            yield event.workflow_task_failed_event_attributes.failure.message


async def test_no_entry_passes_a_workflow_module_through(temporal: Client, tmp_path: Any) -> None:
    for worker in orchestrators(temporal, tmp_path, "sandbox"):
        runner = worker.config()["workflow_runner"]
        assert isinstance(runner, SandboxedWorkflowRunner)
        assert not runner.restrictions.passthrough_all_modules
        passed = runner.restrictions.passthrough_modules
        for module in WORKFLOWS:
            parts = module.split(".")
            prefixes = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
            assert not prefixes & passed


async def test_the_sandbox_loads_workflow_modules_and_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADS], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    for module in (*WORKFLOWS, "ratchet.worker.upgrading_host"):
        assert module in found[module], "the sandbox loads it again, under its name"
    assert set(WORKFLOWS) <= set(found["the worker"])
    for asked in found.values():
        assert not {name.partition(".")[0] for name in asked} & HEAVY
    assert "ratchet.workflows.preflight" in found["ratchet.workflows.training_run"]
    assert "ratchet.workflows.host" in found["ratchet.worker.upgrading_host"]
