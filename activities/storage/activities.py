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
        """Commits a step's metrics; a step that is recorded already stays as it is."""
        value = {"step": record.step, "time": time.time(), "metrics": record.metrics}
        key = keys.step_record(record.run_id, record.step)
        async with heartbeats():
            await asyncio.to_thread(self.ctx.store.put_json, key, value, attempt=attempt_token())
