"""What a run stores: its checkpoints, its config with all revisions, its batches."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from ratchet.api.http.problems import documented
from ratchet.api.routes.metrics import StepCursor, require_recorded
from ratchet.api.schemas.artifacts import Batch, Checkpoint, RunConfigView
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.core import RunId, Served
from ratchet.api.store import artifacts
from ratchet.configs.load import dump_toml

router = APIRouter(prefix="/v1/runs", tags=["artifacts"])

EXAMPLE_TOML = 'name = "reverse"\nmax_steps = 40\nseed = 0\n'


@router.get("/{run_id}/checkpoints", responses=documented(404, 422))
async def list_checkpoints(
    run_id: RunId,
    services: Served,
    verify: Annotated[
        bool, Query(description="Read every byte and compare hashes, which may take long.")
    ] = False,
) -> ListOf[Checkpoint]:
    """Committed checkpoints, by step: those the run can be resumed or forked from."""
    await require_recorded(services, run_id)
    data = await asyncio.to_thread(artifacts.checkpoints, services.records, run_id, verify=verify)
    return ListOf[Checkpoint](data=data, has_more=False)


@router.get("/{run_id}/batches", responses=documented(404, 422))
async def list_batches(
    run_id: RunId,
    services: Served,
    after: StepCursor = None,
    after_step: Annotated[
        int, Query(ge=-1, le=2**53, description="Only steps above this one.")
    ] = -1,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most batches in a page.")] = 100,
) -> ListOf[Batch]:
    """Batches that are kept, by step, and the paths of their files."""
    await require_recorded(services, run_id)
    passed = after_step if after is None else max(after_step, after)
    data, rest = await asyncio.to_thread(artifacts.batches, services.records, run_id, passed, limit)
    following = None if rest is None else str(rest)
    return ListOf[Batch](data=data, has_more=rest is not None, next_after=following)


@router.get(
    "/{run_id}/config",
    response_model=RunConfigView,
    responses={
        200: {
            "description": "The config.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE_TOML}},
        },
        **documented(404, 422, 503),
    },
)
async def get_config(
    run_id: RunId,
    services: Served,
    revision: Annotated[
        int | None, Query(ge=0, le=2**53, description="One revision; null: the current one.")
    ] = None,
    form: Annotated[
        Literal["json", "toml"], Query(alias="format", description="'toml': as text, for reuse.")
    ] = "json",
) -> Any:
    """The resolved config: as it is now, with every change made while the run was running, or as
    one revision. Changes of limits and metadata take effect at once and make no revision.
    """
    execution = await services.execution(run_id)
    attempt = services.attempt_of(execution)
    records = services.records
    kept = await asyncio.to_thread(artifacts.revisions, records.store, attempt)
    changes = execution.memo.get("config_changes") or {}
    if revision is None:
        config = await asyncio.to_thread(services.current_config, execution)
        reported = execution.memo.get("config_revision")
        number = (
            int(reported) if reported is not None else max((k.revision for k in kept), default=0)
        )
    else:
        number = revision
        if revision not in {item.revision for item in kept}:
            there = ", ".join(str(item.revision) for item in kept)
            raise ApiProblem(
                404,
                "unknown-revision",
                "No such revision",
                f"Run {run_id} has no config revision {revision}; its revisions: {there}.",
            )
        config = await asyncio.to_thread(records.config_of, attempt, revision)
    if form == "toml":
        return PlainTextResponse(dump_toml(config))
    view = RunConfigView(
        run_id=run_id,
        attempt=attempt,
        revision=number,
        revisions=kept,
        changes=changes,
        config=config.model_dump(mode="json"),
    )
    return Response(view.model_dump_json(), media_type="application/json")
