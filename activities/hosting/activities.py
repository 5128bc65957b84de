"""The activity that keeps one server alive for a run, and reports its address to the run.

Invariants:

- The server lives no longer than the activity: however that ends, the server is stopped first.
- An epoch is reported up at most once, and down only after it can no longer serve.
- A run that is closed or gone ends its hosts, even if nobody cancels them. A Temporal service that
  cannot be reached does not.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import (
    ENGINE_LOAD,
    EngineLoad,
    HostInput,
    HostReport,
    ServerState,
)
from ratchet.activities.contracts.redact import redacted
from ratchet.activities.contracts.rests import rest_after
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.hosting import reaper
from ratchet.activities.hosting.process import ServerProcess, describe_exit
from ratchet.activities.hosting.server_lag import record_lag
from ratchet.activities.hosting.spec import ServerSpec, SpecBuilder
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import failure_of, final
from ratchet.activities.runtime.heartbeat import heartbeats, last_beat

log = logging.getLogger(__name__)

SERVER_LOST = "ServerLost"
REPORT_SIGNAL = "host_report"
PROBE_EVERY_S = 1.0
STARTING_PROBED_EVERY_S = 0.25
PROBE_LIMIT_S = 5.0
LOST_AFTER_PROBES = 3
BLOCKED = (
    "; code that blocks (time.sleep, requests) can cause that: await it, or use asyncio.to_thread"
)
"""What an env server that is silent, but has not ended, may be busy with."""
RUN_CHECK_EVERY_S = 10.0
DISK_RETRIED_S = 30.0
"""The longest wait before another try after a store or disk failed."""
REPORT_AT_MOST_EVERY_S = 300.0
DETAIL_LIMIT = 1500

_CLOSED = (
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_COMPLETED,
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_FAILED,
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_CANCELED,
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_TERMINATED,
    WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_TIMED_OUT,
)
# Errors that may pass on their own; every other refusal is a mistake and is raised.
_TRANSIENT = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
    RPCStatusCode.ABORTED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.INTERNAL,
    RPCStatusCode.UNKNOWN,
)


def _attempt(info: WorkflowExecutionInfo) -> int:
    """Which attempt of its run an execution is, from its memo; 0 before it has one."""
    reported = info.memo.fields.get(names.MEMO_KEY)
    return int(json.loads(reported.data).get("attempt", 0)) if reported is not None else 0


class _RunClosed(Exception):
    """The run this host works for is over or gone."""


class _ServerLost(Exception):
    """The server exited, never became healthy, or stopped answering."""


class _ServerSilent(_ServerLost):
    """The server runs and does not answer."""


class HostActivities:
    """Keeps servers alive. `builders` says, by role, what to start."""

    def __init__(
        self,
        ctx: WorkerContext,
        client: Client,
        builders: Mapping[ServerRole, SpecBuilder],
    ) -> None:
        self.ctx = ctx
        self.client = client
        self.builders = builders

    @activity.defn(name=names.HOST_SERVER)
    async def host_server(self, host: HostInput) -> None:
        """Starts the server, reports it up, watches it; returns when the run is over.

        Raises a retryable ApplicationError of type 'ServerLost' once the server is down and
        reported so: the next attempt starts the next epoch. A builder's non-retryable error
        passes through.
        """
        epoch, seen_at = host.epoch_base + activity.info().attempt, last_beat()
        async with heartbeats():
            try:
                starting = self._report(host, epoch, "starting", seen_at=seen_at)
                await self._signal(host.run_id, REPORT_SIGNAL, starting)
                await self._serve(host, epoch)
            except _RunClosed:
                log.info("%s %s: the run is closed", host.run_id, host.host_id)

    async def _serve(self, host: HostInput, epoch: int) -> None:
        process: ServerProcess | None = None
        try:
            # An attempt may have been abandoned without its worker's knowledge, with a server.
            await asyncio.to_thread(
                reaper.sweep, self.ctx.home, run=host.run_id, host=host.host_id, everything=True
            )

            async def begin() -> ServerProcess:
                nonlocal process
                spec = await self.builders[host.role](self.ctx, host, epoch)
                process = ServerProcess(
                    spec,
                    home=self.ctx.home,
                    run=host.run_id,
                    host=host.host_id,
                    epoch=epoch,
                    grace_s=spec.grace_s,
                )
                await process.start()
                return process

            await self._keep(host, epoch, await self._with_patience(host, epoch, begin))
        except _RunClosed:
            raise
        except _ServerLost as lost:
            assert process is not None
            await process.stop(grace_s=0)
            why = BLOCKED if host.role == "env" and isinstance(lost, _ServerSilent) else ""
            await self._report_down(host, epoch, f"{lost}{why}", process.log_tail())
        except Exception as error:
            # Only a user's mistake ends the host; all else may pass and is reported.
            if isinstance(error, ApplicationError) and error.non_retryable:
                raise
            await self._report_down(host, epoch, f"{type(error).__name__}: {error}")
        finally:
            if process is not None:
                # Shielded: a second cancellation must not leave the server half stopped.
                await asyncio.shield(asyncio.create_task(process.stop()))

    async def _with_patience(
        self, host: HostInput, epoch: int, begin: Callable[[], Awaitable[ServerProcess]]
    ) -> ServerProcess:
        """The result of `begin()`. A failing store or disk is waited for: no server is to blame.

        The run's history is bounded, so the run receives few reports: that its host waits, once two
        tries have failed, seldom that the reason has changed, and that it no longer waits.
        """
        began = reported_at = time.monotonic()
        reported, tries = "", 0
        closed: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    process = await begin()
                    break
                except OSError as error:
                    failure = failure_of(error, f"the start of {host.host_id}")
                    if failure is None:
                        raise
                    reason = redacted(failure.message, DETAIL_LIMIT)
                closed = closed or asyncio.create_task(self._until_run_closed(host.run_id))
                tries, now = tries + 1, time.monotonic()
                # A failure that passes at once is no reason for the run to pause.
                news = reported != reason and tries > 1
                if news and (not reported or now - reported_at >= REPORT_AT_MOST_EVERY_S):
                    log.warning("%s waits: %s", host.host_id, reason)
                    waits = self._report(host, epoch, "starting", detail=reason)
                    await self._signal(host.run_id, REPORT_SIGNAL, waits)
                    reported, reported_at = reason, now
                rest = rest_after(now - began, DISK_RETRIED_S)
                if (await asyncio.wait([closed], timeout=rest))[0]:
                    closed.result()
        finally:
            if closed is not None:
                closed.cancel()
        if reported:
            starting = self._report(host, epoch, "starting")
            await self._signal(host.run_id, REPORT_SIGNAL, starting)
        return process

    def _report(self, host: HostInput, epoch: int, state: ServerState, **known: str) -> HostReport:
        return HostReport(
            role=host.role,
            index=host.index,
            epoch=epoch,
            state=state,
            name=host.name,
            run_id=host.run_id,
            **known,
        )

    async def _keep(self, host: HostInput, epoch: int, process: ServerProcess) -> None:
        started, spec = time.monotonic(), process.spec
        run_check = asyncio.create_task(self._until_run_closed(host.run_id))
        up: asyncio.Task[None] | None = None
        lag = asyncio.create_task(record_lag(self.ctx.store, host, spec.lag)) if spec.lag else None
        try:
            await self._until_healthy(spec, process, run_check)
            seconds = time.monotonic() - started
            where = (host.run_id, host.host_id, epoch)
            log.info("%s %s (epoch %d) is up after %.1f s", *where, seconds)
            known = {"address": spec.address, "queue": self.ctx.own_queue, "model": spec.model}
            report = self._report(host, epoch, "up", **known)
            up = asyncio.create_task(self._report_up(spec, host, report))
            await self._until_lost(spec, process, run_check, up)
        finally:
            tasks = [task for task in (run_check, up, lag) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _report_up(self, spec: ServerSpec, host: HostInput, report: HostReport) -> None:
        """Reports to the run; then, if the run wants it, the engine's load, forever.

        Raises a non-retryable ApplicationError if the engine does not report its load.
        """
        await self._signal(host.run_id, REPORT_SIGNAL, report)
        if spec.report_load is None:
            return

        async def send(load: EngineLoad) -> None:
            await self._signal(host.run_id, ENGINE_LOAD, replace(load, run_id=host.run_id))

        try:
            await spec.report_load(send)
        except ValueError as error:
            # A restarted engine would do no better.
            raise final(names.BAD_INPUT, error) from None

    async def _report_down(self, host: HostInput, epoch: int, reason: str, tail: str = "") -> None:
        """Reports to the run, then fails the attempt; raises _RunClosed if the run is closed."""
        # Redacted before it is cut: half a secret may not look like one.
        detail = redacted(f"{reason}; last log lines:\n{tail}" if tail else reason, DETAIL_LIMIT)
        down = self._report(host, epoch, "down", detail=detail)
        await self._signal(host.run_id, REPORT_SIGNAL, down)
        raise ApplicationError(f"{host.host_id}: {detail}", type=SERVER_LOST)

    # -- watching ---------------------------------------------------------------------------

    async def _until_healthy(
        self, spec: ServerSpec, process: ServerProcess, run_check: asyncio.Task[None]
    ) -> None:
        deadline = time.monotonic() + spec.start_timeout_s
        while not await self._probe(spec, process, run_check):
            await asyncio.to_thread(process.trim_log)
            if time.monotonic() > deadline:
                raise _ServerLost(f"not healthy within {spec.start_timeout_s:.0f} s of its start")
            await self._pause(process, run_check, STARTING_PROBED_EVERY_S)

    async def _until_lost(
        self,
        spec: ServerSpec,
        process: ServerProcess,
        run_check: asyncio.Task[None],
        up: asyncio.Task[None],
    ) -> None:
        healthy_at, failed = time.monotonic(), 0
        while True:
            await self._pause(process, run_check)
            await asyncio.to_thread(process.trim_log)
            if up.done():
                up.result()
            if await self._probe(spec, process, run_check):
                healthy_at, failed = time.monotonic(), 0
                continue
            failed += 1
            silent = time.monotonic() - healthy_at
            # Counted as well as timed: a worker that was itself frozen has missed probes, but has
            # not seen them fail.
            if silent >= spec.lost_after_s and failed >= LOST_AFTER_PROBES:
                raise _ServerSilent(f"did not answer its health check for {silent:.0f} s")

    async def _probe(
        self, spec: ServerSpec, process: ServerProcess, run_check: asyncio.Task[None]
    ) -> bool:
        probe = asyncio.ensure_future(spec.probe())
        try:
            await self._first(process, run_check, PROBE_LIMIT_S, probe)
            return probe.done() and probe.result()
        finally:
            probe.cancel()

    async def _pause(
        self,
        process: ServerProcess,
        run_check: asyncio.Task[None],
        seconds: float = PROBE_EVERY_S,
    ) -> None:
        await self._first(process, run_check, seconds)

    async def _first(
        self,
        process: ServerProcess,
        run_check: asyncio.Task[None],
        timeout_s: float,
        *others: asyncio.Future[bool],
    ) -> None:
        """Waits for `others` up to `timeout_s`; an exit or a closed run is raised at once."""
        exited = asyncio.create_task(process.exited.wait())
        either: list[asyncio.Future[Any]] = [exited, run_check, *others]
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if process.exited.is_set():
            raise _ServerLost(describe_exit(process.code))
        if run_check.done():
            run_check.result()

    # -- the run ----------------------------------------------------------------------------

    async def _until_run_closed(self, run_id: str) -> None:
        """Raises _RunClosed once the run is closed, or continues as a later attempt; keeps waiting
        through temporary failures.
        """
        run = WorkflowExecution(workflow_id=names.workflow_of(run_id))
        request = DescribeWorkflowExecutionRequest(namespace=self.client.namespace, execution=run)
        while True:
            await asyncio.sleep(RUN_CHECK_EVERY_S)
            try:
                # Raw: the client's own description fails on statuses it does not know (paused).
                answer = await self.client.workflow_service.describe_workflow_execution(
                    request, timeout=names.RPC_TIMEOUT
                )
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    raise _RunClosed from None
                if error.status not in _TRANSIENT:
                    raise
                continue
            info = answer.workflow_execution_info
            if info.status in _CLOSED or _attempt(info) > names.attempt_of(run_id):
                raise _RunClosed

    async def _signal(self, run_id: str, name: str, value: HostReport | EngineLoad) -> None:
        handle = self.client.get_workflow_handle(names.workflow_of(run_id))
        while True:
            try:
                await handle.signal(name, value, rpc_timeout=names.RPC_TIMEOUT)
                return
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    raise _RunClosed from None
                if error.status not in _TRANSIENT:
                    raise
            await asyncio.sleep(1.0)
