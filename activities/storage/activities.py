"""Light store work that belongs to no other room: the step records behind every curve."""

import asyncio
import time
from dataclasses import dataclass

from temporalio import activity

from activities.context import WorkerContext, attempt_token
from activities.contracts import names
from activities.contracts.training import StepRecord
from activities.hosting.heartbeat import heartbeats
from activities.storage import keys


@dataclass(frozen=True)
class StoreActivities:
    """Activities of the orchestrator role."""

    ctx: WorkerContext

    @activity.defn(name=names.RECORD_STEP)
    async def record_step(self, record: StepRecord) -> None:
        """Commits a step's metrics; a step that is recorded already stays as it is.

        Raises CorruptArtifact if a part is missing or damaged.
        """
        async with heartbeats():
            await asyncio.to_thread(self._record_step, record, attempt_token())

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
