"""A run's model: the version to export, and its files."""

import asyncio
from dataclasses import replace
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from ratchet.api.http.problems import documented
from ratchet.api.routes.metrics import require_recorded
from ratchet.api.schemas.artifacts import Model
from ratchet.api.schemas.problems import ApiProblem, FieldError, shown
from ratchet.api.services.core import RunId, Served
from ratchet.api.store import model_card, models
from ratchet.api.store.models import Stored

router = APIRouter(prefix="/v1/runs", tags=["artifacts"])

BYTES = "application/octet-stream"
MOST = 2**31
MERGE = (
    "For a run that trains an adapter: the whole model, with the adapter merged into its weights."
)


@router.get("/{run_id}/model", responses=documented(404, 410, 422))
async def get_model(
    run_id: RunId,
    services: Served,
    step: Annotated[
        int | None, Query(ge=0, le=MOST, description="The version after this step.")
    ] = None,
    best: Annotated[
        str | None,
        Query(
            max_length=64,
            description="The version with the highest mean in this eval, the latest if there is a "
            "tie; empty: in the first of the config's evals.",
        ),
    ] = None,
    merge: Annotated[bool, Query(description=MERGE)] = False,
) -> Model:
    """A version of the run's policy: its files, evals and model card. For a run that trains a LoRA
    adapter the files are the adapter's, or with `merge` those of the whole model. Without `step`
    and `best` it is the last checkpoint or, if the run has none, the newest version.
    """
    if step is not None and best is not None:
        message = "step and best both choose a version; use only one"
        error = FieldError(pointer="", key="query.best", value=best, message=message)
        title = "The request has invalid parameters"
        raise ApiProblem(422, "invalid-request", title, message, errors=[error])
    await require_recorded(services, run_id)
    records = services.records

    def work() -> Model:
        choice = models.choose(records, run_id, step, best)
        kept = models.stored(records, run_id, choice.step, merged=merge)
        by_env = models.scores(records.evals(run_id))
        evals = {env: by[choice.step] for env, by in by_env.items() if choice.step in by}
        facts = model_card.read(records, run_id, choice.step, kept)
        whole = model_card.card(replace(facts, alone=False)) if facts.alone else None
        return Model(
            run_id=run_id,
            step=choice.step,
            chosen=choice.chosen,
            best_of=choice.best_of,
            evals=evals,
            attempt=kept.held.attempt,
            kept_as=kept.kept_as,
            kind="adapter" if kept.folder else "model",
            path=f"{kept.ref.path}/{kept.folder}".removesuffix("/"),
            size=sum(file.size for file in kept.files),
            files=kept.files,
            steps=choice.steps,
            card=model_card.card(facts),
            merged_card=whole,
        )

    return await asyncio.to_thread(work)


@router.get(
    "/{run_id}/model/files/{name:path}",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The file's bytes.",
            "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
        },
        **documented(404, 410, 422),
    },
)
async def get_model_file(
    run_id: RunId,
    services: Served,
    name: Annotated[
        str,
        Path(
            max_length=400,
            description="One of the `files` of the model.",
            examples=["model.safetensors"],
        ),
    ],
    step: Annotated[
        int | None, Query(ge=0, le=MOST, description="The version after this step.")
    ] = None,
    merge: Annotated[bool, Query(description=MERGE)] = False,
) -> StreamingResponse:
    """One file of a version, as stored; the model's `files` have its hash. Without `step` the
    version is the last checkpoint or, if the run has none, the newest version.
    """
    await require_recorded(services, run_id)
    records = services.records

    def look() -> Stored:
        choice = models.choose(records, run_id, step, None)
        return models.stored(records, run_id, choice.step, merged=merge)

    kept = await asyncio.to_thread(look)
    file = next((file for file in kept.files if file.name == name), None)
    if file is None:
        there = ", ".join(file.name for file in kept.files)
        detail = (
            f"Version {kept.held.step} of run {run_id} has no file {shown(name)!r}; it has {there}."
        )
        raise ApiProblem(404, "unknown-file", "No such file", detail)
    attachment = f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2])}"
    headers = {"Content-Length": str(file.size), "Content-Disposition": attachment}
    headers["ETag"] = f'"{file.sha256}"'
    return StreamingResponse(
        records.store.pieces(kept.ref, f"{kept.folder}{name}"), media_type=BYTES, headers=headers
    )
