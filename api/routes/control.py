"""What can be asked of a run. The run decides; a 202 says that it was told.

Every verb but eval is idempotent: asking twice is asking once. With an `Idempotency-Key` all are,
and the second time is answered like the first.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.http.bodies import read_optional_json
from ratchet.api.http.idempotency import DOCUMENTED, Once
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import (
    MAX_BODY,
    answer_once,
    claimed,
    conflict,
    invalid,
    newest,
    optional_body,
    tell,
    with_status,
)
from ratchet.api.routes.fork import resume_ended
from ratchet.api.schemas.bodies import ConfigPatch, EvalBody, PauseBody, ReasonBody, StopBody
from ratchet.api.schemas.problems import ApiProblem, FieldError, field_errors, shown
from ratchet.api.schemas.run import Run
from ratchet.api.services.core import RunId, Served
from ratchet.api.services.run_view import OPEN, status_of
from ratchet.api.temporal.client import Unanswered
from ratchet.configs.live import changed
from ratchet.configs.load import ConfigError

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post(
    "/{run_id}/stop",
    status_code=202,
    response_model=Run,
    openapi_extra={**optional_body(StopBody, {"reason": "reward has converged"}), **DOCUMENTED},
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def stop_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Ends a run gracefully, with a final checkpoint; it can be resumed from there."""

    async def stop(body: StopBody, once: Once | None) -> Run:
        reason = body.reason or "asked over the API"
        execution = await tell(services, run_id, "stop", "stop", {"reason": reason}, once)
        return with_status(await services.show(execution), "stopping")

    return await answer_once(services, request, run_id, StopBody, stop)


