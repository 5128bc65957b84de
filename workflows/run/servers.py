"""Opens and closes the hosts of a run, and keeps every engine at the run's newest weights.

Invariant: an engine is verified at a version only after a push of exactly that version passed the
gate in the engine's current epoch. An engine that fails the gate is restarted.
"""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import DescribeInput, HostInput
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import SERVERS, ServerRole
from ratchet.activities.contracts.training import PUSH_TRIES, SyncInput, SyncResult, push_label
from ratchet.workflows.protocol.activities import IS_RUNNING, RETURN_TIMEOUT, SYNC_WEIGHTS
from ratchet.workflows.protocol.errors import RunFailed, cause_of, type_of
from ratchet.workflows.protocol.messages import HOST, HostWorkflowInput, RunInput
from ratchet.workflows.protocol.state import HostState, RunState
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.run.outages import Outages
from ratchet.workflows.run.status import RunLog

MAX_GATE_FAILURES = 3


class Servers:
    """The hosts of one run. `changed` tells whether dispatch must hear of something.

    `pushes_to_serving` counts pushes under way to engines that had traffic before: what they
    sample until the gate has spoken may have to be given up.
    """

    def __init__(
        self,
        arg: RunInput,
        state: RunState,
        fleet: Fleet,
        mending: Outages,
        log: RunLog,
        tolerance: float,
        *,
        adaptive: bool,
    ) -> None:
        self._arg = arg
        self._state = state
        self._fleet = fleet
        self._outages = mending
        self._log = log
        self._tolerance = tolerance
        self._adaptive = adaptive
        self.pushes_in_flight = 0
        self.pushes_to_serving = 0
        self.changed = False

    async def open(self, role: ServerRole | None = None) -> None:
        """Starts a Host workflow for every server that is ours to keep, or for those of a role."""
        for host in self._state.hosts:
            if host.managed and role in (None, host.role):
                await self._open_host(host)

    async def close(self) -> None:
        """Tells every host that its server is no longer needed."""
        for host in self._state.hosts:
            if host.managed:
                await self.signal(self._host_id(host), "close")

    async def put_away(self) -> None:
        """Closes every host and waits until its server is gone, so that others can have its place.
        `open` brings them back.
        """
        await self.close()
        for host in self._state.hosts:
            if host.managed:
                await self._gone(self._host_id(host))
                host.up, host.verified = False, -1
                self._outages.on_closed(host)
                host.opened += 1

    async def _gone(self, workflow_id: str) -> None:
        for seconds in (1, 2, 4, 8, 15, 30, 60):
            if not await is_running(workflow_id, self._arg.queues):
                return
            await workflow.sleep(seconds, summary=f"{workflow_id} to end")
        self._log.note(f"{workflow_id} does not end; its server may still hold its place")

    async def signal(self, workflow_id: str, name: str, *args: Any) -> bool:
        """Signals another workflow of this run; False if that has already ended."""
        handle = workflow.get_external_workflow_handle(workflow_id)
        try:
            await handle.signal(name, args=list(args))
        except ApplicationError as error:
            self._log.note(f"{workflow_id} was not there for {name!r}: {error}")
            return False
        return True

    def lose(self, role: ServerRole, index: int, epoch: int, reason: str) -> None:
        """Takes a server out of use that a rollout found gone, and has it restarted."""
        host = self._fleet.host(role, index)
        if host.epoch == epoch and host.up and host.managed:
            self._fleet.mark_down(role, index, epoch, reason)
            self._log.note(f"{host.name} (epoch {epoch}) was lost: {reason}")
            self.changed = True
            self._log.in_background(self.restart(replace(host)))

    async def restart(self, host: HostState) -> None:
        """Asks for a new epoch, unless the host notices the loss by itself first."""
        current = self._fleet.host(host.role, host.index)
        try:
            await workflow.wait_condition(
                lambda: current.epoch > host.epoch,
                timeout=RETURN_TIMEOUT,
                timeout_summary=f"{host.name} to come back by itself",
            )
        except TimeoutError:
            await self.signal(self._host_id(host), "restart", host.epoch)

    async def keep_engine(self, host: HostState) -> None:
        """Pushes the newest weights to one engine whenever it is up without them."""
        state = self._state
        while True:
            await workflow.wait_condition(
                lambda: (
                    host.up and state.weights is not None and host.verified < state.target_version
                )
            )
            host.pushes += 1
            seen, version = replace(host), state.target_version
            serving = seen.verified >= 0
            self.pushes_in_flight += 1
            self.pushes_to_serving += serving
            try:
                result = await self._push(seen, version)
            except ActivityError as error:
                await self._on_push_failed(host, seen, version, error)
            else:
                state.rejected_labels.extend(result.rejected)
                if host.epoch == seen.epoch and host.up:
                    host.verified = version
                    host.gate_failures = 0
                self.changed = True
            finally:
                self.pushes_in_flight -= 1
                self.pushes_to_serving -= serving

    async def _push(self, engine: HostState, version: int) -> SyncResult:
        assert self._state.weights is not None
        arg = SyncInput(
            run_id=self._arg.run_id,
            version=version,
            weights=self._state.weights,
            engine_index=engine.index,
            engine_epoch=engine.epoch,
            url=engine.address,
            model=engine.model,
            push=engine.pushes,
            tolerance=self._tolerance,
        )
        summary = f"push v{version} to {engine.name} and verify"

        live = self._fleet.host("engine", engine.index)

        def push() -> Awaitable[SyncResult]:
            work = SYNC_WEIGHTS(arg, engine.queue, summary)
            # An engine that is gone passes no gate.
            return self._log.perform_unless(lambda: live.epoch > engine.epoch or not live.up, work)

        return await self._outages.perform(summary, push)

    async def _on_push_failed(
        self, host: HostState, engine: HostState, version: int, error: ActivityError
    ) -> None:
        cause, reason = error.cause, cause_of(error)
        self._log.note(f"push to {engine.name} failed: {reason}")
        # However the push failed, nobody has verified what the engine samples under its labels.
        labels = [push_label(version, engine.pushes, number) for number in range(PUSH_TRIES)]
        self._state.rejected_labels.extend(labels)
        self._fleet.mark_down("engine", engine.index, engine.epoch, reason)
        self.changed = True
        if type_of(error) == names.CORRUPT:
            raise RunFailed("store", reason, code="damaged")
        if isinstance(cause, ApplicationError) and cause.type == names.GATE_FAILED:
            host.gate_failures += 1
            if host.gate_failures >= MAX_GATE_FAILURES:
                raise RunFailed("inference", reason, code="gate_failed")
            await self.signal(self._host_id(engine), "restart", engine.epoch)
        else:
            await self.restart(engine)

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
                    weights=self._state.weights,
                    ui_label=f"host {host.name}",
                    epoch_base=host.epoch,
                    report_load=host.role == "engine" and self._adaptive,
                )
            ),
            id=self._host_id(host),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=f"{host.role} host {host.name} of {self._arg.run_id}",
        )

    def _host_id(self, host: HostState) -> str:
        again = f".{host.opened}" if host.opened else ""
        return f"{self._arg.run_id}/host/{host.role}/{host.index}{again}"


async def is_running(workflow_id: str, queues: Queues) -> bool:
    """Whether a workflow runs."""
    return await IS_RUNNING(DescribeInput(workflow_id), queues, f"is {workflow_id} running?")
