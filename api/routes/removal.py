"""Archives runs, which removes them from the list, and deletes runs with all their data.

Both require that the run has ended; a deletion also that no other run needs it. A deletion that was
interrupted can be repeated: the run stays in the list until everything else of it is deleted.
"""

import asyncio

from fastapi import APIRouter, Request

from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import conflict, newest
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.schemas.run import DeletedRun, Run
from ratchet.api.services.core import RUN_ID, RunId, Served, Services
from ratchet.api.services.run_view import OPEN, status_of
from ratchet.api.store import removal
from ratchet.api.temporal.client import Execution

router = APIRouter(prefix="/v1/runs", tags=["control"])

MOST_NAMED = 10
STILL_S = 300.0


async def _ended(services: Services, run_id: str, verb: str) -> Execution:
    """The run, which has ended; raises 404, 409."""
    execution = await newest(services, run_id)
    if status_of(execution) not in ENDED:
        raise conflict(verb, execution, "stop or cancel it first.")
    if execution.state in OPEN:
        raise conflict(verb, execution, "it ends in a moment; try again then.")
    return execution


async def _shelved(services: Services, execution: Execution, *, archived: bool) -> Run:
    index, row = services.run_list.index, services.run_list.row_of(execution)
    await asyncio.to_thread(index.archive if archived else index.unarchive, row)
    services.touched(execution.id)
    return await services.show(execution)


@router.post("/{run_id}/archive", responses=documented(404, 409, 503))
async def archive_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Removes a run that has ended from the list and keeps all its data:
    `GET /v1/runs?archived=true` lists it as long as Temporal retains it. Resuming an archived run
    puts it back into the list.
    """
    execution = await _ended(services, run_id, "archive")
    return await _shelved(services, execution, archived=True)


@router.post("/{run_id}/unarchive", responses=documented(404, 409, 503))
async def unarchive_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Puts an archived run back into the list."""
    execution = await newest(services, run_id)
    return await _shelved(services, execution, archived=False)


async def _require_unneeded(services: Services, run_id: str) -> None:
    """Raises 409 that names the runs that need this one."""
    needed = set(await asyncio.to_thread(removal.needed_by, services.records.store, run_id))
    # Runs that have not begun yet have nothing in the store.
    for execution in await services.run_list.open():
        if (execution.memo.get("lineage") or {}).get("source") == run_id:
            needed.add(execution.id)
    needed.discard(run_id)
    if needed:
        names = ", ".join(sorted(needed)[:MOST_NAMED])
        more = f" and {len(needed) - MOST_NAMED} more" if len(needed) > MOST_NAMED else ""
        raise ApiProblem(
            409,
            "run-needed",
            "Other runs need this run",
            f"Cannot delete run {run_id}: {names}{more} continued from its checkpoints or started "
            "with its weights, and show its records as their history. Delete those first, or "
            "archive this run.",
        )


async def _gone_below(services: Services, run_id: str) -> list[Execution]:
    """All executions of a run, none of which is still open; raises 409."""
    executions = await services.temporal.executions(run_id)
    if below := [execution.id for execution in executions if execution.state in OPEN]:
        raise ApiProblem(
            409,
            "run-conflict",
            "The run is not over yet",
            f"Cannot delete run {run_id}: {below[0]} has not ended. Servers of a run are closed "
            "after its end; try again in a moment.",
            retry_after_s=2,
        )
    return executions


async def _deletable(services: Services, run_id: str) -> Execution | DeletedRun | None:
    """The run, which has ended; None if neither Temporal nor the store says how it did. A run that
    was deleted lately gets the same reply again, for clients that missed it. Raises 404, 409.
    """
    execution: Execution | None = None
    try:
        execution = await _ended(services, run_id, "delete")
    except ApiProblem as problem:
        unknown = problem.document.status == 404 and RUN_ID.fullmatch(run_id)
        store = services.records.store
        if not unknown:
            raise
        if not await asyncio.to_thread(removal.attempts_in, store, run_id):
            if await asyncio.to_thread(services.run_list.index.hidden, run_id):
                return DeletedRun(id=run_id, freed=0)
            raise
    if execution is not None and execution.run:
        return execution
    reporting = await asyncio.to_thread(services.records.live, run_id, STILL_S)
    if reporting:
        raise ApiProblem(
            409,
            "run-conflict",
            "Workers still report on the run",
            f"Cannot delete run {run_id}: this API's Temporal does not know it, but workers "
            f"reported on it in the last {STILL_S:.0f} s; send the request to the API of its own "
            "Temporal.",
        )
    return execution


async def _require_still(services: Services, run_id: str) -> None:
    """Raises 409 if the run was resumed."""
    execution = await services.temporal.describe(run_id)
    if execution is not None and execution.state in OPEN:
        raise conflict("delete", execution, "it was resumed.")


@router.delete("/{run_id}", responses=documented(404, 409, 503))
async def delete_run(run_id: RunId, request: Request, services: Served) -> DeletedRun:
    """Deletes a run that has ended: all its data in the artifact store, its row in the list, what
    Temporal retains of it, and its logs on the API's machine. This cannot be undone.

    A run that others need is refused with 409: a fork shows its records, and `model.name =
    "run:RUN@STEP"` names one of its versions.
    """
    store = services.records.store
    execution = await _deletable(services, run_id)
    if isinstance(execution, DeletedRun):
        return execution
    await _gone_below(services, run_id)
    await _require_unneeded(services, run_id)
    index = services.run_list.index
    await asyncio.to_thread(index.hide, run_id)
    try:
        # A run that started before the mark was set is seen now; a later one sees the mark.
        await _require_still(services, run_id)
        executions = await _gone_below(services, run_id)
        await _require_unneeded(services, run_id)
    except ApiProblem:
        await asyncio.to_thread(index.unhide, run_id)
        services.touched(run_id)
        raise
    freed = await asyncio.to_thread(removal.size_of, store, run_id)
    await asyncio.to_thread(removal.delete, store, run_id, services.settings.home)
    services.records.forget(run_id)
    services.disk.forget(run_id)
    await services.temporal.delete(executions, run_id)
    if execution is not None:
        row = services.run_list.row_of(execution)
        await asyncio.to_thread(index.delete, row)
    services.touched(run_id)
    return DeletedRun(id=run_id, freed=freed)
