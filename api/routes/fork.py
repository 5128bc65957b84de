"""Continuing from a checkpoint: resume a run that has ended, or fork another one from it."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from ratchet.activities.contracts.training import RestoreInput
from ratchet.activities.storage.policies import Held
from ratchet.api.http.audit import Caller
from ratchet.api.http.bodies import optional_json, read_bytes
from ratchet.api.http.idempotency import DOCUMENTED, Once
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import (
    MAX_BODY,
    DryRun,
    Preflight,
    answer_start,
    conflict,
    newest,
    optional_body,
    read_as,
)
from ratchet.api.schemas.bodies import ForkBody
from ratchet.api.schemas.problems import ApiProblem, FieldError, field_errors, invalid_config
from ratchet.api.schemas.run import ResolvedConfig, Run
from ratchet.api.services.core import RunId, Served, Services
from ratchet.api.services.launch import Start, resolved, start_attempt, valid_config
from ratchet.api.services.run_view import OPEN, status_of
from ratchet.api.store.artifacts import checkpoint, checkpoints_of
from ratchet.api.temporal.client import Execution
from ratchet.configs.live import merged
from ratchet.configs.load import ConfigError
from ratchet.configs.pointers import pointer_to
from ratchet.configs.run import RunConfig

router = APIRouter(prefix="/v1/runs", tags=["runs"])


def _steps(result: list[Held]) -> str:
    return ", ".join(str(item.step) for item in result) or "none"


async def resume_ended(
    services: Services, execution: Execution, caller: Caller, once: Once | None, reason: str
) -> Run:
    """Starts the next attempt of a run that has ended; raises 409 if there is nothing left to do,
    or nothing to continue from. `reason` is for its log.
    """
    status, memo = status_of(execution), execution.memo
    if execution.state in OPEN:
        raise ApiProblem(
            409,
            "run-conflict",
            "The run is about to end",
            f"Run {execution.id} is {status} and ends in a moment; try again then.",
            run_status=status,
            retry_after_s=1,
        )
    if memo.get("max_steps") == 0:
        further = "an evaluation has no checkpoint to resume from. Evaluate again with another run"
        raise conflict("resume", execution, further)
    last = memo.get("max_steps", 0)
    done = last is not None and (memo.get("step") or 0) >= last
    if status == "succeeded" and done:
        further = "all its steps are done. Fork it with a larger max_steps to go on"
        raise conflict("resume", execution, further)
    result = await asyncio.to_thread(checkpoints_of, services.records, execution.id)
    if not result:
        raise conflict("resume", execution, "it has no checkpoint to resume from. Create a new run")
    config = await asyncio.to_thread(services.current_config, execution)
    # The holder found here has the newest one; a damaged one is skipped during the restore.
    source = RestoreInput(execution.id, result[-1].attempt, None)
    await start_attempt(services, execution, config, source, caller, once, reason)
    return await services.show(await newest(services, execution.id))


async def _source(services: Services, execution: Execution, step: int | None) -> Held:
    """The checkpoint that a fork starts from; raises 409 that names the available ones."""
    result = await asyncio.to_thread(checkpoints_of, services.records, execution.id)
    problem: str | None = None
    for item in reversed(result):
        if step in (None, item.step):
            seen = await asyncio.to_thread(checkpoint, services.records.store, item, verify=False)
            if seen is not None and seen.sound:
                return item
            problem = str(seen.problem) if seen is not None else "it was deleted"
    if step is not None and problem is not None:
        kind, title, message = "damaged-checkpoint", "The checkpoint is damaged", problem
        detail = f"The checkpoint of step {step}: {problem}; available steps: {_steps(result)}."
    else:
        kind, title = "no-checkpoint", "There is no such checkpoint"
        wanted = "any sound checkpoint" if step is None else f"a checkpoint of step {step}"
        detail = message = f"run {execution.id} does not have {wanted}; its steps: {_steps(result)}"
    errors = [FieldError(pointer="/step", key="step", value=step, message=message)]
    raise ApiProblem(409, kind, title, detail, errors=errors, run_status=status_of(execution))


def _place(pointer: str) -> str:
    """Where in a fork's body a mistake of the merged config is."""
    if pointer in ("/name", "/metadata") or pointer.startswith("/metadata/"):
        return pointer
    return f"/config{pointer}"


