"""Launching a run: validate whole, check on the workers, record the config, start the workflow.

Nothing is started, and nothing stays in the store, before the config has passed every check that
could be made.
"""

import asyncio
import json
import secrets
from datetime import UTC, datetime
from typing import Any

from activities.contracts.checks import CheckResult
from api.bodies import decode, require_portable
from api.problems import FieldError, field_errors, invalid_config, shown
from api.services import Services
from api.temporal import Unanswered, a_worker_on
from configs.load import ConfigError, validate
from configs.run import RunConfig
from workflows.messages import PreflightInput, RunInput


def read_config(data: bytes, media: str) -> RunConfig:
    """The run config in a request body; raises 400 or 422."""
    plain = require_portable(decode(data, media))
    try:
        return validate(plain)
    except ConfigError as error:
        raise invalid_config(field_errors(error.problems)) from None


def resolved(config: RunConfig) -> dict[str, Any]:
    """The config with every default written out, as plain JSON data."""
    data = json.loads(json.dumps(config.model_dump(mode="json")))
    assert isinstance(data, dict)
    return data


def value_at(data: Any, pointer: str) -> Any:
    """The value a JSON pointer (RFC 6901) names, or None where there is none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(data, dict):
            data = data.get(key)
        elif isinstance(data, list) and key.isdecimal() and int(key) < len(data):
            data = data[int(key)]
        else:
            return None
    return data


def _refuse(verdict: CheckResult, config: dict[str, Any]) -> None:
    if verdict.problems:
        raise invalid_config(
            [
                FieldError(
                    pointer=p.pointer,
                    key=p.key,
                    value=shown(value_at(config, p.pointer)),
                    message=p.message,
                )
                for p in verdict.problems
            ]
        )


def first_memo(config: RunConfig, created_at: str, missing: str) -> dict[str, Any]:
    """What a run says about itself before its workflow has run once."""
    return {
        "status": "queued",
        "name": config.name,
        "created_at": created_at,
        "metadata": config.metadata,
        "max_steps": config.max_steps,
        "step": 0,
        "waiting_for": {"name": missing, "since": created_at},
    }


async def launch(services: Services, config: RunConfig) -> str:
    """Starts a run and returns its id; raises ApiProblem if it cannot start."""
    settings = services.settings
    await asyncio.to_thread(services.records.require_space, settings.min_free_bytes)
    data = resolved(config)
    run_id = f"{config.name}-{secrets.token_hex(3)}"
    missing = a_worker_on([settings.queues.orchestrator])
    verdict: CheckResult | None = None
    try:
        verdict = await services.temporal.preflight(
            run_id, PreflightInput(data, settings.queues), settings.preflight_timeout_s
        )
        _refuse(verdict, data)
    except Unanswered as error:
        missing = str(error)
    created_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    await asyncio.to_thread(services.records.save_config, run_id, data)
    await services.temporal.start_run(
        RunInput(
            run_id=run_id,
            config=data,
            queues=settings.queues,
            examples=verdict.examples if verdict else {},
            created_at=created_at,
        ),
        first_memo(config, created_at, missing),
    )
    return run_id
