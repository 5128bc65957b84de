"""What can be asked of a running run. The run decides; a 202 says that it was told."""

import asyncio
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError

from api.bodies import read_optional_json
from api.models import ENDED, ConfigPatch, EvalBody, PauseBody, Run, StopBody
from api.observe import status_of
from api.problems import ApiProblem, FieldError, documented, field_errors, shown
from api.services import RunId, Served, Services
from api.temporal import Execution, Unanswered
from configs.load import ConfigError
from workflows.changes import changed, merged

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Body = TypeVar("Body", bound=BaseModel)
MAX_BODY = 64 * 1024


def _optional_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": False, "content": content}}


def _invalid(errors: list[FieldError]) -> ApiProblem:
    detail = "; ".join(f"{e.key}: {e.message}" for e in errors)
    return ApiProblem(
        422, "invalid-request", "The request cannot be carried out", detail, errors=errors
    )


async def _body(request: Request, model: type[Body]) -> Body:
    data = await read_optional_json(request, MAX_BODY)
    if unknown := [key for key in data if key not in model.model_fields]:
        valid = ", ".join(model.model_fields)
        raise _invalid(
            [
                FieldError(
                    pointer="/" + key.replace("~", "~0").replace("/", "~1"),
                    key=shown(key),
                    value=shown(data[key]),
                    message=f"unknown key; valid keys: {valid}",
                )
                for key in unknown
            ]
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(
            [
                FieldError(
                    pointer="".join(f"/{part}" for part in e["loc"]),
                    key=".".join(str(part) for part in e["loc"]),
                    value=shown(e.get("input")),
                    message=e["msg"],
                )
                for e in error.errors(include_url=False)
            ]
        ) from None


def _conflict(verb: str, execution: Execution) -> ApiProblem:
    status = status_of(execution)
    return ApiProblem(
        409,
        "run-conflict",
        "The run is past that",
        f"Cannot {verb} run {execution.id}: it is {status}.",
        run_status=status,
    )


async def _tell(services: Services, run_id: str, verb: str, signal: str, arg: Any) -> Execution:
    """Signals the run; raises 409 if it has ended, also if it ends just now."""
    execution = await services.execution(run_id)
    if status_of(execution) in ENDED:
        raise _conflict(verb, execution)
    if not await services.temporal.signal(run_id, signal, arg):
        raise _conflict(verb, await services.execution(run_id))
    return execution


@router.post(
    "/{run_id}/stop",
    status_code=202,
    openapi_extra=_optional_body(StopBody, {"reason": "reward has converged"}),
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def stop_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Ends a run gracefully, with a final checkpoint. Stopping twice is stopping once."""
    body = await _body(request, StopBody)
    reason = body.reason or "asked over the API"
    execution = await _tell(services, run_id, "stop", "stop", {"reason": reason})
    shown_run = await services.show(execution)
    return shown_run.model_copy(update={"status": "stopping"})


@router.patch(
    "/{run_id}",
    openapi_extra=_optional_body(ConfigPatch, {"dispatch": {"max_inflight_rollouts": 128}}),
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def change_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Changes what may change of a running run's config. It holds when this answers."""
    patch = await read_optional_json(request, MAX_BODY)
    execution = await services.execution(run_id)
    if status_of(execution) in (*ENDED, "stopping"):
        raise _conflict("change", execution)
    config = await asyncio.to_thread(services.records.config, run_id)
    before = execution.memo.get("config_changes") or {}
    try:
        changed(config.model_dump(mode="json") if config else {}, before, patch)
    except ConfigError as error:
        raise _invalid(field_errors(error.problems)) from None
    try:
        told = await services.temporal.change(run_id, patch)
    except ValueError as error:
        # Something else was changed, or the run began to stop, since it was looked at.
        detail = f"Run {execution.id} refuses the change: {error}"
        raise ApiProblem(409, "run-conflict", "The run refuses", detail) from None
    except Unanswered as error:
        detail = f"Run {execution.id} waits for {error}; start one and try again."
        raise ApiProblem(503, "no-worker", "No worker answers", detail, retry_after_s=5) from None
    if not told:
        raise _conflict("change", await services.execution(run_id))
    shown_run = await services.show(execution)
    return shown_run.model_copy(update={"config_changes": merged(before, patch)})


@router.post(
    "/{run_id}/pause",
    status_code=202,
    openapi_extra=_optional_body(PauseBody, {"mode": "drain", "reason": "the GPUs are needed"}),
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def pause_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Puts a run to rest: nothing in flight, a checkpoint, no server kept; everything else stays.
    Pausing twice is pausing once.
    """
    body = await _body(request, PauseBody)
    execution = await services.execution(run_id)
    if status_of(execution) == "stopping":
        raise _conflict("pause", execution)
    wish = {"mode": body.mode, "reason": body.reason or "asked over the API"}
    shown_run = await services.show(await _tell(services, run_id, "pause", "pause", wish))
    if shown_run.status == "paused":
        return shown_run
    return shown_run.model_copy(update={"status": "pausing"})


@router.post("/{run_id}/resume", status_code=202, responses=documented(404, 409, 503))
async def resume_run(run_id: RunId, services: Served) -> Run:
    """Wakes a paused run, on servers of its own; a run that is not paused goes on as it was."""
    execution = await services.execution(run_id)
    paused = status_of(execution) in ("pausing", "paused")
    shown_run = await services.show(await _tell(services, run_id, "resume", "resume", None))
    return shown_run.model_copy(update={"status": "starting"}) if paused else shown_run


@router.post(
    "/{run_id}/eval",
    status_code=202,
    openapi_extra=_optional_body(EvalBody, {"envs": ["reverse-text"]}),
    responses=documented(400, 404, 409, 413, 415, 422, 503),
)
async def eval_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Asks for an eval at the run's next version, of all its eval envs or of those named."""
    body = await _body(request, EvalBody)
    execution = await services.execution(run_id)
    if status_of(execution) in (*ENDED, "stopping"):
        raise _conflict("evaluate", execution)
    config = await asyncio.to_thread(services.records.config, run_id)
    known = [env.name for env in config.eval.env] if config else []
    if not known:
        raise _invalid([FieldError(pointer="", key="envs", message="the run has no eval env")])
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
        raise _invalid(errors)
    envs = {"envs": body.envs or known}
    return await services.show(await _tell(services, run_id, "evaluate", "trigger_eval", envs))
