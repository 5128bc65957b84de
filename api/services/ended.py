"""Runs that have ended, as the API shows them once Temporal no longer retains them.

    runs/<run>/ended.json        {state, started, closed, memo}, overwritten when it ends again
    index/ended.json             {until}: all runs that ended before are kept

Invariant: a run that ended while an API ran, or less than Temporal's retention before one started,
is kept completely. For other runs the store has only their data, and no record of how they ended.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from pydantic import ValidationError
from temporalio.service import RPCError

from ratchet.activities.storage import keys
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.run_view import error_of, status_of
from ratchet.api.store.artifacts import committed_at
from ratchet.api.store.records import Records
from ratchet.api.temporal.client import Execution, Temporal
from ratchet.workflows.protocol.messages import TRAINING_RUN

KEEP_EVERY_S = 600.0
MARGIN = timedelta(hours=1)
"""By how much clocks may differ, and Temporal's list of executions may lag."""
FORGOTTEN = "forgotten"
"""The state of an execution whose end was not recorded."""

logger = logging.getLogger(__name__)


async def keeping(temporal: Temporal, records: Records) -> NoReturn:
    """Records runs that have ended, now and every KEEP_EVERY_S."""
    while True:
        try:
            await keep_ended(temporal, records)
        except (ApiProblem, RPCError, StoreUnavailable) as error:
            logger.warning("the ends of runs are not recorded yet: %s", error)
        await asyncio.sleep(KEEP_EVERY_S)


async def keep_ended(temporal: Temporal, records: Records) -> int:
    """Records the runs that ended since the last call; returns how many executions. Raises
    ApiProblem and StoreUnavailable.
    """
    store, began, count = records.store, datetime.now(UTC), 0
    last = await asyncio.to_thread(store.read_live, keys.ENDED_UNTIL)
    since = datetime.fromisoformat(last["until"]) - MARGIN if last else None
    async for executions in temporal.ended_since(since):
        for execution in executions:
            try:
                count += await _kept_now(temporal, records, execution)
            except (CorruptArtifact, ValidationError) as error:
                logger.warning("the end of run %s is not recorded: %s", execution.id, error)
    await asyncio.to_thread(store.write_live, keys.ENDED_UNTIL, {"until": began.isoformat()})
    return count


async def _kept_now(temporal: Temporal, records: Records, execution: Execution) -> bool:
    """Records an execution, unless it is recorded already. Raises CorruptArtifact, ValidationError,
    and as `keep_ended`.
    """
    if await asyncio.to_thread(_is_kept, records, execution):
        return False
    memo = execution.memo
    if execution.state != "completed" and not memo.get("error"):
        reason = await temporal.close_reason(execution)
        if error := error_of(execution, status_of(execution), reason):
            memo = {**memo, "error": error.model_dump()}
    await asyncio.to_thread(_keep, records, execution, memo)
    return True


def _is_kept(records: Records, execution: Execution) -> bool:
    """Whether the last state of an execution, or of a later one, is recorded, or the store has
    nothing left of the run. Blocks.
    """
    if records.store.committed(keys.config(execution.id)) is None:
        return True
    kept = records.store.read_live(keys.ended(execution.id))
    return kept is not None and datetime.fromisoformat(kept["started"]) >= execution.started


def _keep(records: Records, execution: Execution, memo: dict[str, Any]) -> None:
    """Records the last state of an execution. Blocks."""
    assert execution.closed is not None
    record = {
        "state": execution.state,
        "started": execution.started.isoformat(),
        "closed": execution.closed.isoformat(),
        "memo": memo,
    }
    records.store.write_live(keys.ended(execution.id), record)
    # The run may have been deleted in the meantime.
    if records.store.committed(keys.config(execution.id)) is None:
        records.store.delete_folder(keys.ended(execution.id))


def forgotten(records: Records, run_id: str) -> Execution | None:
    """What is known about a run that Temporal no longer retains; None if it left no data. Its `run`
    is empty. Blocks.
    """
    kept = records.store.read_live(keys.ended(run_id))
    if kept is not None:
        started, closed = map(datetime.fromisoformat, (kept["started"], kept["closed"]))
        return Execution(run_id, TRAINING_RUN, kept["state"], started, closed, kept["memo"])
    config = records.config(run_id)
    if config is None:
        return None
    attempts = records.attempts(run_id)
    steps = [
        number_of(key.removesuffix(".json")) or 0
        for attempt in attempts
        for key in records.store.committed_keys(keys.step_records(attempt))
    ]
    evaluated: set[str] = set()
    if not config.trains:
        evaluated = {str(record.get("env")) for record in records.evals(run_id)}
        steps = [0] if evaluated else []
    # A run that failed to start has a config, and nothing else.
    if not steps:
        return None
    began = committed_at(records.store, keys.config(run_id)) or datetime.fromtimestamp(0, UTC)
    done = config.max_steps is not None and max(steps) >= config.max_steps
    done = done and (config.trains or evaluated >= {*config.envs})
    memo = {
        "name": config.name,
        "created_at": began.isoformat(),
        "metadata": config.metadata,
        "max_steps": config.max_steps,
        "step": max(steps),
        "attempt": len(attempts),
    }
    return Execution(run_id, TRAINING_RUN, "completed" if done else FORGOTTEN, began, None, memo)
