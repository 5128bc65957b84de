"""What a run's evals came to: their records, and one eval against another on the same examples."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ratchet.api.http.problems import documented
from ratchet.api.routes._common import invalid
from ratchet.api.routes.metrics import require_recorded
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.evals import EvalComparison
from ratchet.api.schemas.metrics import EvalRecord
from ratchet.api.schemas.problems import FieldError, shown
from ratchet.api.services.core import RunId, Served, asked
from ratchet.api.store.comparisons import Side, compared, eval_envs

router = APIRouter(prefix="/v1/runs", tags=["metrics"])


@router.get("/{run_id}/evals", response_model=ListOf[EvalRecord], responses=documented(404))
async def list_evals(run_id: RunId, request: Request, services: Served) -> Response:
    """All evals of a run, by step. Of `metrics`, 'avg@n' and 'pass@k' have the bounds of a 95 %
    confidence interval beside them ('avg@4/low', 'avg@4/high') where they are known.
    """
    await require_recorded(services, run_id)

    def work() -> bytes:
        records = services.records.evals(run_id)
        # Thousands of them; a comparison reads them.
        without = [{key: one[key] for key in one if key != "rewards"} for one in records]
        page = {"data": without, "has_more": False}
        return ListOf[EvalRecord].model_validate(page).model_dump_json().encode()

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))


@router.get(
    "/{run_id}/evals/comparison",
    response_model=ListOf[EvalComparison],
    responses=documented(404, 422),
)
async def compare_evals(
    run_id: RunId,
    request: Request,
    services: Served,
    to: Annotated[
        str | None,
        Query(
            max_length=64,
            description="The run that this one is compared with; none: itself, its last evals with "
            "those of step 0.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        Query(ge=0, le=2**53, description="Of this run, the evals of this step; none: the last."),
    ] = None,
    to_step: Annotated[
        int | None,
        Query(ge=0, le=2**53, description="Of the other run, the evals of this step."),
    ] = None,
    env: Annotated[
        str | None, Query(max_length=64, description="One env; none: all that either evaluates.")
    ] = None,
    k: Annotated[
        int | None,
        Query(ge=1, le=10**6, description="Compare pass@k; none: mean rewards (avg@n)."),
    ] = None,
) -> Response:
    """Evals of this run against those of another, by env: on the examples that both have, the
    difference with its paired 95 % confidence interval, wins and losses, and the rollouts that
    differ. A difference above 0 says that this run is better. Where two evals cannot be compared,
    `problem` says why.
    """
    other_id = to if to is not None else run_id
    for one in (run_id, other_id):
        await require_recorded(services, one)
    if to is None and to_step is None:
        to_step = 0
    this, other = Side(run_id, step), Side(other_id, to_step)

    def work() -> bytes:
        records = services.records
        both = [name for side in (this, other) for name in eval_envs(records, side.run_id)]
        known = [*dict.fromkeys(both)]
        if env is not None and env not in known:
            text = f"is an eval env of neither run; their eval envs: {', '.join(known) or 'none'}"
            raise invalid([FieldError(pointer="", key="query.env", value=shown(env), message=text)])
        data = [compared(records, this, other, name, k) for name in known if env in (None, name)]
        page = ListOf[EvalComparison](data=data, has_more=False)
        return page.model_dump_json().encode()

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))