@router.post(
    "/{run_id}/cancel",
    status_code=202,
    response_model=Run,
    openapi_extra={**optional_body(ReasonBody, {"reason": "wrong data"}), **DOCUMENTED},
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def cancel_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Ends a run now, without another checkpoint; it can be resumed from the last one. One that
    was cancelled already is answered as it is.
    """

    async def cancel(_: ReasonBody, once: Once | None) -> Run:
        execution = await newest(services, run_id)
        status = status_of(execution)
        if status in ENDED and status != "cancelled":
            raise conflict("cancel", execution)
        if once is not None:
            await claimed(services, once, run_id)
        if status == "cancelled":
            return await services.show(execution)
        if not await services.temporal.cancel(run_id):
            raise conflict("cancel", await newest(services, run_id))
        services.touched(run_id)
        return with_status(await services.show(execution), "stopping")

    return await answer_once(services, request, run_id, ReasonBody, cancel)


@router.post(
    "/{run_id}/checkpoint",
    status_code=202,
    response_model=Run,
    openapi_extra={
        **optional_body(ReasonBody, {"reason": "before the GPUs are taken"}),
        **DOCUMENTED,
    },
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def checkpoint_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Asks for a checkpoint at the next step boundary; `checkpoint` of the run, and its events,
    tell when it is committed.
    """

    async def save(_: ReasonBody, once: Once | None) -> Run:
        execution = await newest(services, run_id)
        if status_of(execution) in (*ENDED, "stopping"):
            raise conflict("checkpoint", execution)
        reported = await tell(services, run_id, "checkpoint", "checkpoint", None, once)
        return await services.show(reported)

    return await answer_once(services, request, run_id, ReasonBody, save)


@router.patch(
    "/{run_id}",
    openapi_extra=optional_body(ConfigPatch, {"dispatch": {"max_inflight_rollouts": 128}}),
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def change_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Changes what may change of a running run's config, and its metadata. Limits and metadata hold
    when this answers; everything else holds from the next step on, as another revision.
    """
    patch = await read_optional_json(request, MAX_BODY)
    execution = await newest(services, run_id)
    if status_of(execution) in (*ENDED, "stopping"):
        raise conflict("change", execution)
    config = await asyncio.to_thread(services.records.config, run_id)
    before = execution.memo.get("config_changes") or {}
    try:
        together, after = changed(config.model_dump(mode="json") if config else {}, before, patch)
    except ConfigError as error:
        raise invalid(field_errors(error.problems)) from None
    try:
        reported = await services.temporal.change(run_id, patch)
    except ValueError as error:
        # Something else was changed, or the run began to stop, since it was looked at.
        detail = f"Run {execution.id} refuses the change: {error}"
        raise ApiProblem(409, "run-conflict", "The run refuses", detail) from None
    except Unanswered as error:
        detail = f"Run {execution.id} waits for {error}; start one and try again."
        raise ApiProblem(503, "no-worker", "No worker answers", detail, retry_after_s=5) from None
    if not reported:
        raise conflict("change", await newest(services, run_id))
    services.touched(run_id)
    shown_run = await services.show(execution)
    told_of = {"config_changes": together}
    if "metadata" in patch:
        told_of["metadata"] = after.metadata
    return shown_run.model_copy(update=told_of)


@router.post(
    "/{run_id}/pause",
    status_code=202,
    response_model=Run,
    openapi_extra={
        **optional_body(PauseBody, {"mode": "drain", "reason": "the GPUs are needed"}),
        **DOCUMENTED,
    },
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def pause_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Puts a run to rest: nothing in flight, a checkpoint, no server kept; all else stays."""

    async def pause(body: PauseBody, once: Once | None) -> Run:
        execution = await newest(services, run_id)
        if status_of(execution) == "stopping":
            raise conflict("pause", execution)
        wish = {"mode": body.mode, "reason": body.reason or "asked over the API"}
        shown_run = await services.show(await tell(services, run_id, "pause", "pause", wish, once))
        if shown_run.status == "paused":
            return shown_run
        return with_status(shown_run, "pausing")

    return await answer_once(services, request, run_id, PauseBody, pause)


@router.post(
    "/{run_id}/resume",
    status_code=202,
    response_model=Run,
    openapi_extra={**optional_body(ReasonBody, {"reason": "the GPUs are back"}), **DOCUMENTED},
    responses=documented(400, 404, 409, 413, 415, 422, 503, 507),
)
async def resume_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Wakes a paused run, on servers of its own; a run that goes on is answered as it is.

    A run that failed, was cancelled, or was stopped before its last step goes on from its newest
    sound checkpoint, under the same id and with the same curves, as its next attempt.
    """

    async def resume(_: ReasonBody, once: Once | None) -> Run:
        execution = await newest(services, run_id)
        if status_of(execution) in ENDED or execution.state not in OPEN:
            return await resume_ended(services, execution, once)
        paused = ("pausing", "paused")
        before = status_of(execution)
        reported = await tell(services, run_id, "resume", "resume", None, once)
        shown_run = await services.show(reported)
        # A pause asked for just before may show only now.
        wakes = before in paused or shown_run.status in paused
        return with_status(shown_run, "starting") if wakes else shown_run

    return await answer_once(services, request, run_id, ReasonBody, resume)


@router.post(
    "/{run_id}/eval",
    status_code=202,
    response_model=Run,
    openapi_extra={**optional_body(EvalBody, {"envs": ["reverse-text"]}), **DOCUMENTED},
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def eval_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Asks for an eval at the run's next version, of all its eval envs or of those named."""

    async def evaluate(body: EvalBody, once: Once | None) -> Run:
        execution = await newest(services, run_id)
        if status_of(execution) in (*ENDED, "stopping"):
            raise conflict("evaluate", execution)
        config = await asyncio.to_thread(services.records.config, run_id)
        known = [env.name for env in config.eval.env] if config else []
        if not known:
            raise invalid([FieldError(pointer="", key="envs", message="the run has no eval env")])
        errors = [
            FieldError(
                pointer=f"/envs/{i}",
                key=f"envs.{i}",
                value=shown(name),
                message=f"not an eval env of this run; its eval envs: {', '.join(known)}",
            )
            for i, name in enumerate(body.envs)
            if name not in known
        ]
        if errors:
            raise invalid(errors)
        envs = {"envs": body.envs or known}
        reported = await tell(services, run_id, "evaluate", "trigger_eval", envs, once)
        return await services.show(reported)

    return await answer_once(services, request, run_id, EvalBody, evaluate)
