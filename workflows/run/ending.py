"""How a run ends: a last checkpoint if it can be written, then neither dispatch nor servers.

Invariant: what fails on the way hides nothing of why the run ends.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow

from ratchet.activities.contracts.controls import printable
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.generations import Generations
from ratchet.workflows.run.servers import Servers
from ratchet.workflows.run.status import FAILS_BETWEEN_STEPS
from ratchet.workflows.run.trainer import Trainer

CLOSE_AT_MOST = timedelta(seconds=60)
SAVED_WITHIN = timedelta(minutes=30)
"""A lost trainer may have to load a checkpoint and to train again what came after it."""


def cancelled_for() -> str:
    """The reason of the request that cancelled the run; '' if it gave none."""
    return printable(workflow.cancellation_reason() or "")


class Ending:
    """Ends one run."""

    def __init__(
        self,
        context: Context,
        servers: Servers,
        leases: Leases,
        generations: Generations,
        trainer: Trainer,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = context.state
        self._servers = servers
        self._leases = leases
        self._generations = generations
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._outages = context.outages
        self._log = context.log

    async def save_before_failing(self) -> None:
        """Writes a checkpoint to go on from, if the trainer is there to do so. A store that is away
        for long is not waited for.
        """
        if self._trainer.is_saved or not self._trainer.is_up:
            return
        if not workflow.patched(FAILS_BETWEEN_STEPS):
            return
        self._log.fails()
        self._log.set_status("stopping")
        await self._generations.send()
        try:
            await asyncio.wait_for(self._checkpoint(), SAVED_WITHIN.total_seconds())
        except (RunFailed, TimeoutError, asyncio.CancelledError) as another:
            late = isinstance(another, TimeoutError)
            reason = f"not within {SAVED_WITHIN}" if late else str(another)
            reason = reason or "the run was cancelled"
            self._log.warn(f"no checkpoint of step {self._state.steps.step}: {reason}")

    async def close(self, status: str, **ended: Any) -> None:
        """Ends dispatch and hosts, and writes the run's final state."""
        self._log.set_status("stopping")
        await self._generations.send()
        await self._servers.close()
        try:
            await workflow.wait_condition(
                lambda: not self._leases.live and not self._log.busy,
                timeout=CLOSE_AT_MOST,
                timeout_summary="dispatch to close",
            )
        except TimeoutError:
            self._log.note("dispatch did not close in time")
        for host in self._state.servers.hosts:
            self._outages.on_closed(host)
        self._log.ended(status, **ended)
