"""Launches a run: validate the config, check it on workers, record it, start the workflow.

Nothing is started, and nothing stays in the store, before the config has passed every check that
can be made.
"""

import asyncio
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.hosting import planned_hosts
from ratchet.activities.contracts.names import attempt_id, workflow_of
from ratchet.activities.contracts.redact import redacted
from ratchet.activities.contracts.training import RestoreInput
from ratchet.activities.storage import keys
from ratchet.api.http.allowlist import own_flags, refused
from ratchet.api.http.audit import Caller
from ratchet.api.http.bodies import decode, require_portable
from ratchet.api.http.idempotency import Once
from ratchet.api.schemas.problems import ApiProblem, FieldError, field_errors, invalid_config, shown
from ratchet.api.schemas.run import Plan, PlannedEval, ResolvedConfig
from ratchet.api.services.core import Services, unknown_run
from ratchet.api.store.run_index import row_of
from ratchet.api.temporal.client import Unanswered, a_worker_on
from ratchet.configs.engine_flags import flag_of, is_flag
from ratchet.configs.env import ALL
from ratchet.configs.load import ConfigError, Problem, validate
from ratchet.configs.model import version_named
from ratchet.configs.pointers import value_at
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document
from ratchet.workflows.protocol.messages import PreflightInput, RunInput

UNREAD_BY = {
    "--quantization": "quantized layers: --quantization makes engines hold different numbers",
}
"""Flags of engines that keep the gate from comparing some or all weights by bits."""

MOST_ENVS = 256
MOST_BYTES = 256 * 1024
"""A config is part of the inputs of workflows and activities; Temporal warns at 512 KiB of any, and
a run's input holds more than its config.
"""

NAMED = "environments, model and what algorithms name"
"""What only workers can check."""

Place = Callable[[str], str]
"""Maps a pointer into a config to one into the request's body."""


def read_config(data: bytes, media: str) -> RunConfig:
    """The run config in a request body; raises 400 or 422."""
    return valid_config(require_portable(decode(data, media)))


def valid_config(plain: Any, place: Place = str) -> RunConfig:
    """The config in plain data; raises 422 with pointers as `place` maps them."""
    try:
        _require_few_envs(plain)
        return validate(plain)
    except ConfigError as error:
        raise invalid_config(_placed(field_errors(error.problems), place)) from None


def _placed(errors: list[FieldError], place: Place) -> list[FieldError]:
    return [error.model_copy(update={"pointer": place(error.pointer)}) for error in errors]


def _require_few_envs(plain: Any) -> None:
    """Raises ConfigError; each env costs a server, and time in every loop over envs."""
    for kind in ("train", "eval"):
        envs = value_at(plain, f"/{kind}/env")
        if isinstance(envs, list) and len(envs) > MOST_ENVS:
            message = f"a run has at most {MOST_ENVS} environments, got {len(envs)}"
            raise ConfigError([Problem(f"/{kind}/env", f"{kind}.env", None, message)])


def carried(config: RunConfig) -> dict[str, Any]:
    """The config as it is stored and sent; raises 413 if it is larger than Temporal carries."""
    document = config_document(config)
    size = len(json.dumps(document, separators=(",", ":")).encode())
    if size > MOST_BYTES:
        raise ApiProblem(
            413,
            "config-too-large",
            "The run config is too large",
            f"With all defaults filled in it has {size} bytes, and the limit is {MOST_BYTES}; use "
            "fewer environments, or move large data to files that the config names.",
        )
    return document


def admitted(services: Services, config: RunConfig, place: Place = str) -> dict[str, Any]:
    """The config as it is stored and sent. Raises 413 if it is larger than Temporal carries, 422 if
    it names something that this API does not allow.
    """
    document = carried(config)
    _require_allowed(services, config, place)
    return document


