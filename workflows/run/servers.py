"""Opens and closes the hosts of a run, and keeps every engine at the run's newest weights.

Invariant: an engine is verified at a version only after a push of exactly that version passed the
gate in the engine's current epoch. An engine that fails the gate is restarted.
"""

import logging
from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import DescribeInput, HostInput, HostReport
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import SERVERS, ServerRole
from ratchet.activities.contracts.rollouts import LoadTasksInput
from ratchet.activities.contracts.training import SyncInput, SyncResult
from ratchet.workflows.protocol.activities import (
    IS_RUNNING,
    LOAD_TASKS,
    RETURN_TIMEOUT,
    SYNC_WEIGHTS,
)
from ratchet.workflows.protocol.errors import RunFailed, cause_of, type_of
from ratchet.workflows.protocol.messages import HOST, HostWorkflowInput
from ratchet.workflows.protocol.state import HostState
from ratchet.workflows.rules.fleet import MAX_DOWNS
from ratchet.workflows.rules.pushes import Push, Pushes
from ratchet.workflows.run.context import Context

MAX_GATE_FAILURES = 3
DIES_IN_VAIN = "dies-in-vain"
"""Before it, an environment whose server came up again each time never paused a run."""
LOOKS_EVERY = timedelta(minutes=5)


class Servers:
    """The hosts of one run."""

    def __init__(self, context: Context, pushes: Pushes) -> None:
        self._arg = context.arg
        self._config = context.config
        self._part = context.state.servers
        self._dispatch, self._evals = context.state.dispatch, context.state.evals
        self._fleet = context.fleet
        self._outages = context.outages
        self._log = context.log
        self._news = context.news
        self._pushes = pushes
        self._unverified: dict[int, str] = {}

    def on_report(self, report: HostReport) -> None:
        """A server came up or went down, or waits for the store or its disk."""
        if not self._fleet.on_report(report):
            return
        host = self._fleet.host(report.role, report.index)
        if self._fleet.dies_in_vain(host) and workflow.patched(DIES_IN_VAIN):
            host.downs = MAX_DOWNS
        self._news.wake()
        self._outages.hold_host(host)
        if report.state != "up":
            text = f"{report.role} {report.index} (epoch {report.epoch}) is {report.state}"
            line = f"{text}: {report.detail[-200:]}" if report.detail else text
            ordinary = report.state == "starting" and not report.detail
            self._log.note(line, logging.INFO if ordinary else logging.WARNING)

    async def open(self, role: ServerRole | None = None) -> None:
        """Starts a Host workflow for every server that the run hosts, or for those of a role."""
        for host in self._part.hosts:
            if host.managed and role in (None, host.role):
                await self._open_host(host)

    async def load_tasks(self) -> None:
        """Has a rollout worker load the tasks while engines start, which takes longest and leaves
        cores idle. Rollouts load what is missing, and meet again what fails here.
        """
        await workflow.wait_condition(lambda: all(host.up for host in self._fleet.of("env")))
        summary = "load the tasks of the environments"
        try:
            await LOAD_TASKS(LoadTasksInput(self._arg.run_id), self._arg.queues, summary)
        except ActivityError as error:
            self._log.note(f"tasks are loaded with the first rollouts: {cause_of(error)}")

    async def close(self) -> None:
        """Notifies every host that its server is no longer needed."""
        for host in self._part.hosts:
            if host.managed:
                await self.signal(self._host_id(host), "close")

    async def put_away(self) -> None:
        """Closes every host and waits until its server is gone, so that others can use its place.
        `open` brings them back.
        """
        await self.close()
        for host in self._part.hosts:
            if host.managed:
                await self._gone(self._host_id(host))
                self._fleet.put_away(host)
                self._outages.on_closed(host)

    async def _gone(self, workflow_id: str) -> None:
        for seconds in (1, 2, 4, 8, 15, 30, 60):
            if not await is_running(workflow_id, self._arg.queues):
                return
            await workflow.sleep(seconds, summary=f"{workflow_id} to end")
        self._log.warn(f"{workflow_id} does not end; its server may still use its device")

    async def signal(self, workflow_id: str, name: str, *args: Any) -> bool:
        """Signals another workflow of this run; False if that has already ended."""
        handle = workflow.get_external_workflow_handle(workflow_id)
        try:
            await handle.signal(name, args=list(args))
        except ApplicationError as error:
            self._log.note(f"{workflow_id} did not receive {name!r}: {error}")
            return False
        return True

    def lose(self, role: ServerRole, index: int, epoch: int, reason: str) -> None:
        """Takes a server that a rollout found gone out of use, and has it restarted."""
        host = self._fleet.host(role, index)
        if host.epoch == epoch and host.up and host.managed:
            self._fleet.mark_down(role, index, epoch, reason)
            self._log.note(f"{host.name} (epoch {epoch}) was lost: {reason}")
            self._news.wake()
            self._log.in_background(self.restart(replace(host)))

    async def restart(self, host: HostState) -> None:
        """Requests a new epoch, unless the host notices the loss on its own first."""
        current = self._fleet.host(host.role, host.index)
        try:
            await workflow.wait_condition(
                lambda: current.epoch > host.epoch,
                timeout=RETURN_TIMEOUT,
                timeout_summary=f"{host.name} to recover on its own",
            )
        except TimeoutError:
            await self.signal(self._host_id(host), "restart", host.epoch)

    async def keep_engine(self, host: HostState) -> None:
        """Pushes the newest weights to one engine whenever it is up without them."""
        while True:
            await workflow.wait_condition(lambda: self._pushes.is_due(host))
            push = self._pushes.start(host)
            try:
                result = await self._push(push)
            except ActivityError as error:
                await self._on_push_failed(host, push, error)
            else:
                self._pushes.on_verified(host, push, result.rejected)
                self._pushes.on_timed(result.seconds)
                if result.model and host.epoch == push.engine.epoch and host.up:
                    # From now on rollouts begin under the name of what was verified.
                    host.model = result.model
                self._note_unverified(host, result)
            finally:
                self._pushes.end(push)

    def _note_unverified(self, host: HostState, result: SyncResult) -> None:
        """Notes once, and again if it changes, which of an engine's weights are not compared."""
        if result.unverified != self._unverified.get(host.index, ""):
            self._unverified[host.index] = result.unverified
            text = f"{host.name}: {result.unverified or 'all bits are compared'}"
            (self._log.warn if result.unverified else self._log.note)(text)

    async def _push(self, push: Push) -> SyncResult:
        engine = push.engine
        arg = SyncInput(
            run_id=self._arg.run_id,
            version=push.version,
            weights=push.weights,
            engine_index=engine.index,
            engine_epoch=engine.epoch,
            url=engine.address,
            model=engine.model,
            push=engine.pushes,
            tolerance=self._config.gate_tolerance,
            oldest=self._oldest(push) if self._config.transfer == "adapter" else None,
        )
        summary = f"push v{push.version} to {engine.name} and verify"

        live = self._fleet.host("engine", engine.index)

        def attempt() -> Awaitable[SyncResult]:
            work = SYNC_WEIGHTS(arg, engine.queue, summary)
            # An engine that is gone passes no gate.
            return self._log.perform_unless(lambda: live.epoch > engine.epoch or not live.up, work)

        return await self._outages.perform(summary, attempt)

    def _oldest(self, push: Push) -> int:
        """The oldest version that a rollout in flight may use. One that began since the last report
        of its generation uses what the engine serves now.
        """
        train = [g.oldest for g in self._dispatch.generations if g.state != "closed"]
        evals = [progress.epoch.step for progress in self._evals.open]
        begun = [version for version in (*train, *evals) if version is not None]
        return min([*begun, push.version - 1])

    async def _on_push_failed(self, host: HostState, push: Push, error: ActivityError) -> None:
        kind, reason, engine = type_of(error), cause_of(error), push.engine
        self._log.note(f"push to {engine.name} failed: {reason}")
        self._pushes.on_failed(host, push, reason, refused=kind == names.GATE_FAILED)
        if kind == names.CORRUPT:
            raise RunFailed("store", reason, code="damaged")
        if kind != names.GATE_FAILED:
            await self.restart(engine)
        elif host.gate_failures >= MAX_GATE_FAILURES:
            raise RunFailed("inference", reason, code="gate_failed")
        else:
            await self.signal(self._host_id(engine), "restart", engine.epoch)

    async def _open_host(self, host: HostState) -> None:
        role = SERVERS[host.role]
        await workflow.start_child_workflow(
            HOST,
            HostWorkflowInput(
                HostInput(
                    run_id=self._arg.run_id,
                    role=host.role,
                    index=host.index,
                    queue=self._arg.queues.of(role.kept_by),
                    name=host.name if role.named else "",
                    weights=self._part.weights,
                    ui_label=f"host {host.name}",
                    epoch_base=host.epoch,
                    report_load=host.role == "engine" and self._config.permits is None,
                )
            ),
            id=self._host_id(host),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=f"{host.role} host {host.name} of {self._arg.run_id}",
        )

    def _host_id(self, host: HostState) -> str:
        again = f".{host.opened}" if host.opened else ""
        return f"{self._arg.run_id}/host/{host.role}/{host.index}{again}"


def rest_between_looks(waited: timedelta) -> timedelta:
    """How long to wait between two looks at a run that one has `waited` for: a tenth of that, up to
    LOOKS_EVERY, later a hundredth, so that the history stays short over years.
    """
    longest = max(LOOKS_EVERY, waited / 100)
    return min(max(timedelta(seconds=5), waited / 10), longest)


async def is_running(workflow_id: str, queues: Queues) -> bool:
    """Whether a workflow is still running."""
    return await IS_RUNNING(DescribeInput(workflow_id), queues, f"is {workflow_id} running?")
