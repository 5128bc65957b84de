"""Store work outside the other rooms: step records, config revisions, restoring a run."""

import asyncio
import time
from dataclasses import dataclass

from temporalio import activity

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.training import (
    RestoreInput,
    RestoreResult,
    SaveConfigInput,
    StepRecord,
)
from ratchet.activities.runtime.context import WorkerContext, attempt_token
from ratchet.activities.runtime.failing import final
from ratchet.activities.runtime.health_watch import HealthWatch
from ratchet.activities.runtime.heartbeat import heartbeats
from ratchet.activities.runtime.heartbeat_url import ping
from ratchet.activities.storage import configs, curves, keys
from ratchet.activities.storage.restore import restore
from ratchet.configs.upgrades import read_config


@dataclass(frozen=True)
class StoreActivities:
    """Activities of the orchestrator role. Without a `watch` no health rules are applied."""

    ctx: WorkerContext
    watch: HealthWatch | None = None

    @activity.defn(name=names.RECORD_STEP)
    async def record_step(self, record: StepRecord) -> None:
        """Commits a step's metrics; a step that is already recorded stays unchanged. The last of a
        hundred steps also commits their chunk. Then reports new health findings to the run, and
        pings its monitor, if it has one.

        Raises CorruptArtifact if a part is missing or damaged.
        """
        async with heartbeats():
            await asyncio.to_thread(self._record_step, record, attempt_token())
            if self.watch is not None:
                begun = await asyncio.to_thread(self.watch.reports, record.run_id, record.step)
                await self.watch.send(workflow_of(record.run_id), begun)
            if record.heartbeat_url or record.heartbeat_var:
                what = f"step {record.step} of {record.run_id}"
                await ping(record.heartbeat_url, record.heartbeat_var, what)

    @activity.defn(name=names.SAVE_CONFIG)
    async def save_config(self, input: SaveConfigInput) -> None:
        """Commits a revision of a run's config; an existing one stays unchanged.

        Raises ApplicationError CORRUPT if the existing one differs.
        """
        async with heartbeats():
            await asyncio.to_thread(self._save_config, input, attempt_token())

    def _save_config(self, input: SaveConfigInput, attempt: str) -> None:
        store = self.ctx.store
        config, revision = read_config(input.config), input.revision
        ref = configs.save(store, input.run_id, config, revision=revision, attempt=attempt)
        # What was just written need not be read.
        if ref.attempt != attempt and configs.load(store, input.run_id, revision) != config:
            raise final(
                names.CORRUPT,
                f"{ref.key}: a different config is stored as revision {revision} of run "
                f"{input.run_id}; change the config once more, which makes another revision",
            )

    @activity.defn(name=names.RESTORE_RUN)
    async def restore_run(self, input: RestoreInput) -> RestoreResult:
        """Makes a checkpoint of one run the start of another.

        Raises ApplicationError BAD_INPUT if there is no sound one, listing those there are.
        """
        async with heartbeats():
            try:
                return await asyncio.to_thread(restore, self.ctx.store, input, attempt_token())
            except ValueError as error:
                raise final(names.BAD_INPUT, error) from error

    def _record_step(self, record: StepRecord, attempt: str) -> None:
        store = self.ctx.store
        metrics: dict[str, float] = {}
        for part in record.parts:
            metrics |= store.get_json(part)
        value = {
            "step": record.step,
            "time": time.time(),
            "metrics": metrics | record.metrics,
        }
        store.put_json(keys.step_record(record.run_id, record.step), value, attempt=attempt)
        curves.pack(store, record.run_id, record.step, attempt=attempt)