def _require_allowed(services: Services, config: RunConfig, place: Place = str) -> None:
    allowed = services.settings
    errors = own_flags(config) + refused(
        config,
        allowed.custom_code,
        allowed.endpoint_hosts,
        allowed.key_vars,
        allowed.models,
        allowed.engine_flags,
    )
    if errors:
        raise invalid_config(_placed(errors, place))


def resolved(config: RunConfig) -> dict[str, Any]:
    """The config with all defaults filled in, as plain JSON data."""
    return config.model_dump(mode="json")


def unverified(config: RunConfig) -> str | None:
    """Which of the engines' weights the gate could not compare by bits; None if none are known."""
    inference = config.inference
    flags = map(flag_of, filter(is_flag, inference.extra_args))
    found = [UNREAD_BY[flag] for flag in flags if flag in UNREAD_BY]
    precision = config.trainer.matmul_precision
    if inference.dtype == "float32" and precision != "highest":
        found.append(f"float32 layers on CPUs: trainer.matmul_precision is {precision!r}")
    return "; ".join(found) or None


def transfer_of(config: RunConfig) -> str:
    """How new weights get to engines, with the reason for what 'auto' does not choose."""
    merged_only = config.trainer.merged_only
    if config.inference.transfer != "auto" or merged_only is None:
        return config.transfer
    return f"{config.transfer}: {merged_only}"


def _evals_of(config: RunConfig, interval: int) -> int | None:
    """How often an env is evaluated every `interval` steps; None if the run has no last step."""
    if config.max_steps is None:
        return None
    if not config.trains:
        return 1
    steps = config.max_steps / interval
    due = math.ceil(steps) if config.eval.at_end else math.floor(steps)
    return due + (not config.eval.skip_first_step)


def plan_of(config: RunConfig, cores: int = 0) -> Plan:
    """The plan of a valid config, where envs have so many `cores` (0: not known)."""
    batch = config.train.batch_size if config.trains else 0
    groups: dict[str, float] | None = None if config.trains else {}
    if batch:
        total = sum(env.ratio for env in config.train.env)
        mean = sum(env.ratio / total * config.train.size_of(env) for env in config.train.env)
        groups = {env.name: round(batch / mean * env.ratio / total, 2) for env in config.train.env}
    evals = []
    for env in config.eval.env:
        interval, examples = config.eval_interval(env.name), config.eval_num_examples(env.name)
        evals.append(
            PlannedEval(
                env=env.name,
                interval=interval,
                count=_evals_of(config, interval),
                rollouts=None if examples == ALL else examples * config.eval_group_size(env.name),
            )
        )
    servers: dict[str, list[str]] = {}
    for host in planned_hosts(config, cores):
        if host.managed:
            servers.setdefault(host.role, []).append(host.name)
    return Plan(
        steps=config.max_steps,
        rollouts_per_step=batch,
        groups_per_step=groups,
        train_rollouts=None
        if batch is None or config.max_steps is None
        else batch * config.max_steps,
        permits=config.permits,
        algorithms={env.name: config.algorithm(env.name).type for env in config.train.env},
        evals=evals,
        checkpoints=None
        if config.max_steps is None
        else math.ceil(config.max_steps / config.checkpoint.interval),
        servers=servers,
        transfer=transfer_of(config),
        unverified=unverified(config),
    )


def _refuse(verdict: CheckResult, config: dict[str, Any], place: Place) -> None:
    if verdict.problems:
        raise invalid_config(
            [
                FieldError(
                    pointer=place(p.pointer),
                    key=p.key,
                    value=shown(value_at(config, p.pointer)),
                    message=redacted(p.message),
                )
                for p in verdict.problems
            ]
        )


def now() -> str:
    """This moment, as runs record it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def first_memo(config: RunConfig, created_at: str, missing: str) -> dict[str, Any]:
    """A run's memo before its workflow has run for the first time."""
    return {
        "status": "queued",
        "name": config.name,
        "created_at": created_at,
        "metadata": config.metadata,
        "max_steps": config.max_steps,
        "envs": config.envs,
        "model": config.model.name,
        "step": 0,
        "attempt": 1,
        "lineage": None,
        "waiting_for": {"name": missing, "since": created_at},
    }


