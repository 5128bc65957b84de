"""Keeps one server of a run alive, across worker deaths and for as long as the run needs it.

One heartbeating activity starts and supervises the server; its retries are the restarts. Only the
run opens or closes a host. The server itself reports to the run (`host_report`); this workflow
reports only what the activity cannot: that it gave up.
"""

import asyncio
from dataclasses import replace
from functools import partial

from temporalio import workflow

from ratchet.activities.contracts.hosting import HostInput, HostReport
from ratchet.activities.contracts.names import workflow_of
from ratchet.workflows.protocol.activities import HOST_SERVER
from ratchet.workflows.protocol.errors import cause_of
from ratchet.workflows.protocol.messages import HOST, HostWorkflowInput

EPOCHS_PER_RESTART = 1000


@workflow.defn(name=HOST)
class Host:
    """The owner of one server."""

    @workflow.init
    def __init__(self, arg: HostWorkflowInput) -> None:
        self._closed = False
        self._restart = 0

    @workflow.signal
    def close(self) -> None:
        """The run no longer needs this server."""
        self._closed = True

    @workflow.signal
    def restart(self, epoch: int) -> None:
        """Ends epoch `epoch` of the server; later epochs are not touched."""
        self._restart = max(self._restart, epoch)

    @workflow.run
    async def run(self, arg: HostWorkflowInput) -> None:
        """Returns when the host was closed or its run is over."""
        host = arg.host
        while not self._closed:
            summary = f"{host.ui_label or host.host_id} of {host.run_id}"
            task = HOST_SERVER.start(host, host.queue, summary)
            await workflow.wait_condition(partial(self._over, task, host.epoch_base))
            if task.done():
                if (error := task.exception()) is not None:
                    await self._give_up(host, error)
                return
            task.cancel()
            await workflow.wait([task])
            host = replace(host, epoch_base=host.epoch_base + EPOCHS_PER_RESTART)

    def _over(self, task: asyncio.Task[None], epoch_base: int) -> bool:
        return task.done() or self._closed or self._restart > epoch_base

    async def _give_up(self, host: HostInput, error: BaseException) -> None:
        report = HostReport(
            role=host.role,
            index=host.index,
            epoch=host.epoch_base,
            state="failed",
            name=host.name,
            detail=cause_of(error),
            run_id=host.run_id,
        )
        run = workflow.get_external_workflow_handle(workflow_of(host.run_id))
        await run.signal("host_report", report)
