"""The doubles of one kind of recorded run, and how its runs are started."""

from dataclasses import dataclass, field
from typing import Any

from temporalio import activity
from temporalio.client import WorkflowHandle
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput, CheckResult
from ratchet.configs.load import validate
from ratchet.workflows.protocol.messages import PREFLIGHT, TRAINING_RUN, PreflightInput, RunInput
from tests.workflow.running import config, until
from tests.workflow.world import World

Handle = WorkflowHandle[Any, Any]


@dataclass
class Stage(World):
    """The doubles of one kind; its runs are `roots`, and the first one's id is the kind's name."""

    kind: str = ""
    roots: list[Handle] = field(default_factory=list)

    @activity.defn(name=names.CHECK_ALGORITHMS)
    async def check_algorithms(self, arg: CheckInput) -> CheckResult:
        if arg.config["train"]["env"][0]["algo"]["function"] == "credit:missing":
            raise ApplicationError("no such function", type=names.BAD_INPUT, non_retryable=True)
        return CheckResult()

    async def start(self, **overrides: Any) -> Handle:
        """Starts the kind's run: batches of 8 rollouts in groups of 2, unless told otherwise."""
        arg = RunInput(self.kind, config(**overrides), self.queues, created_at="2026-01-01")
        return await self._start(TRAINING_RUN, arg, self.kind)

    async def preflight(self, name: str, env: dict[str, Any]) -> None:
        """Carries out the preflight of a run that trains on `env`."""
        data = validate({"max_steps": 1, "train": {"env": [env]}}).model_dump(mode="json")
        arg = PreflightInput(data, self.queues)
        await (await self._start(PREFLIGHT, arg, f"{self.kind}/{name}")).result()

    async def _start(self, kind: str, arg: Any, workflow_id: str) -> Handle:
        queue = self.queues.orchestrator
        handle = await self.client.start_workflow(kind, arg, id=workflow_id, task_queue=queue)
        self.roots.append(handle)
        return handle

    async def trained_to(self, step: int) -> None:
        """Waits until batch `step` was trained."""
        await until(lambda: step in self.trained)

    async def end_generation(self, number: int) -> None:
        """Ends a dispatch generation without its knowledge."""
        dispatch = f"{self.kind}/dispatch/{number}"
        await self.client.get_workflow_handle(dispatch).terminate("it dies")
