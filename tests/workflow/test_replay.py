"""Every recorded history replays: the workflows issue the commands they issued when it was made.

A replay that fails means that runs under way would stop at their next task. What to do then is in
`histories/README.md`.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.wire import WIRE
from ratchet.workflows.dispatch import Dispatch
from ratchet.workflows.host import Host
from ratchet.workflows.preflight import Preflight
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    HOST,
    PREFLIGHT,
    TRAINING_RUN,
    DispatchInput,
    HostWorkflowInput,
    PreflightInput,
    RunInput,
)
from ratchet.workflows.rules.scheduler import Flight
from ratchet.workflows.training_run import TrainingRun
from tests.workflow.kinds import KINDS
from tests.workflow.record import HISTORIES, WORKFLOW_TYPES, missing, read, started

FILES = sorted(HISTORIES.glob("*/*.json.gz"))
CLOSING = ("COMPLETED", "FAILED", "CANCELED", "TERMINATED", "CONTINUED_AS_NEW")


def name_of(path: Path) -> str:
    """For example 'plain/dispatch-0'."""
    return path.relative_to(HISTORIES).as_posix().removesuffix(".json.gz")


async def replay(path: Path, *workflows: type) -> None:
    """Replays one history; raises what the workflow's tasks would fail with."""
    history = read(path)
    # The sandbox changes no command, and takes as long as all the rest.
    replayer = Replayer(
        workflows=workflows,
        workflow_runner=UnsandboxedWorkflowRunner(),
        data_converter=WIRE,
    )
    workflow_id = started(history)["workflowId"]
    await replayer.replay_workflow(WorkflowHistory.from_json(workflow_id, history))


@pytest.mark.parametrize("path", FILES, ids=name_of)
async def test_history_replays(path: Path) -> None:
    await replay(path, TrainingRun, Dispatch, Host, Preflight)


def test_every_kind_and_every_workflow_type_is_recorded_to_its_end() -> None:
    histories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in FILES:
        histories[path.parent.name].append(read(path))
    assert set(histories) == {kind.name for kind in KINDS}
    lacking = {kind.name: missing(kind, histories[kind.name]) for kind in KINDS}
    assert not any(lacking.values()), lacking
    every = [history for kind in histories.values() for history in kind]
    types = {started(history)["workflowType"]["name"] for history in every}
    assert types == set(WORKFLOW_TYPES)
    for history in every:
        last = history["events"][-1]["eventType"]
        assert last.removeprefix("EVENT_TYPE_WORKFLOW_EXECUTION_") in CLOSING


# -- changes that a replay must notice ------------------------------------------------------


@workflow.defn(name=TRAINING_RUN)
class UncheckedRun(TrainingRun):
    """Prepares the policy without a preflight: another first activity."""

    @workflow.run
    async def run(self, arg: RunInput) -> dict[str, Any]:
        """Takes the number of examples for granted."""
        self._state.lifecycle.examples = {"train/reverse-text": 5000, "eval/reverse-text": 5000}
        return await super().run(arg)


@workflow.defn(name=TRAINING_RUN)
class SilentRun(TrainingRun):
    """Shows nothing of its own when it ends: one command less, the last one."""

    @workflow.run
    async def run(self, arg: RunInput) -> dict[str, Any]:
        """Closes all that is open, and no more."""

        async def close(status: str, **ended: Any) -> None:
            await self._generations.send()
            await self._servers.close()

        self._ending.close = close  # type: ignore[method-assign]
        return await super().run(arg)


@workflow.defn(name=DISPATCH)
class HastyDispatch(Dispatch):
    """Delivers groups as failed, without an activity that finalizes them."""

    async def _finalize(self, flight: Flight) -> None:
        self._generation.on_finalized(flight.work.group, None, flight.lost)

    @workflow.run
    async def run(self, arg: DispatchInput) -> None:
        """As it was."""
        await super().run(arg)


@workflow.defn(name=HOST)
class SlowHost(Host):
    """Waits for a second before it starts the server."""

    @workflow.run
    async def run(self, arg: HostWorkflowInput) -> None:
        """A timer first."""
        await workflow.sleep(1)
        await super().run(arg)


@workflow.defn(name=PREFLIGHT)
class OtherPreflight(Preflight):
    """Ends without a single check."""

    @workflow.run
    async def run(self, arg: PreflightInput) -> CheckResult:
        """Finds nothing."""
        return CheckResult()


CHANGES = [
    (UncheckedRun, "plain/run"),
    (SilentRun, "plain/run"),
    (HastyDispatch, "plain/dispatch-0"),
    (SlowHost, "plain/host-engine-0"),
    (OtherPreflight, "preflight/good"),
]


@pytest.mark.parametrize(("changed", "name"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
async def test_changed_workflow_does_not_replay(changed: type, name: str) -> None:
    with pytest.raises(workflow.NondeterminismError):
        await replay(HISTORIES / f"{name}.json.gz", changed)
