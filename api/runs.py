"""The runs resource: create, list, get."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from api.bodies import media_of, read_bytes
from api.launch import launch, read_config, resolved
from api.models import ListOf, ResolvedConfig, Run
from api.observe import run_object
from api.problems import documented
from api.services import RunId, Served, unknown_run
from workflows.messages import RunStatus

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
    "requestBody": {
        "required": True,
        "description": "The run's config, as `configs/` defines it.",
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/RunConfig"},
                "example": EXAMPLE_JSON,
            },
            "application/toml": {"schema": {"type": "string"}, "example": EXAMPLE_TOML},
        },
    }
}


@router.post(
    "",
    status_code=201,
    response_model=Run,
    openapi_extra=BODY,
    responses={
        200: {"model": ResolvedConfig, "description": "Dry run: the resolved config."},
        **documented(400, 413, 415, 422, 503, 507),
    },
)
async def create_run(
    request: Request,
    response: Response,
    services: Served,
    dry_run: Annotated[bool, Query(description="Validate only; start nothing.")] = False,
) -> Any:
    """Starts a training run.

    The config is validated whole and then checked on the workers (do the environments load, does
    the model folder hold a model). Mistakes are a 422 that lists all of them, and nothing is
    started. If no worker answers in time, the run is created all the same: it is `queued`, its
    `waiting_for` says what is missing, and the checks are made when that arrives.
    """
    media = media_of(request)
    data = await read_bytes(request, services.settings.max_body_bytes)
    config = read_config(data, media)
    if dry_run:
        response.status_code = 200
        return Response(
            ResolvedConfig(config=resolved(config)).model_dump_json(),
            media_type="application/json",
        )
    run_id = await launch(services, config)
    response.headers["Location"] = f"/v1/runs/{run_id}"
    return await services.show(await services.execution(run_id))


@router.get("", responses=documented(404, 422, 503))
async def list_runs(
    services: Served,
    limit: Annotated[int, Query(ge=1, le=100, description="Most runs in the answer.")] = 20,
    after: Annotated[
        str | None, Query(description="Cursor: the id of the last run of the page before.")
    ] = None,
    status: Annotated[RunStatus | None, Query(description="Only runs in this status.")] = None,
) -> ListOf[Run]:
    """Lists runs, the newest first. Live gauges are left out; ask for one run to get them."""
    found = [
        run_object(e, ui=services.settings.temporal_ui, namespace=services.temporal.namespace)
        for e in await services.temporal.runs()
    ]
    order = sorted(found, key=lambda run: (run.created_at, run.id), reverse=True)
    if after is not None:
        # The cursor is found before the filter: its run may have changed status since.
        place = next((i for i, run in enumerate(order) if run.id == after), None)
        if place is None:
            raise unknown_run(after)
        order = order[place + 1 :]
    wanted = [run for run in order if status is None or run.status == status]
    return ListOf[Run](data=wanted[:limit], has_more=len(wanted) > limit)


@router.get("/{run_id}", responses=documented(404, 503))
async def get_run(run_id: RunId, services: Served) -> Run:
    """One run, with live progress while it runs."""
    return await services.show(await services.execution(run_id))