def shown_lora(config: RunConfig) -> dict[str, Any] | None:
    """The adapter that a config trains."""
    lora = config.trainer.lora
    return None if lora is None else lora.model_dump(mode="json")


def pushed(config: RunConfig) -> str | None:
    """How versions of an adapter are exported; None where none is trained."""
    return None if config.trainer.lora is None else config.transfer


def forked_config(base: RunConfig, body: ForkBody, step: int) -> RunConfig:
    """The config of a fork; raises 422 for an invalid one, or one its checkpoint rules out."""
    try:
        # The source has begun, and its checkpoint is there: a fork has nothing to wait for.
        plain = merged({**resolved(base), "after": None}, body.config)
    except ConfigError as error:
        placed = [
            e.model_copy(update={"pointer": _place(e.pointer)})
            for e in field_errors(error.problems)
        ]
        raise invalid_config(placed) from None
    if body.name is not None:
        plain["name"] = body.name
    if body.metadata is not None:
        plain["metadata"] = body.metadata
    config = valid_config(plain, _place)
    errors: list[FieldError] = []
    for key, before, after in (
        ("model.name", base.model.name, config.model.name),
        ("model.revision", base.model.revision, config.model.revision),
        ("trainer.optim.type", base.trainer.optim.type, config.trainer.optim.type),
        ("trainer.lora", shown_lora(base), shown_lora(config)),
        ("inference.transfer", pushed(base), pushed(config)),
    ):
        if before != after:
            message = f"a fork keeps what its checkpoint holds, which is {before!r}"
            place = _place(pointer_to(key))
            errors.append(FieldError(pointer=place, key=key, value=after, message=message))
    if config.after is not None:
        message = "a fork begins at once, from its checkpoint; leave `after` out"
        pointer = _place("/after")
        errors.append(FieldError(pointer=pointer, key="after", value=config.after, message=message))
    if config.last_step <= step:
        message = f"must be above {step}, the step of the checkpoint"
        errors.append(
            FieldError(
                pointer="/config/max_steps",
                key="max_steps",
                value=config.max_steps,
                message=message,
            )
        )
    if errors:
        raise invalid_config(errors)
    return config


@router.post(
    "/{run_id}/fork",
    status_code=201,
    response_model=Run,
    openapi_extra={
        **optional_body(ForkBody, {"step": 10, "config": {"trainer": {"optim": {"lr": 3e-5}}}}),
        **DOCUMENTED,
    },
    responses={
        200: {"model": ResolvedConfig, "description": "Dry run: the resolved config."},
        **documented(400, 404, 409, 413, 415, 422, 503, 507),
    },
)
async def fork_run(
    run_id: RunId,
    request: Request,
    services: Served,
    dry_run: DryRun = False,
    preflight: Preflight = True,
) -> Any:
    """Starts a new run from a committed checkpoint of this one, in whatever status this one is.

    `config` holds what differs, as sections like a config's own; it is validated and checked on the
    workers like a new run's. The fork has its own id, and its curves begin with this run's curves
    up to the checkpoint.
    """
    data = await read_bytes(request, MAX_BODY)

    async def prepare() -> Start:
        body = read_as(ForkBody, optional_json(request, data))
        execution = await newest(services, run_id)
        base = await asyncio.to_thread(services.current_config, execution)
        source = await _source(services, execution, body.step)
        return Start(
            await services.aside(lambda: forked_config(base, body, source.step)),
            _place,
            RestoreInput("", source.attempt, source.step),
            {"source": execution.id, "step": source.step, "kind": "fork"},
        )

    return await answer_start(services, request, data, dry_run, preflight, prepare)
