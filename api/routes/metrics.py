"""What a run measured: metrics and gauges. Both are read from the store, so that they outlive
Temporal's retention.
"""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, WithJsonSchema

from ratchet.activities.contracts.roles import WorkerRole
from ratchet.api.http.problems import documented
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.metrics import GaugeSample, LagSample, MetricsRow
from ratchet.api.services.core import RUN_ID, RunId, Served, Services, asked, unknown_run
from ratchet.api.store.curves import Table

router = APIRouter(prefix="/v1/runs", tags=["metrics"])

MOST_ROWS = 10_000
ROWS = 1000
CSV = "text/csv; charset=utf-8"
DAMAGED = "Ratchet-Damaged-Steps"
EXAMPLE_CSV = "step,time,loss,reward/all/mean\n3,1767268800.0,-0.02,0.41\n"
MOST_NAMED = 100
"""Damaged steps that a header names."""
HEADERS = {
    "Link": "With CSV: the address of the next rows (`rel=next`), if `limit` cut them off.",
    DAMAGED: f"With CSV: the first {MOST_NAMED} steps that are left out because their records are "
    "damaged, separated by commas.",
}


StepCursor = Annotated[
    int | None,
    Query(ge=0, le=2**53, description="Cursor: `next_after` of the previous page."),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,15}$"}),
]


class MetricsPage(ListOf[MetricsRow]):
    """A page of metrics. While `has_more` is true, pass `next_after` as `after`."""

    damaged: list[int] = Field(
        default_factory=list,
        description="Steps left out of the page because their records are damaged.",
    )


class GaugesPage(ListOf[GaugeSample | LagSample]):
    """A page of gauges. While `has_more` is true, pass `next_after` as `after`."""


async def require_recorded(services: Services, run_id: str) -> None:
    """Raises 404 if nothing was ever recorded for a run."""
    if services.records.remembers(run_id):
        return
    if RUN_ID.fullmatch(run_id) is None or not await asyncio.to_thread(
        services.records.knows, run_id
    ):
        raise unknown_run(run_id)


@router.get(
    "/{run_id}/metrics",
    response_model=MetricsPage,
    responses={
        200: {
            "description": "A page of metrics, or all of them as CSV.",
            "content": {"text/csv": {"schema": {"type": "string"}, "example": EXAMPLE_CSV}},
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in HEADERS.items()
            },
        },
        **documented(404, 422),
    },
)
async def list_metrics(
    run_id: RunId,
    request: Request,
    services: Served,
    after: StepCursor = None,
    after_step: Annotated[
        int, Query(ge=-1, le=2**53, description="Only steps above this one.")
    ] = -1,
    until_step: Annotated[
        int | None, Query(ge=0, le=2**53, description="Only steps up to this one.")
    ] = None,
    names: Annotated[
        str | None,
        Query(
            alias="keys",
            max_length=8000,
            description="Only these metrics, separated by commas.",
            examples=["reward/all/mean,loss"],
        ),
    ] = None,
    points: Annotated[
        int | None,
        Query(
            ge=4,
            le=MOST_ROWS,
            description="At most so many values of each metric over the range that `limit` cuts: "
            "the first, the last, and the lowest and highest of each interval in between. Every "
            "value is a measured one, at its own step; a row holds only the values that were "
            "selected.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        Query(
            ge=1,
            le=MOST_ROWS,
            description=f"Most steps in the answer; by default {ROWS} as JSON, all of them as CSV.",
        ),
    ] = None,
    form: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="Format of the answer; like `Accept: text/csv`."),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Metrics of every trainer step, ascending. They are read from the run's own store, so that
    after a resume no point is lost or doubled. `points` selects among all steps of the range, not
    only the first `limit`. CSV is complete, however long the run, unless a `limit` cuts it.
    """
    await require_recorded(services, run_id)
    wanted = [name for name in names.split(",") if name] if names is not None else None
    passed = after_step if after is None else max(after_step, after)
    as_csv = form == "csv" or (form is None and "text/csv" in accept)

    most = limit if as_csv else limit or ROWS

    def cut() -> tuple[Table, bool]:
        """The table, and whether more steps follow."""
        spans = services.records.spans(run_id)
        past = most + 1 if points is None and most is not None else None
        table = services.records.curves.table(
            spans, after=passed, until=until_step, names=wanted, limit=past
        )
        if points is not None:
            return table.thinned(points), False
        if most is None:
            return table, False
        return table.first(most), len(table.steps) > most

    if as_csv:
        table, more = await asyncio.to_thread(cut)
        headers = {"Content-Disposition": f'attachment; filename="{run_id}.csv"'}
        if more:
            rest = request.url.include_query_params(after_step=table.steps[-1])
            headers["Link"] = f'<{rest.path}?{rest.query}>; rel="next"'
        if table.damaged:
            headers[DAMAGED] = ",".join(map(str, table.damaged[:MOST_NAMED]))
        return StreamingResponse(table.as_csv(), media_type=CSV, headers=headers)

    def work() -> bytes:
        table, more = cut()
        return table.as_json(has_more=more)

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))


@router.get("/{run_id}/gauges", response_model=GaugesPage, responses=documented(404, 422))
async def list_gauges(
    run_id: RunId,
    request: Request,
    services: Served,
    after: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Cursor: `next_after` of the previous page, or a Unix time in seconds; "
            "only samples taken after it.",
        ),
        WithJsonSchema({"type": "string", "pattern": r"^[0-9]{1,12}(\.[0-9]{1,12})?$"}),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most samples in the answer.")] = 1000,
    role: Annotated[
        Literal[WorkerRole, "all"],
        Query(description="Whose samples; other roles report only event-loop lag and usage."),
    ] = "rollout",
) -> Response:
    """Gauges of the workers of a role over time, ascending: a sample per ten seconds of work.

    A worker's sample becomes readable a moment after it was taken, so a client that follows along
    should overlap its requests by a few seconds. Samples taken at the same time share a page.
    """
    await require_recorded(services, run_id)

    def work() -> bytes:
        wanted = None if role == "all" else role
        data, more = services.records.gauges(run_id, after or 0.0, limit, wanted)
        following = str(data[-1]["time"]) if more else None
        page = {"data": data, "has_more": more, "next_after": following}
        return GaugesPage.model_validate(page).model_dump_json().encode()

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))
