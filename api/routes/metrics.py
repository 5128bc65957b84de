"""What a run measured: metrics and gauges. It comes from the store, so that it outlives
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
    "Link": "With CSV: where to go on (`rel=next`), if `limit` left out steps.",
    DAMAGED: f"With CSV: the first {MOST_NAMED} steps that are left out, since their records are "
    "damaged, separated by commas.",
}


StepCursor = Annotated[
    int | None,
    Query(ge=0, le=2**53, description="Cursor: `next_after` of the page before."),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,15}$"}),
]


class MetricsPage(ListOf[MetricsRow]):
    """A page of metrics; ask again with `next_after` as `after` while `has_more` is true."""

    damaged: list[int] = Field(
        default_factory=list,
        description="Steps of the page that are left out, since their records are damaged.",
    )


class GaugesPage(ListOf[GaugeSample | LagSample]):
    """A page of gauges; ask again with `next_after` as `after` while `has_more` is true."""


async def require_recorded(services: Services, run_id: str) -> None:
    """Raises 404 if nothing was ever recorded of a run."""
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
            description="Of each metric at most so many values over the range that `limit` cuts: "
            "the first, the last, and of each stretch between the lowest and the highest. Every "
            "value is one that was measured, at its own step; a row has only the values that are "
            "left of it.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        Query(
            ge=1,
            le=MOST_ROWS,
            description=f"Most steps in the answer; none: {ROWS} as JSON, all of them as CSV.",
        ),
    ] = None,
    form: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="What to answer with; `Accept: text/csv` says it too."),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Metrics of every trainer step, ascending; the store is the run's own, so that after a resume
    no point is lost or doubled. With `points` all steps of the range are looked at, whatever the
    `limit`. CSV comes whole, however long the run, unless a `limit` cuts it.
    """
    await require_recorded(services, run_id)
    wanted = [name for name in names.split(",") if name] if names is not None else None
    passed = after_step if after is None else max(after_step, after)
    as_csv = form == "csv" or (form is None and "text/csv" in accept)

    most = limit if as_csv else limit or ROWS

    def cut() -> tuple[Table, bool]:
        """The table, and whether steps follow."""
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
            description="Cursor: `next_after` of the page before, or a Unix time in seconds; only "
            "samples later than it.",
        ),
        WithJsonSchema({"type": "string", "pattern": r"^[0-9]{1,12}(\.[0-9]{1,12})?$"}),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most samples in the answer.")] = 1000,
    role: Annotated[
        Literal[WorkerRole, "all"],
        Query(description="Whose samples; all but rollout workers tell their event-loop lag only."),
    ] = "rollout",
) -> Response:
    """Gauges of the workers of a role over time, ascending: a sample each ten seconds of work.

    A worker's sample can be read a moment after it was taken, so that what reads along should ask
    again from some seconds before the last one it got. Samples of the same time share a page.
    """
    await require_recorded(services, run_id)

    def work() -> bytes:
        wanted = None if role == "all" else role
        data, more = services.records.gauges(run_id, after or 0.0, limit, wanted)
        following = str(data[-1]["time"]) if more else None
        page = {"data": data, "has_more": more, "next_after": following}
        return GaugesPage.model_validate(page).model_dump_json().encode()

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))
