"""A run that stands still: nothing in flight, a checkpoint, no server kept, everything else kept.

Invariant: what was rolled out, collected or shipped before a pause trains after it; nothing is
rolled out twice. Groups that are given up to pause at once are leased anew under the same ids, so
that their rollouts that had ended are adopted.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta

from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.run.generations import Generations
from ratchet.workflows.run.servers import Servers
from ratchet.workflows.run.status import RunLog
from ratchet.workflows.run.steps import START_AT_MOST, Steps
from ratchet.workflows.run.trainer import Trainer

PAUSED_AT_MOST = timedelta(days=3650)


class Pausing:
    """Puts one run to rest and wakes it."""

    def __init__(
        self,
        state: RunState,
        fleet: Fleet,
        servers: Servers,
        generations: Generations,
        stepping: Steps,
        trainer: Trainer,
        log: RunLog,
        checkpoint: Callable[[], Awaitable[None]],
        drained_within: timedelta,
    ) -> None:
        """`drained_within`: how long no rollout in flight may end."""
        self._state = state
        self._fleet = fleet
        self._servers = servers
        self._generations = generations
        self._stepping = stepping
        self._trainer = trainer
        self._log = log
        self._drained_within = drained_within
        self._checkpoint = checkpoint

    async def come_to_rest(self, failure: RunFailed | None = None) -> None:
        """From 'running' to 'paused'; with a `failure` at once, and for its sake."""
        state, generations = self._state, self._generations
        if failure is not None:
            state.pause, state.pause_reason, state.trouble = "cancel", str(failure), str(failure)
            self._log.failure = None
        self._log.note(f"pausing: {state.pause_reason}")
        self._log.set_status("pausing")
        generations.wanted = True
        if failure is not None:
            # The loop that would tell dispatch may be the one that failed.
            await generations.send()
        await self._log.wait(
            lambda: f"{self._in_flight()} rollouts in flight to end",
            self._at_rest,
            self._drained_within,
            progress=lambda: state.train.delivered + state.eval_rollouts,
        )
        if failure is None or self._trainer.stands_at(state.step):
            await self._checkpoint()
        await self._log.perform("servers to end", self._servers.put_away(), START_AT_MOST)
        for host in self._fleet.hosts:
            host.downs = host.gate_failures = 0
        self._log.set_status("paused")

    async def rest(self) -> None:
        """Until somebody resumes or stops the run."""
        state = self._state
        await self._log.wait(lambda: "resume", lambda: not state.pause, PAUSED_AT_MOST)

    async def wake(self) -> None:
        """From 'paused' to 'running', on servers of their own."""
        state, fleet = self._state, self._fleet
        state.pause_reason = state.trouble = ""
        state.generation_deaths = state.trainer_losses = 0
        for host in fleet.hosts:
            host.downs = host.gate_failures = 0
        self._log.set_status("starting")
        await self._servers.open()
        await self._log.wait(
            lambda: f"servers to come up: {', '.join(fleet.missing()) or 'weights verified'}",
            # A push that was under way is of the version above.
            lambda: not fleet.missing() and fleet.synced(state.target_version),
            START_AT_MOST,
        )
        self._log.set_status("running")
        self._generations.wanted = True

    def _at_rest(self) -> bool:
        side_work = self._log.busy or self._stepping.shipping or self._servers.pushes_in_flight
        return not (self._generations.live or side_work)

    def _in_flight(self) -> int:
        return sum(g.inflight_train + g.inflight_eval for g in self._generations.live)
