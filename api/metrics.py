"""Metrics and evals of a run. They come from the store, so they outlive Temporal's retention."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from api.models import EvalRecord, ListOf, StepMetrics
from api.problems import documented
from api.services import RUN_ID, RunId, Served, Services, unknown_run

router = APIRouter(prefix="/v1/runs", tags=["metrics"])


async def _require_recorded(services: Services, run_id: str) -> None:
    if RUN_ID.fullmatch(run_id) is not None:
        config = await asyncio.to_thread(services.records.config, run_id)
        if config is not None:
            return
    raise unknown_run(run_id)


@router.get("/{run_id}/metrics", responses=documented(404, 422))
async def list_metrics(
    run_id: RunId,
    services: Served,
    after_step: Annotated[int, Query(ge=-1, description="Only steps above this one.")] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most steps in the answer.")] = 1000,
) -> ListOf[StepMetrics]:
    """Metrics of every trainer step, ascending."""
    await _require_recorded(services, run_id)
    data, more = await asyncio.to_thread(services.records.steps, run_id, after_step, limit)
    return ListOf[StepMetrics](
        data=[StepMetrics.model_validate(record) for record in data], has_more=more
    )


@router.get("/{run_id}/evals", responses=documented(404))
async def list_evals(run_id: RunId, services: Served) -> ListOf[EvalRecord]:
    """All evals of a run, by step."""
    await _require_recorded(services, run_id)
    data = await asyncio.to_thread(services.records.evals, run_id)
    return ListOf[EvalRecord](
        data=[EvalRecord.model_validate(record) for record in data], has_more=False
    )
