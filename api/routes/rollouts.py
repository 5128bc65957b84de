"""The rollouts resource: what the policy wrote, token by token."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from ratchet.api.http.problems import documented
from ratchet.api.routes.metrics import require_recorded
from ratchet.api.schemas.problems import ApiProblem, shown
from ratchet.api.schemas.rollouts import RolloutFull, RolloutPage
from ratchet.api.services.core import RunId, Served, asked
from ratchet.api.store.rollouts import RID, Wanted

router = APIRouter(prefix="/v1/runs", tags=["rollouts"])


@router.get("/{run_id}/rollouts", response_model=RolloutPage, responses=documented(404, 422))
async def list_rollouts(
    run_id: RunId,
    request: Request,
    services: Served,
    step: Annotated[
        int | None,
        Query(
            ge=0,
            le=2**53,
            description="Only those of the groups assigned to this step's batch, including "
            "filtered ones, of those that left nothing for it since all failed or were filtered, "
            "and of its evals; `note` says why it has no batch.",
        ),
    ] = None,
    env: Annotated[str | None, Query(max_length=64, description="Only those of this env.")] = None,
    group: Annotated[
        str | None, Query(max_length=200, description="Only those of this group: 'train/12'.")
    ] = None,
    kind: Annotated[
        Literal["train", "eval"] | None, Query(description="Only those of this kind.")
    ] = None,
    reward_min: Annotated[
        float | None, Query(allow_inf_nan=False, description="Those with at least this reward.")
    ] = None,
    reward_max: Annotated[
        float | None, Query(allow_inf_nan=False, description="Those with at most this reward.")
    ] = None,
    errored: Annotated[bool | None, Query(description="Only failed ones, or only others.")] = None,
    after: Annotated[
        str | None, Query(max_length=200, description="Cursor: `next_after` of the previous page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="Most rollouts in a page.")] = 50,
) -> Response:
    """Finished rollouts of finalized groups: of one step in the order of its batch, else the newest
    train groups first, then evals. A page of a rare kind may be short: rely on `has_more` and
    `next_after`. Without `step`, new groups of a long run appear some seconds late.
    """
    await require_recorded(services, run_id)
    if after is not None and RID.fullmatch(after) is None:
        raise _unknown(run_id, after)
    wanted = Wanted(step, env, group, kind, reward_min, reward_max, errored)

    def work() -> bytes:
        return services.rollouts.page(run_id, wanted, after, limit).model_dump_json().encode()

    return await services.reply(asked(request), lambda: asyncio.to_thread(work))


@router.get("/{run_id}/rollouts/{rid}", responses=documented(404, 422))
async def get_rollout(
    run_id: RunId,
    services: Served,
    rid: Annotated[
        str, Path(max_length=200, description="The rollout's id.", examples=["train:12:3"])
    ],
) -> RolloutFull:
    """One rollout: messages, rewards, and every token with its text, log-probability, advantage and
    policy version; and the other members of its group.
    """
    await require_recorded(services, run_id)
    result = await asyncio.to_thread(services.rollouts.full, run_id, rid)
    if result is None:
        raise _unknown(run_id, rid)
    return result


def _unknown(run_id: str, rid: str) -> ApiProblem:
    detail = f"Run {run_id} has no rollout {shown(rid)!r}; GET /v1/runs/{run_id}/rollouts lists it."
    return ApiProblem(404, "unknown-rollout", "No such rollout", detail)
