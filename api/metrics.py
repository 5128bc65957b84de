"""What a run measured: metrics, evals, gauges. It comes from the store, so that it outlives
Temporal's retention.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from api.models import EvalRecord, GaugeSample, ListOf, StepMetrics
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


@router.get("/{run_id}/gauges", responses=documented(404, 422))
async def list_gauges(
    run_id: RunId,
    services: Served,
    after: Annotated[
        float,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Cursor: only samples later than this Unix time in seconds.",
        ),
    ] = 0.0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most samples in the answer.")] = 1000,
) -> ListOf[GaugeSample]:
    """Gauges of all rollout workers over time, ascending: a sample each ten seconds of work.

    A worker's sample can be read a moment after it was taken, so that what reads along should ask
    again from some seconds before the last one it got. Samples of the same time share a page.
    """
    await _require_recorded(services, run_id)
    data, more = await asyncio.to_thread(services.records.gauges, run_id, after, limit)
    return ListOf[GaugeSample](
        data=[GaugeSample.model_validate(sample) for sample in data], has_more=more
    )
