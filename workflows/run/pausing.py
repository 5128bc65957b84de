"""Pausing a run: nothing in flight, a checkpoint, no servers; everything else is kept.

Invariant: what was rolled out, collected or shipped before a pause trains after it; nothing is
rolled out twice. Groups cancelled to pause at once are requeued under the same ids, so that their
completed rollouts are adopted.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Literal

from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.rules.leases import OVER, Leases
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.generations import Generations
from ratchet.workflows.run.servers import Servers
from ratchet.workflows.run.steps import START_AT_MOST, Steps, stalled_after, started_within
from ratchet.workflows.run.trainer import Trainer

PAUSED_AT_MOST = timedelta(days=3650)


class Pausing:
    """Pauses and resumes one run on request."""

    def __init__(
        self,
        context: Context,
        servers: Servers,
        leases: Leases,
        pushes: Pushes,
        generations: Generations,
        stepping: Steps,
        trainer: Trainer,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = context.state
        self._part = context.state.requests
        self._fleet = context.fleet
        self._servers = servers
        self._leases = leases
        self._pushes = pushes
        self._generations = generations
        self._stepping = stepping
        self._trainer = trainer
        self._log = context.log
        self._news = context.news
        # Limit on the time without a rollout in flight ending.
        self._drained_within = stalled_after(context.config)
        self._started_within = started_within(context.config)
        self._checkpoint = checkpoint

    def on_stop(self, reason: str) -> None:
        """The run should end; the first reason stays."""
        self._part.stop = self._part.stop or reason

    def on_pause(self, mode: Literal["drain", "cancel"], reason: str) -> None:
        """The run should pause, unless it is ending; the first reason stays, and that of cancelling
        what another pause drains is added to it.
        """
        part = self._part
        if part.stop or self._state.lifecycle.status in OVER:
            self._log.warn("pause: ignored, since the run is ending")
        elif part.pause != "cancel":
            if not part.pause:
                part.pause_reason = reason
            elif mode == "cancel" and reason != part.pause_reason:
                part.pause_reason = f"{part.pause_reason}; {reason}"
            part.pause = mode
            self._news.wake()

    def on_resume(self) -> None:
        """The run should continue."""
        self._part.pause = ""
        self._news.wake()

    def on_checkpoint(self) -> None:
        """A checkpoint should be written before the next step."""
        self._part.checkpoint = True

    def on_saved(self) -> None:
        """The requested checkpoint is about to be written."""
        self._part.checkpoint = False

    async def come_to_rest(self, failure: RunFailed | None = None) -> None:
        """From 'running' to 'paused'; with a `failure` at once, for that reason."""
        part, state = self._part, self._state
        if failure is not None:
            part.pause, part.pause_reason, part.trouble = "cancel", str(failure), str(failure)
            self._log.failure = None
        self._log.note(f"pausing: {part.pause_reason}")
        self._log.set_status("pausing")
        self._news.wake()
        if failure is not None:
            # The loop that informs dispatch may be the one that failed.
            await self._generations.send()
        await self._log.wait(
            lambda: f"{self._in_flight()} rollouts in flight to end",
            self._at_rest,
            self._drained_within,
            progress=lambda: state.train.delivered + state.evals.rollouts,
        )
        saved = self._trainer.is_saved
        if not saved and (failure is None or self._trainer.stands_at(state.steps.step)):
            await self._checkpoint()
        await self._log.perform("servers to end", self._servers.put_away(), START_AT_MOST)
        self._fleet.forgive()
        self._log.set_status("paused")

    async def rest(self) -> None:
        """Waits until somebody resumes or stops the run."""
        await self._log.wait(lambda: "resume", lambda: not self._part.pause, PAUSED_AT_MOST)

    async def wake(self) -> None:
        """From 'paused' to 'running', on new servers."""
        fleet = self._fleet
        self._part.pause_reason = self._part.trouble = ""
        self._leases.forgive()
        self._trainer.forgive()
        self._fleet.forgive()
        self._log.set_status("starting")
        await self._servers.open()
        await self._log.wait(
            lambda: f"all servers to be up ({', '.join(fleet.missing()) or 'weights verified'})",
            # A push in progress is of the next version.
            lambda: not fleet.missing() and fleet.synced(self._state.servers.target_version),
            self._started_within,
        )
        self._log.set_status("running")
        self._news.wake()

    def _at_rest(self) -> bool:
        side_work = self._log.busy or self._stepping.shipping or self._pushes.in_flight
        return not (self._leases.live or side_work)

    def _in_flight(self) -> int:
        return sum(g.inflight_train + g.inflight_eval for g in self._leases.live)
