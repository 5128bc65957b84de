"""The run's side of the trainer: batches in order, checkpoints, and recovery of a lost trainer.

Invariant: trainer state is a function of (checkpoint, batches since), so a trainer that was lost
is replaced by one that loads the checkpoint and trains on the recorded batches again.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta

from temporalio.exceptions import ActivityError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import (
    LoadTrainerInput,
    LoadTrainerResult,
    SaveCheckpointInput,
    TrainerTarget,
    TrainStepInput,
    TrainStepResult,
)
from ratchet.workflows.protocol.activities import (
    LOAD_TRAINER,
    SAVE_CHECKPOINT,
    TRAIN_STEP,
    Activity,
    Input,
    Result,
)
from ratchet.workflows.protocol.errors import RunFailed, cause_of, type_of
from ratchet.workflows.protocol.state import HostState, Recording, TrainedBatch
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.servers import Servers

MAX_LOSSES = 10
COMES_UP_WITHIN = timedelta(minutes=30)
OTHER_BITS = "v{} is pushed again: its trainer produced different bits"


class Trainer:
    """Steps one run's trainer."""

    def __init__(self, context: Context, servers: Servers, pushes: Pushes) -> None:
        self._run_id = context.arg.run_id
        self._state = context.state
        self._part = context.state.trainer
        self._fleet = context.fleet
        self._servers = servers
        self._pushes = pushes
        self._outages = context.outages
        self._log = context.log

    async def train(self, step: int, batch: ArtifactRef) -> TrainStepResult:
        """Trains batch `step`, on a trainer that stands at `step - 1`."""
        revision = self._state.live.revision
        while True:
            host = await self._standing_at(step - 1)
            # Until it reports, its step is unknown.
            self._part.step = -1
            try:
                result = await self._train_once(TrainedBatch(step, batch, revision), host)
            except ActivityError as error:
                if type_of(error) == names.BAD_INPUT:
                    # It refused the batch before it changed anything.
                    self._part.step = step - 1
                await self._on_lost(host, error)
                continue
            self._part.step = step
            self._part.losses = 0
            return result

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the run's step, or nothing to save."""
        step, checkpoint = self._state.steps.step, self._part.checkpoint
        return step == 0 or bool(checkpoint and checkpoint.step == step)

    @property
    def is_up(self) -> bool:
        """Whether there is a trainer that could save."""
        return any(host.up for host in self._fleet.of("trainer"))

    def record(self, batch: TrainedBatch) -> None:
        """A batch was trained: it is needed to rebuild a trainer. If its weights were not verified
        before the run paused, it trains once more.
        """
        part = self._part
        part.batches = [*(each for each in part.batches if each.step < batch.step), batch]

    def forgive(self) -> None:
        """A pause resets the count of losses."""
        self._part.losses = 0

    async def checkpoint(self, run_state: Callable[[], str]) -> None:
        """Commits a checkpoint at the run's step, unless there is one; `run_state()` is the part of
        the run that it holds.
        """
        part, steps = self._part, self._state.steps
        if self.is_saved:
            return
        while True:
            host = await self._standing_at(steps.step)
            arg = SaveCheckpointInput(
                self._run_id,
                steps.step,
                TrainerTarget(host.epoch, host.address),
                run_state(),
                self._state.live.revision,
                self._state.evals.needed,
            )
            summary = f"checkpoint at step {steps.step}"
            try:
                saved = await self._on_trainer(SAVE_CHECKPOINT, arg, host, summary)
            except ActivityError as error:
                await self._on_lost(host, error)
                continue
            before, part.batches = part.batches, []
            older, part.checkpoint, part.older = part.checkpoint, saved, None
            if older is not None:
                part.older = Recording(older, before)
            return

    def stands_at(self, step: int) -> bool:
        """Whether the trainer that is up holds the state of `step`."""
        host = self._fleet.host("trainer", 0)
        return host.up and (self._part.epoch, self._part.step) == (host.epoch, step)

    async def _standing_at(self, step: int) -> HostState:
        """A trainer at `step`: the current one, or a fresh one that catches up."""
        host = self._fleet.host("trainer", 0)
        while True:
            await self._log.wait(
                lambda: "the trainer to come up", lambda: host.up, COMES_UP_WITHIN, stoppable=False
            )
            if self.stands_at(step):
                return replace(host)
            seen = replace(host)
            try:
                await self._catch_up(seen, step)
            except ActivityError as error:
                await self._on_lost(seen, error)
                continue
            self._part.epoch, self._part.step = seen.epoch, step

    async def _catch_up(self, host: HostState, step: int) -> None:
        try:
            loaded = await self._load(host)
        except ActivityError as error:
            if type_of(error) != names.CORRUPT or self._part.older is None:
                raise
            self._use_older(cause_of(error))
            loaded = await self._load(host)
        recorded = [batch for batch in self._part.batches if loaded.step < batch.step <= step]
        assert [batch.step for batch in recorded] == list(range(loaded.step + 1, step + 1))
        for batch in recorded:
            trained = await self._train_once(batch, host)
            newest = batch.step == self._state.servers.target_version
            if newest and self._pushes.offer(batch.step, trained.weights):
                self._log.warn(OTHER_BITS.format(batch.step))

    async def _load(self, host: HostState) -> LoadTrainerResult:
        checkpoint = self._part.checkpoint
        return await self._on_trainer(
            LOAD_TRAINER,
            LoadTrainerInput(
                self._run_id,
                TrainerTarget(host.epoch, host.address),
                checkpoint.ref if checkpoint else None,
                revision=self._state.live.revision,
            ),
            host,
            f"load trainer at step {checkpoint.step if checkpoint else 0}",
        )

    def _use_older(self, reason: str) -> None:
        """Goes back to the previous checkpoint, and trains again on what came after it."""
        part = self._part
        assert part.older is not None and part.checkpoint is not None
        damaged, older = part.checkpoint, part.older
        self._log.warn(
            f"checkpoint of step {damaged.step} is damaged ({reason}): that of step "
            f"{older.checkpoint.step} and the batches since are used instead"
        )
        part.checkpoint, part.older = older.checkpoint, None
        part.batches = [*older.batches, *part.batches]

    async def _train_once(self, batch: TrainedBatch, host: HostState) -> TrainStepResult:
        step, target = batch.step, TrainerTarget(host.epoch, host.address)
        needed = self._state.evals.needed
        arg = TrainStepInput(self._run_id, step, batch.ref, target, batch.revision, needed)
        summary = f"train step {step} · v{step - 1} → v{step}"
        waits_for = f"policy v{step}: trainer step running"
        return await self._on_trainer(TRAIN_STEP, arg, host, summary, waits_for)

    async def _on_trainer(
        self,
        activity: Activity[Input, Result],
        arg: Input,
        host: HostState,
        summary: str,
        waits_for: str = "",
    ) -> Result:
        def attempt() -> Awaitable[Result]:
            live = self._fleet.host("trainer", 0)
            work = activity(arg, host.queue, summary)
            # Once there is a later trainer, nobody is left to run this.
            work = self._log.perform_unless(lambda: live.epoch > host.epoch, work)
            return self._log.perform(waits_for or summary, work, activity.policy.timeout)

        return await self._outages.perform(summary, attempt)

    async def _on_lost(self, host: HostState, error: ActivityError) -> None:
        part, reason = self._part, cause_of(error)
        if type_of(error) == names.BAD_INPUT:
            raise RunFailed("trainer", reason, code="bad_input", user=True)
        if type_of(error) == names.CORRUPT:
            raise RunFailed("store", reason, code="damaged")
        if part.losses and names.OUT_OF_MEMORY in reason:
            # One loss may be another process's fault; two without a step in between are its own.
            self._fleet.mark_down("trainer", 0, host.epoch, reason)
            raise RunFailed("trainer", reason, code="bad_input", user=True)
        part.losses += 1
        self._log.note(f"trainer lost (epoch {host.epoch}): {reason}")
        self._fleet.mark_down("trainer", 0, host.epoch, reason)
        if part.losses > MAX_LOSSES:
            raise RunFailed("trainer", f"lost {part.losses} times, last: {reason}")
        part.epoch = -1
        await self._servers.restart(host)