@dataclass(frozen=True)
class Start:
    """A run to start. `source` names the checkpoint that it starts from, of any run; `place` is
    where its config is in the request's body.
    """

    config: RunConfig
    place: Place = str
    source: RestoreInput | None = None
    lineage: dict[str, Any] | None = None


async def _verdict(
    services: Services, start: Start, document: dict[str, Any], run_id: str
) -> CheckResult:
    """What workers report about a config; raises 422 for mistakes, Unanswered without an answer."""
    settings = services.settings
    input = PreflightInput(document, settings.queues, start.source is not None)
    verdict = await services.temporal.preflight(run_id, input, settings.preflight_timeout_s)
    _refuse(verdict, document, start.place)
    return verdict


async def _require_before(services: Services, start: Start) -> None:
    """Raises 422 if the run that this one is to begin after is not known."""
    before = start.config.after
    if before is None:
        return
    try:
        await services.execution(before)
    except ApiProblem as error:
        if error.document.status != 404:
            raise
        text = f"there is no run {before!r} to begin after; GET /v1/runs lists all"
        pointer = start.place("/after")
        raise invalid_config(
            [FieldError(pointer=pointer, key="after", value=before, message=text)]
        ) from None


async def planned(services: Services, start: Start, *, preflight: bool) -> ResolvedConfig:
    """The plan of a run; starts nothing. With `preflight` workers check what only they can see.

    Raises 413, 422, or 507 where a start would run out of space. `unchecked` says what was not
    checked.
    """
    await asyncio.to_thread(services.records.require_space, services.settings.min_free_bytes)
    document = await services.aside(lambda: admitted(services, start.config, start.place))
    await _require_before(services, start)
    unchecked: str | None = "the preflight was left out"
    verdict = CheckResult()
    if preflight:
        try:
            name = f"dry-run-{secrets.token_hex(6)}"
            verdict = await _verdict(services, start, document, name)
            unchecked = None
        except Unanswered as error:
            unchecked = f"the check waits for {error}"
        except ApiProblem as error:
            if error.document.status != 503:
                raise
            unchecked = error.document.detail
    if unchecked is not None:
        unchecked = f"{NAMED}: {unchecked}"
    return await services.aside(
        lambda: ResolvedConfig(
            config=resolved(start.config),
            plan=plan_of(start.config, verdict.cores),
            examples=verdict.examples,
            estimates=verdict.estimates,
            unchecked=unchecked,
        )
    )


async def _require_kept(services: Services, runs: set[str]) -> None:
    """Raises 404 if one of `runs`, which another run starts from, is being deleted."""
    for run in sorted(runs):
        if await asyncio.to_thread(services.run_list.index.hidden, run):
            raise unknown_run(run)


async def _require_still_kept(
    services: Services, run_id: str, runs: set[str], caller: Caller
) -> None:
    """The same for the run `run_id`, which has started and is otherwise cancelled."""
    try:
        await _require_kept(services, runs)
    except ApiProblem:
        await services.temporal.cancel(run_id, "the run that it starts from was deleted", caller)
        raise


