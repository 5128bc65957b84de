"""The note of a run: the store holds it, so that it can change before, while and after the run
runs.
"""

import asyncio

from fastapi import APIRouter, Request

from ratchet.api.http.bodies import optional_json, read_bytes
from ratchet.api.http.problems import documented
from ratchet.api.routes._common import MAX_BODY, newest, read_as, required_body
from ratchet.api.schemas.bodies import NoteBody
from ratchet.api.schemas.run import Run
from ratchet.api.services.core import RunId, Served, unknown_run
from ratchet.api.store.notes import write_note

router = APIRouter(prefix="/v1/runs", tags=["control"])


@router.put(
    "/{run_id}/note",
    openapi_extra=required_body(NoteBody, {"note": "lr halved after the jump at step 40"}),
    responses=documented(400, 404, 413, 415, 422, 503),
)
async def note_run(run_id: RunId, request: Request, services: Served) -> Run:
    """Replaces the note of a run, which may have ended; an empty one removes it. The run itself
    does not notice.
    """
    body = read_as(NoteBody, optional_json(request, await read_bytes(request, MAX_BODY)))
    execution = await newest(services, run_id)
    written = await asyncio.to_thread(write_note, services.records.store, run_id, body.note)
    services.touched(run_id)
    if not written:
        raise unknown_run(run_id)
    return await services.show(execution)
