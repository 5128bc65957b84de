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
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.roles import SERVERS, ServerRole
from ratchet.activities.contracts.training import (
    PUSH_TRIES,
    PolicyResult,
    SyncInput,
    SyncResult,
    push_label,
)
from ratchet.workflows.protocol.activities import IS_RUNNING, RETURN_TIMEOUT, SYNC_WEIGHTS
from ratchet.workflows.protocol.errors import RunFailed, cause_of, type_of
from ratchet.workflows.protocol.messages import HOST, HostWorkflowInput
from ratchet.workflows.protocol.state import HostState
from ratchet.workflows.rules.fleet import hosts_of
from ratchet.workflows.run.context import Context

MAX_GATE_FAILURES = 3
KEPT_LABEL_VERSIONS = 100


class Servers:
    """The hosts of one run.

    `pushes_to_serving` counts pushes under way to engines that had traffic before: what they
    sample until the gate has spoken may have to be given up.
    """

    def __init__(self, context: Context) -> None:
        self._arg = context.arg
        self._config = context.config
        self._part = context.state.servers
        self._fleet = context.fleet
        self._outages = context.outages
        self._log = context.log
        self._news = context.news
        self.pushes_in_flight = 0
        self.pushes_to_serving = 0

    def begin(self, policy: PolicyResult) -> None:
        """What the run begins with: version 0, and every server that its config needs."""
        self._part.policy_origin = policy.origin
        self._part.weights, self._part.target_version = policy.weights, 0
        self._part.hosts.extend(hosts_of(self._config))

    def offer(self, version: int, weights: ArtifactRef) -> None:
        """The engines are to hold `weights` as `version`: the very bits that the trainer stands at.
        A trainer on hardware unlike that of the one before may have made others of the same batch.
        """
        part = self._part
        if version == part.target_version:
            assert part.weights is not None
            if weights.sha256 == part.weights.sha256:
                return
            self._log.note(f"v{version} is pushed again: its trainer made other bits")
            for engine in self._fleet.of("engine"):
                engine.verified = -1
            self._news.wake()
        part.weights, part.target_version = weights, version

    def forget_labels(self, version: int) -> None:
        """Drops rejected labels of versions that lie so far below that no group bears them."""
        self._part.rejected_labels = [
            label
            for label in self._part.rejected_labels
            if int(label.partition(".")[0]) > version - KEPT_LABEL_VERSIONS
        ]

    def forgive(self) -> None:
        """A pause ends what counts against a server."""
        for host in self._part.hosts:
            host.downs = host.gate_failures = 0

    async def open(self, role: ServerRole | None = None) -> None:
        """Starts a Host workflow for every server that is ours to keep, or for those of a role."""
        for host in self._part.hosts:
            if host.managed and role in (None, host.role):
                await self._open_host(host)

    async def close(self) -> None:
        """Tells every host that its server is no longer needed."""
        for host in self._part.hosts:
            if host.managed:
                await self.signal(self._host_id(host), "close")

    async def put_away(self) -> None:
        """Closes every host and waits until its server is gone, so that others can have its place.
        `open` brings them back.
        """
        await self.close()
        for host in self._part.hosts:
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
            self._news.wake()
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
        part = self._part
        while True:
            await workflow.wait_condition(
                lambda: host.up and part.weights is not None and host.verified < part.target_version
            )
            host.pushes += 1
            seen, version = replace(host), part.target_version
            serving = seen.verified >= 0
            self.pushes_in_flight += 1
            self.pushes_to_serving += serving
            try:
                result = await self._push(seen, version)
            except ActivityError as error:
                await self._on_push_failed(host, seen, version, error)
            else:
                part.rejected_labels.extend(result.rejected)
                if host.epoch == seen.epoch and host.up:
                    host.verified = version
                    host.gate_failures = 0
                self._news.wake()
            finally:
                self.pushes_in_flight -= 1
                self.pushes_to_serving -= serving

    async def _push(self, engine: HostState, version: int) -> SyncResult:
        assert self._part.weights is not None
        arg = SyncInput(
            run_id=self._arg.run_id,
            version=version,
            weights=self._part.weights,
            engine_index=engine.index,
            engine_epoch=engine.epoch,
            url=engine.address,
            model=engine.model,
            push=engine.pushes,
            tolerance=self._config.gate_tolerance,
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
        self._part.rejected_labels.extend(labels)
        self._fleet.mark_down("engine", engine.index, engine.epoch, reason)
        self._news.wake()
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


async def is_running(workflow_id: str, queues: Queues) -> bool:
    """Whether a workflow runs."""
    return await IS_RUNNING(DescribeInput(workflow_id), queues, f"is {workflow_id} running?")