async def launch(services: Services, start: Start, caller: Caller, once: Once | None = None) -> str:
    """Starts a run and returns its id; raises ApiProblem if it cannot start. With `once`, a run
    that the same request has started is returned unchanged.
    """
    settings, records = services.settings, services.records
    config, source = start.config, start.source
    await asyncio.to_thread(records.require_space, settings.min_free_bytes)
    document = await services.aside(lambda: admitted(services, config, start.place))
    await _require_before(services, start)
    run_id = f"{config.name}-{secrets.token_hex(3)}"
    missing = a_worker_on([settings.queues.orchestrator])
    verdict: CheckResult | None = None
    unchecked: str | None = None
    try:
        verdict = await _verdict(services, start, document, run_id)
    except Unanswered as error:
        missing = str(error)
        unchecked = f"{NAMED} (the check waits for {missing}); the run checks them before it starts"
    if once is not None:
        run_id = await asyncio.to_thread(once.claim, records.store, run_id)
    created_at = now()
    lineage = start.lineage or config.model.lineage
    memo = {
        **first_memo(config, created_at, missing),
        "lineage": lineage,
        "asked": caller.record,
        **({"step": source.step} if source is not None and source.step else {}),
        "unchecked": unchecked,
    }
    restore = RestoreInput(run_id, source.source, source.step) if source is not None else None
    begins_with = {workflow_of(source.source)} if source is not None else set()
    if version := version_named(config.model.name):
        begins_with.add(workflow_of(version[0]))
    await _require_kept(services, begins_with)
    await asyncio.to_thread(records.save_config, run_id, config)
    row = row_of(run_id, datetime.fromisoformat(created_at))
    await asyncio.to_thread(services.run_list.index.add, [row])
    started = await services.temporal.start_run(
        RunInput(
            run_id=run_id,
            config=document,
            queues=settings.queues,
            examples=verdict.examples if verdict else {},
            cores=verdict.cores if verdict else 0,
            created_at=created_at,
            restore=restore,
        ),
        memo,
    )
    services.touched(run_id)
    await _require_still_kept(services, run_id, begins_with, caller)
    if not started and once is None:
        raise ApiProblem(
            503,
            "id-taken",
            "The run id is taken",
            "Two runs drew the same id; try again.",
            retry_after_s=1,
        )
    return run_id


async def start_attempt(
    services: Services,
    run: Any,
    config: RunConfig,
    source: RestoreInput,
    caller: Caller,
    once: Once | None = None,
    reason: str = "",
) -> bool:
    """Starts the next attempt of an ended run from a checkpoint; False if it has already started.

    `run` is the execution that has ended. Raises ApiProblem.
    """
    settings, memo = services.settings, run.memo
    await asyncio.to_thread(services.records.require_space, settings.min_free_bytes)
    document = await services.aside(lambda: admitted(services, config))
    if once is not None:
        await asyncio.to_thread(once.claim, services.records.store, run.id)
    number = int(memo.get("attempt") or 1) + 1
    if not run.run:
        # Temporal may have forgotten attempts later than the known one.
        number = await asyncio.to_thread(_next_attempt, services, run.id, number)
    attempt = attempt_id(run.id, number)
    await _require_kept(services, {run.id})
    await asyncio.to_thread(services.records.save_config, attempt, config)
    created_at = memo.get("created_at") or now()
    waits = {"name": a_worker_on([settings.queues.orchestrator]), "since": now()}
    first = {
        **first_memo(config, created_at, ""),
        "config_changes": memo.get("config_changes") or {},
        "step": memo.get("step") or 0,
        "checkpoint": memo.get("checkpoint"),
        "eval": memo.get("eval") or {},
        "reward": memo.get("reward"),
        "attempt": number,
        "lineage": memo.get("lineage"),
        "waiting_for": waits,
        "asked": caller.record,
        **({"resumed_because": reason} if reason else {}),
    }
    started = await services.temporal.start_run(
        RunInput(
            run_id=attempt,
            config=document,
            queues=settings.queues,
            created_at=created_at,
            restore=RestoreInput(attempt, source.source, source.step),
        ),
        first,
        again=True,
    )
    await _require_still_kept(services, run.id, {run.id}, caller)
    if started:
        # The run continues, so it no longer counts as archived.
        row = services.run_list.row_of(run)
        await asyncio.to_thread(services.run_list.index.unarchive, row)
    services.touched(run.id)
    return started


def _next_attempt(services: Services, run_id: str, number: int) -> int:
    """The first attempt from `number` on without any data in the store. Blocks."""
    store = services.records.store
    while store.folders(keys.run_folder(attempt_id(run_id, number))):
        number += 1
    return number
