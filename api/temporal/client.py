"""The only access to Temporal: what the API queries and commands. Every call is bounded.

Executions are read as raw protobuf: the SDK's own `describe` and `list` raise ValueError on any
workflow that an operator has paused (status 8 is missing from its enum in 1.35).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.api.common.v1 import Payloads, WorkflowExecution
from temporalio.api.enums.v1 import (
    HistoryEventFilterType,
    TaskQueueType,
    WorkflowExecutionStatus,
)
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    CountWorkflowExecutionsRequest,
    DeleteWorkflowExecutionRequest,
    DescribeTaskQueueRequest,
    DescribeWorkflowExecutionRequest,
    GetSystemInfoRequest,
    GetWorkflowExecutionHistoryRequest,
    ListWorkflowExecutionsRequest,
    RequestCancelWorkflowExecutionRequest,
    SignalWorkflowExecutionRequest,
)
from temporalio.client import (
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.controls import CONTROLS
from ratchet.activities.contracts.names import ATTEMPT_MARK, Queues, workflow_of
from ratchet.activities.contracts.wire import WIRE
from ratchet.api.http.audit import Caller
from ratchet.api.temporal.connection import Connection, Missing
from ratchet.workflows.protocol.messages import (
    CHANGE_CONFIG,
    MEMO_KEY,
    PREFLIGHT,
    TRAINING_RUN,
    PreflightInput,
    RunInput,
)

PAGE = 1000
NAMED = 100
"""Most ids in one query."""
AT_ONCE = 16
"""Executions that are deleted side by side."""
RUNS = f"WorkflowType = '{TRAINING_RUN}' AND ExecutionStatus != 'ContinuedAsNew'"

UPDATE_AGAIN_AFTER_S = 0.3
MOST_SUMMARY = 120
"""Characters; Temporal takes 400 bytes at most."""
MOST_DETAILS = 16_000
"""Bytes; Temporal refuses a run with more than 20,000."""


@dataclass(frozen=True)
class Execution:
    """A workflow as Temporal knows it. `state` is Temporal's status in lower case; `memo` is what
    the run last reported about itself; `run` is Temporal's id of this execution ('' once Temporal
    no longer keeps it), and `events` the length of its history.
    """

    id: str
    type: str
    state: str
    started: datetime
    closed: datetime | None
    memo: dict[str, Any]
    run: str = ""
    events: int = 0


BUSY = 2.5
"""The patience with workers that are there and have not answered, in timeouts. Clients give a
request a minute."""


class Unanswered(Exception):
    """No worker answered; the message says what is missing."""


def a_worker_on(queues: list[str]) -> str:
    """What a run waits for while nobody polls `queues`, in words."""
    plural = "workers on task queues" if len(queues) > 1 else "a worker on task queue"
    return f"{plural} {', '.join(queues)}"


def _length(max_steps: int | None) -> str:
    if max_steps == 0:
        return "evaluation"
    if max_steps is None:
        return "until it is stopped"
    return f"{max_steps} step{'s' if max_steps > 1 else ''}"


def summary_of(memo: dict[str, Any]) -> str:
    """A run in a line of Temporal's UI: 'reverse-text · ratchet/tiny · 400 steps'."""
    envs, length = " + ".join(memo["envs"]), _length(memo["max_steps"])
    summary = f"{envs} · {memo['model']} · {length}"
    return summary if len(summary) <= MOST_SUMMARY else f"{summary[: MOST_SUMMARY - 1]}…"


def details_of(run_id: str, memo: dict[str, Any]) -> str:
    """The run at its start as Temporal's UI shows it, in Markdown of at most `MOST_DETAILS` bytes;
    later changes do not appear in it.
    """
    pairs = [f"- {key}: {value}" for key, value in memo["metadata"].items()]
    lines = [
        f"**{memo['name']}** {'evaluates' if memo['max_steps'] == 0 else 'trains'} "
        f"`{memo['model']}` on {', '.join(memo['envs'])}: "
        f"{_length(memo['max_steps'])}.",
        *([f"Attempt {memo['attempt']}."] if memo["attempt"] > 1 else []),
        *(["", *pairs] if pairs else []),
    ]
    steering = [
        "",
        "",
        'Steer it by signal, optionally with `--input \'{"reason": "…"}\'`:',
        "",
        *(
            f"    temporal workflow signal --workflow-id {run_id} --name {verb.signal}"
            for verb in CONTROLS.values()
            if verb.signal
        ),
    ]
    about, commands = "\n".join(lines), "\n".join(steering)
    room = MOST_DETAILS - len(commands.encode())
    if len(about.encode()) > room:
        about = about.encode()[: room - len("…".encode())].decode(errors="ignore") + "…"
    return about + commands


