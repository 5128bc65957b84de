"""Controls of a run: a route for each verb of `CONTROLS`, and changes of its config. The run
decides; a 202 says that it received the request.

Every verb but eval is idempotent: a repeated request has no further effect. With an
`Idempotency-Key` this holds for eval and changes, too, and a repeated request gets the first reply.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from ratchet.activities.contracts.controls import CONTROLS, EvalBody, Verb
from ratchet.activities.contracts.redact import redacted
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.http.audit import Caller
from ratchet.api.http.idempotency import DOCUMENTED, Once
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import (
    answer_once,
    claimed,
    conflict,
    invalid,
    newest,
    optional_body,
    read_as,
)
from ratchet.api.routes.fork import resume_ended
from ratchet.api.schemas.bodies import MERGE_PATCH, ConfigPatch
from ratchet.api.schemas.problems import ApiProblem, FieldError, field_errors, shown
from ratchet.api.schemas.run import Run
from ratchet.api.services.core import RunId, Served, Services
from ratchet.api.services.launch import carried
from ratchet.api.services.run_view import OPEN, status_of
from ratchet.api.temporal.client import Execution, Unanswered
from ratchet.configs.live import changed
from ratchet.configs.load import ConfigError

router = APIRouter(prefix="/v1/runs", tags=["control"])

REFUSALS = (400, 404, 409, 413, 415, 422, 503)
MOST_REASON = 200


async def _named_envs(services: Services, run_id: str, body: EvalBody) -> EvalBody:
    """The requested eval envs, all by name; raises 422 for an unknown one."""
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
    return body.model_copy(update={"envs": body.envs or known})


async def _send(
    services: Services,
    run_id: str,
    verb: Verb,
    body: BaseModel,
    once: Once | None,
    caller: Caller,
) -> Execution:
    """Signals the run, once for `once`; returns it as it was before. Raises 409 if it has ended,
    also if it ends at this moment.
    """
    execution = await newest(services, run_id)
    if verb.signal and status_of(execution) in ENDED:
        raise conflict(verb.label.lower(), execution)
    if once is not None:
        await claimed(services, once, run_id)
    if status_of(execution) == "cancelled":
        return execution
    if verb.signal:
        said = {name: value for name, value in body.model_dump().items() if value != ""}
        if "reason" in verb.fields:
            said.setdefault("reason", "requested over the API")
        arg = said or None
        key = once.key if once else ""
        received = await services.temporal.signal(run_id, verb.signal, arg, caller, key)
    else:
        reason = str(getattr(body, "reason", ""))
        received = await services.temporal.cancel(run_id, reason, caller)
    if not received:
        raise conflict(verb.label.lower(), await newest(services, run_id))
    services.touched(run_id)
    return execution


async def _ask(
    services: Services,
    run_id: str,
    verb: Verb,
    body: BaseModel,
    once: Once | None,
    caller: Caller,
) -> Run:
    """Sends the run a verb, and shows the run as it is about to be."""
    execution = await newest(services, run_id)
    before = status_of(execution)
    if verb.name == "resume" and (before in ENDED or execution.state not in OPEN):
        reason = body.model_dump().get("reason", "")
        return await resume_ended(services, execution, caller, once, reason)
    if before in verb.refused:
        raise conflict(verb.label.lower(), execution)
    if verb.of_training and execution.memo.get("max_steps") == 0:
        why = "it is an evaluation, which trains nothing that a checkpoint could hold"
        raise conflict(verb.label.lower(), execution, why)
    if isinstance(body, EvalBody):
        body = await _named_envs(services, run_id, body)
    run = await services.show(await _send(services, run_id, verb, body, once, caller))
    if verb.becomes and run.status in verb.moves:
        return run.model_copy(update={"status": verb.becomes})
    return run


def _without_secrets(body: BaseModel) -> BaseModel:
    """A body as histories may keep it: its reason is what a person typed."""
    reason = redacted(getattr(body, "reason", ""), MOST_REASON)
    return body.model_copy(update={"reason": reason})


def _route(verb: Verb) -> Callable[..., Awaitable[Any]]:
    async def route(run_id: RunId, request: Request, services: Served) -> Any:
        async def act(data: dict[str, Any], once: Once | None) -> Run:
            body = _without_secrets(read_as(verb.body, data))
            return await _ask(services, run_id, verb, body, once, Caller.of(request))

        return await answer_once(services, request, run_id, act)

    return route


for _verb in CONTROLS.values():
    router.add_api_route(
        f"/{{run_id}}/{_verb.name}",
        _route(_verb),
        methods=["POST"],
        name=f"{_verb.name}_run",
        description=_verb.about or _verb.text,
        status_code=202,
        response_model=Run,
        openapi_extra={**optional_body(_verb.body, dict(_verb.example)), **DOCUMENTED},
        # A run that has ended is started again, which needs space.
        responses=documented(*REFUSALS, *([507] if _verb.name == "resume" else [])),
    )


@router.patch(
    "/{run_id}",
    response_model=Run,
    openapi_extra={
        **optional_body(ConfigPatch, {"dispatch": {"max_inflight_rollouts": 128}}, MERGE_PATCH),
        **DOCUMENTED,
    },
    responses=documented(*REFUSALS),
)
async def change_run(run_id: RunId, request: Request, services: Served) -> Any:
    """Changes the config of a running run, as far as it may change, and its metadata. Limits and
    metadata have changed when the reply arrives; everything else is `pending` and takes effect at
    the next step, as a new revision.

    The body is a merge patch (RFC 7396): sections are merged, and null removes a pair from the
    metadata. A config key set to null becomes none, where none is one of its values.
    """

    async def act(patch: dict[str, Any], once: Once | None) -> Run:
        return await _change(services, run_id, patch, once, Caller.of(request))

    return await answer_once(services, request, run_id, act, 200)


async def _change(
    services: Services, run_id: str, patch: dict[str, Any], once: Once | None, caller: Caller
) -> Run:
    """Changes the run, once for `once`, and shows it as it is afterwards."""
    execution = await newest(services, run_id)
    if status_of(execution) in (*ENDED, "stopping"):
        raise conflict("change", execution)
    config = await asyncio.to_thread(services.records.config, run_id)
    before = execution.memo.get("config_changes") or {}
    try:
        await services.aside(
            lambda: carried(
                changed(config.model_dump(mode="json") if config else {}, before, patch)[1]
            )
        )
    except ConfigError as error:
        raise invalid(field_errors(error.problems)) from None
    if once is not None:
        with suppress(OSError):
            caller = await asyncio.to_thread(once.claim_as, services.records.store, run_id, caller)
    try:
        reported = await services.temporal.change(run_id, patch, caller)
    except ValueError as error:
        # Something else was changed, or the run began to stop, since the check above.
        detail = f"Run {execution.id} refuses the change: {error}"
        raise ApiProblem(409, "run-conflict", "The run refuses the change", detail) from None
    except Unanswered as error:
        detail = f"Run {execution.id} waits for {error}; start one and try again."
        raise ApiProblem(503, "no-worker", "No worker answers", detail, retry_after_s=5) from None
    if not reported:
        raise conflict("change", await newest(services, run_id))
    return await services.show(await newest(services, run_id))
