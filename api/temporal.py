"""The only door to Temporal: connects on first use, bounds every call, names every failure.

Executions are read as raw protobuf: the SDK's own `describe` and `list` raise ValueError on any
workflow that an operator has paused (status 8 is missing from its enum in 1.35).
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import (
    HistoryEventFilterType,
    TaskQueueType,
    WorkflowExecutionStatus,
)
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeWorkflowExecutionRequest,
    GetSystemInfoRequest,
    GetWorkflowExecutionHistoryRequest,
    ListWorkflowExecutionsRequest,
)
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDReusePolicy
from temporalio.envconfig import ClientConfig, ClientConnectConfig
from temporalio.service import RPCError, RPCStatusCode

from activities.contracts.checks import CheckResult
from activities.contracts.names import Queues
from activities.contracts.wire import WIRE
from api.problems import ApiProblem
from workflows.messages import (
    CHANGE_CONFIG,
    MEMO_KEY,
    PREFLIGHT,
    TRAINING_RUN,
    PreflightInput,
    RunInput,
)

UNREACHABLE = {RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED}
PAGE = 1000


@dataclass(frozen=True)
class Execution:
    """A workflow as Temporal knows it. `state` is Temporal's status in lower case; `memo` what
    the run last said about itself.
    """

    id: str
    type: str
    state: str
    started: datetime
    closed: datetime | None
    memo: dict[str, Any]


class Unanswered(Exception):
    """No worker answered; the message says what is missing."""


def a_worker_on(queues: list[str]) -> str:
    """What a run waits for while nobody polls `queues`, in words."""
    plural = "workers on task queues" if len(queues) > 1 else "a worker on task queue"
    return f"{plural} {', '.join(queues)}"


def _cause(error: RuntimeError) -> str:
    """The operating system's words out of the SDK's nested connection error."""
    text = " ".join(str(error).split())
    innermost = re.findall(r'message: "([^"]+)"', text)
    return str(innermost[-1]).lower() if innermost else text[:160]


def _when(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime().replace(tzinfo=UTC)


class Temporal:
    """Calls to one Temporal namespace; raises ApiProblem 503 when it does not answer."""

    def __init__(self, connect: ClientConnectConfig | None, *, timeout_s: float) -> None:
        """`connect`: as `ClientConfig.load_client_connect_config()` gives; None: load it here."""
        config = connect if connect is not None else ClientConfig.load_client_connect_config()
        self._connect: dict[str, Any] = {"target_host": "localhost:7233", **config}
        self.address: str = self._connect["target_host"]
        self.namespace: str = self._connect.get("namespace") or "default"
        self._timeout = timedelta(seconds=timeout_s)
        self._client: Client | None = None
        self._lock = asyncio.Lock()

    # -- connection -------------------------------------------------------------------------

    def _unreachable(self, why: str) -> ApiProblem:
        return ApiProblem(
            503,
            "temporal-unavailable",
            "Temporal does not answer",
            f"No answer from Temporal at {self.address}, namespace {self.namespace!r} ({why}). "
            "Start it (`make up`), or set TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE to one that "
            "runs, and try again.",
            retry_after_s=5,
        )

    async def client(self) -> Client:
        """The connected client. A failed attempt is not remembered."""
        async with self._lock:
            if self._client is None:
                try:
                    async with asyncio.timeout(self._timeout.total_seconds()):
                        self._client = await Client.connect(**self._connect, data_converter=WIRE)
                except TimeoutError:
                    raise self._unreachable("connecting timed out") from None
                except RuntimeError as error:
                    raise self._unreachable(_cause(error)) from None
            return self._client

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[Client]:
        client = await self.client()
        try:
            yield client
        except RPCError as error:
            if error.status == RPCStatusCode.RESOURCE_EXHAUSTED:
                raise ApiProblem(
                    503,
                    "temporal-busy",
                    "Temporal is busy",
                    f"Temporal at {self.address} refuses calls over its rate limit; try again.",
                    retry_after_s=2,
                ) from None
            if error.status in UNREACHABLE:
                raise self._unreachable(error.message or error.status.name) from None
            if error.status in (RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.PERMISSION_DENIED):
                raise ApiProblem(
                    503,
                    "temporal-refused",
                    "Temporal refuses this API",
                    f"Temporal at {self.address} refused: {error.message}. Check TEMPORAL_API_KEY "
                    "and the TLS settings.",
                ) from None
            if error.status == RPCStatusCode.NOT_FOUND and "amespace" in error.message:
                raise ApiProblem(
                    503,
                    "temporal-namespace-missing",
                    "The Temporal namespace does not exist",
                    f"Temporal at {self.address} has no namespace {self.namespace!r}; create it "
                    "(`temporal operator namespace create`) or set TEMPORAL_NAMESPACE.",
                ) from None
            raise

    async def ping(self) -> None:
        """Returns if Temporal answers for this namespace; raises ApiProblem."""
        async with self._calling() as client:
            await client.workflow_service.get_system_info(
                GetSystemInfoRequest(), timeout=self._timeout
            )
            await self._list(client, "WorkflowId = 'none'", 1, b"")

    # -- reading ----------------------------------------------------------------------------

    async def _execution(self, client: Client, info: WorkflowExecutionInfo) -> Execution:
        payload = info.memo.fields.get(MEMO_KEY)
        memo = (await client.data_converter.decode([payload]))[0] if payload is not None else {}
        state = WorkflowExecutionStatus.Name(info.status) if info.status else "UNSPECIFIED"
        return Execution(
            id=info.execution.workflow_id,
            type=info.type.name,
            state=state.removeprefix("WORKFLOW_EXECUTION_STATUS_").lower(),
            started=_when(info.start_time),
            closed=_when(info.close_time) if info.HasField("close_time") else None,
            memo=memo if isinstance(memo, dict) else {},
        )

    async def describe(self, run_id: str) -> Execution | None:
        """The newest execution of a run, or None."""
        async with self._calling() as client:
            try:
                answer = await client.workflow_service.describe_workflow_execution(
                    DescribeWorkflowExecutionRequest(
                        namespace=self.namespace, execution=WorkflowExecution(workflow_id=run_id)
                    ),
                    retry=True,
                    timeout=self._timeout,
                )
            except RPCError as error:
                missing = error.status == RPCStatusCode.NOT_FOUND
                if missing and "amespace" not in error.message:
                    return None
                raise
            found = await self._execution(client, answer.workflow_execution_info)
            return found if found.type == TRAINING_RUN else None

    async def _list(self, client: Client, query: str, size: int, token: bytes) -> Any:
        return await client.workflow_service.list_workflow_executions(
            ListWorkflowExecutionsRequest(
                namespace=self.namespace, page_size=size, next_page_token=token, query=query
            ),
            retry=True,
            timeout=self._timeout,
        )

    async def runs(self) -> list[Execution]:
        """Every run that Temporal retains, in no particular order."""
        query = f"WorkflowType = '{TRAINING_RUN}' AND ExecutionStatus != 'ContinuedAsNew'"
        async with self._calling() as client:
            found: list[Execution] = []
            token = b""
            while True:
                page = await self._list(client, query, PAGE, token)
                found += [await self._execution(client, info) for info in page.executions]
                token = page.next_page_token
                if not token:
                    return found

    async def close_reason(self, run_id: str) -> str:
        """What Temporal recorded when the run's workflow was closed from outside or failed."""
        async with self._calling() as client:
            answer = await client.workflow_service.get_workflow_execution_history(
                GetWorkflowExecutionHistoryRequest(
                    namespace=self.namespace,
                    execution=WorkflowExecution(workflow_id=run_id),
                    history_event_filter_type=(
                        HistoryEventFilterType.HISTORY_EVENT_FILTER_TYPE_CLOSE_EVENT
                    ),
                ),
                retry=True,
                timeout=self._timeout,
            )
        for event in answer.history.events:
            if event.HasField("workflow_execution_failed_event_attributes"):
                failure = event.workflow_execution_failed_event_attributes.failure
                while failure.HasField("cause"):
                    failure = failure.cause
                return failure.message
            if event.HasField("workflow_execution_terminated_event_attributes"):
                return event.workflow_execution_terminated_event_attributes.reason
        return ""

    async def unpolled(self, queues: Queues) -> list[str]:
        """Task queues that a new run needs and no worker has polled lately."""
        kinds = {
            queues.orchestrator: TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
            queues.env: TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            queues.trainer: TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        }
        missing = []
        async with self._calling() as client:
            for name, kind in kinds.items():
                answer = await client.workflow_service.describe_task_queue(
                    DescribeTaskQueueRequest(
                        namespace=self.namespace,
                        task_queue=TaskQueue(name=name),
                        task_queue_type=kind,
                    ),
                    retry=True,
                    timeout=self._timeout,
                )
                if not answer.pollers:
                    missing.append(name)
        return missing

    # -- acting -----------------------------------------------------------------------------

    async def preflight(self, run_id: str, arg: PreflightInput, timeout_s: float) -> CheckResult:
        """The workers' verdict on a config.

        Raises Unanswered when none came within `timeout_s` seconds or the check itself broke;
        its workflow is ended then, so that nothing runs on.
        """
        async with self._calling() as client:
            handle: WorkflowHandle[Any, CheckResult] = await client.start_workflow(
                PREFLIGHT,
                arg,
                id=f"{run_id}/preflight",
                task_queue=arg.queues.orchestrator,
                execution_timeout=timedelta(seconds=timeout_s + 60),
                result_type=CheckResult,
                static_summary=f"checks the config of {run_id} before it starts",
                rpc_timeout=self._timeout,
            )
            try:
                async with asyncio.timeout(timeout_s):
                    return await handle.result()
            except TimeoutError:
                await self._end(handle, "no answer in time")
                missing = await self.unpolled(arg.queues)
                raise Unanswered(
                    a_worker_on(missing) if missing else "the preflight's answer"
                ) from None
            except WorkflowFailureError as error:
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise Unanswered(f"a preflight that works (it failed: {cause})"[:300]) from None
            except asyncio.CancelledError:
                await self._end(handle, "the request was given up")
                raise

    async def _end(self, handle: WorkflowHandle[Any, Any], why: str) -> None:
        try:
            await handle.terminate(reason=why, rpc_timeout=self._timeout)
        except RPCError as error:
            # It may have ended by itself in the meantime.
            if error.status != RPCStatusCode.NOT_FOUND:
                raise

    async def start_run(self, arg: RunInput, memo: dict[str, Any]) -> None:
        """Starts the run's workflow."""
        async with self._calling() as client:
            await client.start_workflow(
                TRAINING_RUN,
                arg,
                id=arg.run_id,
                task_queue=arg.queues.orchestrator,
                memo={MEMO_KEY: memo},
                static_summary=f"{memo['name']}: {memo['max_steps']} steps",
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                rpc_timeout=self._timeout,
            )

    async def change(self, run_id: str, patch: dict[str, Any]) -> bool:
        """Changes the config of a run; False if it has ended in the meantime.

        Raises ValueError if the run refuses, Unanswered if no worker takes it up in time.
        """
        async with self._calling() as client:
            handle = client.get_workflow_handle(run_id)
            try:
                async with asyncio.timeout(self._timeout.total_seconds()):
                    await handle.execute_update(CHANGE_CONFIG, patch)
            except WorkflowUpdateFailedError as error:
                raise ValueError(str(error.cause)) from None
            except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
                raise Unanswered("a worker that carries out the run's workflow") from None
            except RPCError as error:
                missing = error.status == RPCStatusCode.NOT_FOUND
                if missing and "amespace" not in error.message:
                    return False
                raise
            return True

    async def signal(self, run_id: str, name: str, arg: Any) -> bool:
        """Signals a run; False if it has ended in the meantime."""
        async with self._calling() as client:
            try:
                await client.get_workflow_handle(run_id).signal(
                    name, arg, rpc_timeout=self._timeout
                )
            except RPCError as error:
                missing = error.status == RPCStatusCode.NOT_FOUND
                if missing and "amespace" not in error.message:
                    return False
                raise
            return True