async def _updated(handle: WorkflowHandle[Any, Any], patch: dict[str, Any], caller: Caller) -> bool:
    """Changes a run's config; False if it was about to continue as new and did not accept it."""
    try:
        # The only trace of an update's sender is its id, which the history keeps.
        await handle.execute_update(CHANGE_CONFIG, patch, id=caller.identity)
    except RPCError as error:
        # Temporal drops an update whose workflow task closes the execution: it must be sent again.
        if error.status == RPCStatusCode.FAILED_PRECONDITION:
            return False
        raise
    return True


class Temporal(Connection):
    """Calls to one Temporal namespace; raises ApiProblem 503 when it does not answer."""

    async def ping(self) -> None:
        """Returns if Temporal answers for this namespace; raises ApiProblem."""
        await self.call("get_system_info", GetSystemInfoRequest())
        await self._list("WorkflowId = 'none'", 1, b"")

    # -- reading ----------------------------------------------------------------------------

    async def _execution(self, info: WorkflowExecutionInfo) -> Execution:
        payload = info.memo.fields.get(MEMO_KEY)
        memo = (await WIRE.decode([payload]))[0] if payload is not None else {}
        state = WorkflowExecutionStatus.Name(info.status) if info.status else "UNSPECIFIED"
        return Execution(
            id=info.execution.workflow_id,
            type=info.type.name,
            state=state.removeprefix("WORKFLOW_EXECUTION_STATUS_").lower(),
            started=info.start_time.ToDatetime(UTC),
            closed=info.close_time.ToDatetime(UTC) if info.HasField("close_time") else None,
            memo=memo if isinstance(memo, dict) else {},
            run=info.execution.run_id,
            events=info.history_length,
        )

    async def described(self, workflow: str) -> Any:
        """Temporal's description of the newest execution of a workflow, or None."""
        request = DescribeWorkflowExecutionRequest(
            namespace=self.namespace, execution=WorkflowExecution(workflow_id=workflow)
        )
        try:
            return await self.call("describe_workflow_execution", request)
        except Missing:
            return None

    async def describe(self, run_id: str) -> Execution | None:
        """The newest execution of a run, or None."""
        answer = await self.described(run_id)
        if answer is None or answer.workflow_execution_info.type.name != TRAINING_RUN:
            return None
        return await self._execution(answer.workflow_execution_info)

    async def _list(self, query: str, size: int, token: bytes) -> Any:
        request = ListWorkflowExecutionsRequest(
            namespace=self.namespace, page_size=size, next_page_token=token, query=query
        )
        return await self.call("list_workflow_executions", request)

    async def newest(self, run_ids: Sequence[str]) -> dict[str, Execution]:
        """The newest execution of each of these runs that Temporal lists, by id."""
        parts = [run_ids[i : i + NAMED] for i in range(0, len(run_ids), NAMED)]
        named = (", ".join(f"'{run_id}'" for run_id in part) for part in parts)
        queries = (f"{RUNS} AND WorkflowId IN ({names})" for names in named)
        newest: dict[str, Execution] = {}
        for answer in await asyncio.gather(*map(self.listed, queries)):
            for found in answer:
                # A run that was resumed after its end has several executions.
                other = newest.get(found.id)
                if other is None or found.started > other.started:
                    newest[found.id] = found
        return newest

    async def open_runs(self, most: int) -> list[Execution]:
        """Runs that have not ended, at most `most`.

        SQLite has an index for one status, and reads all runs for two, or for those without an end.
        """
        running = self.listed(f"{RUNS} AND ExecutionStatus = 'Running'", most)
        parts = await asyncio.gather(running, self._paused(most))
        return [run for part in parts for run in part][:most]

    async def _paused(self, most: int) -> list[Execution]:
        """Runs that an operator paused in Temporal; none on a server too old to know of that."""
        try:
            return await self.listed(f"{RUNS} AND ExecutionStatus = 'Paused'", most)
        except RPCError as error:
            if error.status != RPCStatusCode.INVALID_ARGUMENT:
                raise
            return []

    async def runs_since(self, moment: datetime | None) -> AsyncIterator[list[Execution]]:
        """Executions of runs that began after a moment, or all, in batches and no particular order;
        a run may have several.
        """
        since = f" AND StartTime > '{moment.isoformat()}'" if moment else ""
        async for part in self._parts(f"{RUNS}{since}", PAGE):
            yield part

    async def ended_since(self, moment: datetime | None) -> AsyncIterator[list[Execution]]:
        """Executions of runs that ended after a moment, or all, in batches and no particular order;
        a run may have several.
        """
        since = f"CloseTime > '{moment.isoformat()}'" if moment else "CloseTime IS NOT NULL"
        async for part in self._parts(f"{RUNS} AND {since}", PAGE):
            yield part

    async def ended(self) -> dict[str, int]:
        """How many executions of runs have ended, by Temporal's status in lower case."""
        query = f"{RUNS} AND CloseTime IS NOT NULL GROUP BY ExecutionStatus"
        request = CountWorkflowExecutionsRequest(namespace=self.namespace, query=query)
        answer = await self.call("count_workflow_executions", request)
        return {
            json.loads(group.group_values[0].data).lower(): group.count for group in answer.groups
        }

    async def _parts(self, query: str, size: int) -> AsyncIterator[list[Execution]]:
        token = b""
        while True:
            page = await self._list(query, size, token)
            yield [await self._execution(info) for info in page.executions]
            token = page.next_page_token
            if not token:
                return

    async def listed(self, query: str, most: int | None = None) -> list[Execution]:
        """Executions that match a visibility query, at most `most` of them."""
        found: list[Execution] = []
        async for part in self._parts(query, min(PAGE, most or PAGE)):
            found += part
            if most is not None and len(found) >= most:
                break
        return found[:most]

    async def close_reason(self, ended: Execution) -> str:
        """What Temporal recorded when this execution was closed from outside or failed; '' if it no
        longer keeps that.
        """
        # Without the execution's own id, Temporal would wait for the end of a later execution.
        request = GetWorkflowExecutionHistoryRequest(
            namespace=self.namespace,
            execution=WorkflowExecution(workflow_id=ended.id, run_id=ended.run),
            history_event_filter_type=HistoryEventFilterType.HISTORY_EVENT_FILTER_TYPE_CLOSE_EVENT,
        )
        try:
            answer = await self.call("get_workflow_execution_history", request)
        except Missing:
            return ""
        for event in answer.history.events:
            if event.HasField("workflow_execution_failed_event_attributes"):
                failure = event.workflow_execution_failed_event_attributes.failure
                while failure.HasField("cause"):
                    failure = failure.cause
                return str(failure.message)
            if event.HasField("workflow_execution_terminated_event_attributes"):
                return str(event.workflow_execution_terminated_event_attributes.reason)
        return ""

    async def pollers(self, queue: str, kind: TaskQueueType.ValueType) -> Any:
        """Who polled a task queue lately."""
        request = DescribeTaskQueueRequest(
            namespace=self.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
        return (await self.call("describe_task_queue", request)).pollers

    async def unpolled(self, queues: Queues) -> list[str]:
        """Task queues that a new run needs and no worker has polled lately."""
        kinds = {
            queues.orchestrator: TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
            queues.env: TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            queues.trainer: TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        }
        return [name for name, kind in kinds.items() if not await self.pollers(name, kind)]

    # -- acting -----------------------------------------------------------------------------

    async def preflight(self, run_id: str, arg: PreflightInput, timeout_s: float) -> CheckResult:
        """The workers' verdict on a config.

        Raises Unanswered if none came within `timeout_s` seconds, BUSY times as long where workers
        poll every queue that the check needs, or if the check itself broke. Then its workflow is
        ended, so that nothing keeps running.
        """
        async with self.calling() as client:
            handle: WorkflowHandle[Any, CheckResult] = await client.start_workflow(
                PREFLIGHT,
                arg,
                id=f"{run_id}/preflight",
                task_queue=arg.queues.orchestrator,
                execution_timeout=timedelta(seconds=BUSY * timeout_s + 60),
                result_type=CheckResult,
                static_summary=f"checks the config of {run_id} before it starts",
                rpc_timeout=self.timeout,
            )
            try:
                for patience in (timeout_s, (BUSY - 1) * timeout_s):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(patience):
                            return await handle.result()
                    if missing := await self.unpolled(arg.queues):
                        break
                await self._end(handle, "no answer in time")
                raise Unanswered(a_worker_on(missing) if missing else "workers that are busy")
            except WorkflowFailureError as error:
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise Unanswered(f"a preflight that works (it failed: {cause})"[:300]) from None
            except asyncio.CancelledError:
                await self._end(handle, "the request was abandoned")
                raise

    async def _end(self, handle: WorkflowHandle[Any, Any], why: str) -> None:
        try:
            await handle.terminate(reason=why, rpc_timeout=self.timeout)
        except RPCError as error:
            # It may have ended on its own in the meantime.
            if error.status != RPCStatusCode.NOT_FOUND:
                raise

    async def start_run(self, arg: RunInput, memo: dict[str, Any], *, again: bool = False) -> bool:
        """Starts the run's workflow, or with `again` another attempt of a run that has ended.

        False if such a run exists already, or if it has not ended.
        """
        policy = WorkflowIDReusePolicy
        async with self.calling() as client:
            try:
                await client.start_workflow(
                    TRAINING_RUN,
                    arg,
                    id=workflow_of(arg.run_id),
                    task_queue=arg.queues.orchestrator,
                    memo={MEMO_KEY: memo},
                    static_summary=summary_of(memo),
                    static_details=details_of(workflow_of(arg.run_id), memo),
                    id_reuse_policy=policy.ALLOW_DUPLICATE if again else policy.REJECT_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    rpc_timeout=self.timeout,
                )
            except WorkflowAlreadyStartedError:
                return False
            return True

    async def cancel(self, run_id: str, reason: str, caller: Caller) -> bool:
        """Requests a run's end without any more work; False if it has ended."""
        request = RequestCancelWorkflowExecutionRequest(
            namespace=self.namespace,
            workflow_execution=WorkflowExecution(workflow_id=run_id),
            identity=caller.identity,
            request_id=caller.request,
            reason=reason,
        )
        try:
            await self.call("request_cancel_workflow_execution", request)
        except Missing:
            return False
        return True

    async def change(self, run_id: str, patch: dict[str, Any], caller: Caller) -> bool:
        """Changes the config of a run; False if it has ended in the meantime.

        Raises ValueError if the run refuses, Unanswered if no worker handles it in time.
        """
        try:
            async with self.calling() as client, asyncio.timeout(self.timeout.total_seconds()):
                while not await _updated(client.get_workflow_handle(run_id), patch, caller):
                    await asyncio.sleep(UPDATE_AGAIN_AFTER_S)
        except WorkflowUpdateFailedError as error:
            raise ValueError(str(error.cause)) from None
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            raise Unanswered("a worker that runs the run's workflow") from None
        except Missing:
            return False
        return True

    async def signal(
        self, run_id: str, name: str, arg: Any, caller: Caller, request_id: str = ""
    ) -> bool:
        """Signals a run; False if it has ended in the meantime. An execution receives a signal sent
        again with the same `request_id` only once.
        """
        request = SignalWorkflowExecutionRequest(
            namespace=self.namespace,
            workflow_execution=WorkflowExecution(workflow_id=run_id),
            signal_name=name,
            input=Payloads(payloads=await WIRE.encode([arg])),
            identity=caller.identity,
            request_id=request_id or caller.request,
        )
        try:
            await self.call("signal_workflow_execution", request)
        except Missing:
            return False
        return True

    async def executions(self, run_id: str) -> list[Execution]:
        """Every execution of a run and of the workflows below it that Temporal lists."""
        below = (f"WorkflowId STARTS_WITH '{run_id}{mark}'" for mark in ("/", ATTEMPT_MARK))
        return await self.listed(" OR ".join([f"WorkflowId = '{run_id}'", *below]))

    async def delete(self, executions: Sequence[Execution], run_id: str) -> None:
        """Has Temporal delete `executions`, which have all ended, those of the run itself last.
        Temporal forgets them within about half a minute. Raises ApiProblem 503.
        """
        own = [execution for execution in executions if execution.id == run_id]
        others = [execution for execution in executions if execution.id != run_id]
        for part in [others[i : i + AT_ONCE] for i in range(0, len(others), AT_ONCE)]:
            await asyncio.gather(*map(self._delete, part))
        for execution in sorted(own, key=lambda execution: execution.started):
            await self._delete(execution)

    async def _delete(self, execution: Execution) -> None:
        request = DeleteWorkflowExecutionRequest(
            namespace=self.namespace,
            workflow_execution=WorkflowExecution(workflow_id=execution.id, run_id=execution.run),
        )
        # Another request may have deleted it.
        with contextlib.suppress(Missing):
            await self.call("delete_workflow_execution", request)
