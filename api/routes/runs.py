"""The runs resource: create, list, get."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ratchet.activities.contracts.statuses import RunStatus
from ratchet.api.http.bodies import media_of, read_bytes
from ratchet.api.http.idempotency import DOCUMENTED
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import DryRun, Preflight, answer_start
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.health import RunHealth
from ratchet.api.schemas.run import ResolvedConfig, Run
from ratchet.api.services.core import RunId, Served, asked
from ratchet.api.services.health import health_of
from ratchet.api.services.launch import Start, read_config
from ratchet.api.services.run_list import cursor_of, row_at

router = APIRouter(prefix="/v1/runs", tags=["runs"])

EXAMPLE_TOML = """\
name = "reverse"
max_steps = 40

[train]
batch_size = 64
group_size = 8

[[train.env]]
id = "reverse-text"

[eval]
interval = 10

[[eval.env]]
id = "reverse-text"
"""
EXAMPLE_JSON: dict[str, Any] = {
    "name": "reverse",
    "max_steps": 40,
    "train": {"batch_size": 64, "group_size": 8, "env": [{"id": "reverse-text"}]},
    "eval": {"interval": 10, "env": [{"id": "reverse-text"}]},
}
BODY = {
    **DOCUMENTED,
    "requestBody": {
        "required": True,
        "description": "The run's config; see the config reference.",
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/RunConfig"},
                "example": EXAMPLE_JSON,
            },
            "application/toml": {"schema": {"type": "string"}, "example": EXAMPLE_TOML},
        },
    },
}
METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)
FILTERS = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "required": False,
            "style": "deepObject",
            "explode": True,
            "description": "Only runs whose metadata has these pairs: `metadata[owner]=ana`.",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    ]
}


@router.post(
    "",
    status_code=201,
    response_model=Run,
    openapi_extra=BODY,
    responses={
        200: {"model": ResolvedConfig, "description": "Dry run: the resolved config and a plan."},
        **documented(400, 409, 413, 415, 422, 503, 507),
    },
)
async def create_run(
    request: Request,
    services: Served,
    dry_run: DryRun = False,
    preflight: Preflight = True,
) -> Any:
    """Starts a training run.

    The config is validated as a whole and then checked on the workers (do the environments load,
    does the model folder hold a model). If there are mistakes, the reply is a 422 that lists all of
    them, and nothing is started. If no worker answers in time, the run is created all the same: it
    is `queued`, its `waiting_for` says what is missing, and the checks run once that is available.
    """
    media = media_of(request)
    data = await read_bytes(request, services.settings.max_body_bytes)

    async def prepare() -> Start:
        return Start(await services.aside(lambda: read_config(data, media)))

    return await answer_start(services, request, data, dry_run, preflight, prepare)


class RunPage(ListOf[Run]):
    """A page of runs. While `has_more` is true, pass `next_after` as `after`."""


@router.get("", response_model=RunPage, openapi_extra=FILTERS, responses=documented(404, 422, 503))
async def list_runs(
    request: Request,
    services: Served,
    limit: Annotated[int, Query(ge=1, le=100, description="Most runs in the answer.")] = 20,
    after: Annotated[
        str | None,
        Query(
            max_length=120,
            description="Cursor: `next_after` of the previous page, or the id of its last run.",
        ),
    ] = None,
    status: Annotated[RunStatus | None, Query(description="Only runs in this status.")] = None,
    archived: Annotated[
        bool, Query(description="Only archived runs, which are left out otherwise.")
    ] = False,
) -> Response:
    """Lists runs, the newest first. Live gauges are left out; request a single run to get them.

    However many runs there are, a request looks at no more than 250 of them: with a filter that few
    runs match, a page may have fewer than `limit`, or none, while `has_more` is true.
    """
    pairs = {
        matched[1]: value
        for name, value in request.query_params.multi_items()
        if (matched := METADATA.fullmatch(name))
    }

    async def listed() -> bytes:
        place = row_at(after) if after is not None else None
        if after is not None and place is None:
            place = services.run_list.row_of(await services.execution(after))
        runs, rest = await services.run_list.page(
            place,
            limit,
            status,
            (lambda run: pairs.items() <= run.metadata.items()) if pairs else None,
            archived=archived,
        )
        runs = [await services.disk.shown(run) for run in await services.noted(runs)]
        following = cursor_of(rest) if rest else None
        page = RunPage(data=runs, has_more=rest is not None, next_after=following)
        return page.model_dump_json().encode()

    return await services.reply(asked(request), listed)


@router.get("/{run_id}", response_model=Run, responses=documented(404, 503))
async def get_run(run_id: RunId, request: Request, services: Served) -> Response:
    """One run, with live progress while it runs."""

    async def shown() -> bytes:
        run = await services.show(await services.execution(run_id))
        return run.model_dump_json().encode()

    return await services.reply(run_id, shown)


@router.get("/{run_id}/health", responses=documented(404, 503))
async def get_health(run_id: RunId, services: Served) -> RunHealth:
    """The run's health at a glance: a verdict with its reasons, each with advice, and the figures
    of its last steps.
    """
    return await health_of(services, await services.execution(run_id))
