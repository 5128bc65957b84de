"""The run's side of the trainer: batches in order, checkpoints, and getting a lost trainer back.

Invariant: trainer state is a function of (checkpoint, batches since), so a trainer that was lost
is replaced by one that loads the checkpoint and trains the recorded batches again.
"""

from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from dataclasses import replace
    from datetime import timedelta

    from activities.contracts import names
    from activities.contracts.training import (
        CheckpointResult,
        LoadTrainerInput,
        LoadTrainerResult,
        SaveCheckpointInput,
        TrainerTarget,
        TrainStepInput,
        TrainStepResult,
    )
    from activities.storage.refs import ArtifactRef
    from workflows import policies
    from workflows.failures import RunFailed, cause_of, type_of
    from workflows.fleet import Fleet
    from workflows.run_log import RunLog
    from workflows.servers import Servers
    from workflows.state import HostState, RunState

MAX_LOSSES = 10
COMES_UP_WITHIN = timedelta(minutes=30)

SPACE_CHECKED_EVERY = timedelta(seconds=30)

T = TypeVar("T")


class Trainer:
    """Steps one run's trainer."""

    def __init__(
        self, run_id: str, state: RunState, fleet: Fleet, servers: Servers, log: RunLog
    ) -> None:
        self._run_id = run_id
        self._state = state
        self._fleet = fleet
        self._servers = servers
        self._log = log

    async def train(self, step: int, batch: ArtifactRef) -> TrainStepResult:
        """Trains batch `step`, on a trainer that stands at `step - 1`."""
        while True:
            host = await self._standing_at(step - 1)
            try:
                result = await self._train_once(step, batch, host)
            except ActivityError as error:
                await self._on_lost(host, error)
                continue
            self._state.trainer_step = step
            self._state.trainer_losses = 0
            return result

    async def checkpoint(self, run_state: str) -> None:
        """Commits a checkpoint at the run's step, unless there is one."""
        state = self._state
        if state.step == 0 or (state.checkpoint and state.checkpoint.step == state.step):
            return
        while True:
            host = await self._standing_at(state.step)
            arg = SaveCheckpointInput(
                self._run_id, state.step, TrainerTarget(host.epoch, host.address), run_state
            )
            summary = f"checkpoint at step {state.step}"
            try:
                state.checkpoint = await self._on_trainer(
                    names.SAVE_CHECKPOINT, arg, CheckpointResult, host, summary
                )
            except ActivityError as error:
                if type_of(error) == names.NO_SPACE:
                    await self._wait_for_space(cause_of(error))
                else:
                    await self._on_lost(host, error)
                continue
            state.batches = []
            return

    async def _standing_at(self, step: int) -> HostState:
        """A trainer that stands at `step`: the one we have, or a fresh one that catches up."""
        state, host = self._state, self._fleet.host("trainer", 0)
        while True:
            await self._log.wait(
                lambda: "the trainer to come up", lambda: host.up, COMES_UP_WITHIN, stoppable=False
            )
            if state.trainer_epoch == host.epoch and state.trainer_step == step:
                return replace(host)
            seen = replace(host)
            try:
                await self._catch_up(seen, step)
            except ActivityError as error:
                await self._on_lost(seen, error)
                continue
            state.trainer_epoch, state.trainer_step = seen.epoch, step

    async def _catch_up(self, host: HostState, step: int) -> None:
        checkpoint = self._state.checkpoint
        loaded = await self._on_trainer(
            names.LOAD_TRAINER,
            LoadTrainerInput(
                self._run_id,
                TrainerTarget(host.epoch, host.address),
                checkpoint.ref if checkpoint else None,
            ),
            LoadTrainerResult,
            host,
            f"load trainer at step {checkpoint.step if checkpoint else 0}",
        )
        recorded = self._state.batches[: step - loaded.step]
        assert len(recorded) == step - loaded.step
        for number, batch in enumerate(recorded, start=loaded.step + 1):
            await self._train_once(number, batch, host)

    async def _train_once(self, step: int, batch: ArtifactRef, host: HostState) -> TrainStepResult:
        arg = TrainStepInput(self._run_id, step, batch, TrainerTarget(host.epoch, host.address))
        summary = f"train step {step} · v{step - 1} → v{step}"
        return await self._on_trainer(
            names.TRAIN_STEP,
            arg,
            TrainStepResult,
            host,
            summary,
            waits_for=f"policy v{step}: trainer step running",
        )

    async def _on_trainer(
        self,
        name: str,
        arg: Any,
        result_type: type[T],
        host: HostState,
        summary: str,
        waits_for: str = "",
    ) -> T:
        work = workflow.execute_activity(
            name,
            arg,
            result_type=result_type,
            task_queue=host.queue,
            schedule_to_start_timeout=policies.QUEUE_TIMEOUT,
            start_to_close_timeout=policies.STEP_TIMEOUT,
            heartbeat_timeout=policies.HEARTBEAT,
            retry_policy=policies.ONCE,
            summary=summary,
        )
        name = waits_for or summary
        result: T = await self._log.carry_out(name, work, policies.STEP_TIMEOUT)
        return result

    async def _wait_for_space(self, reason: str) -> None:
        self._log.note(reason)
        await workflow.sleep(SPACE_CHECKED_EVERY, summary="disk space for a checkpoint")

    async def _on_lost(self, host: HostState, error: ActivityError) -> None:
        state, reason = self._state, cause_of(error)
        if type_of(error) == names.BAD_INPUT:
            raise RunFailed("trainer", reason, code="bad_input", user=True)
        state.trainer_losses += 1
        self._log.note(f"trainer lost (epoch {host.epoch}): {reason}")
        if state.trainer_losses > MAX_LOSSES:
            raise RunFailed("trainer", f"lost {state.trainer_losses} times, last: {reason}")
        state.trainer_epoch = -1
        self._fleet.mark_down("trainer", 0, host.epoch, reason)
        await self._servers.restart(host)
