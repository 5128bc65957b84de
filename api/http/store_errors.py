"""Problem documents for an unavailable store and for damaged artifacts, whichever request finds
them.

The store's address and the messages of its filesystem may hold secrets: they go to the log, not
into replies.
"""

import logging
import os

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable, remedy
from ratchet.api.http.problems import reply
from ratchet.api.schemas.problems import ApiProblem, printable
from ratchet.configs.versions import NewerSchema

RETRY_S = 5

logger = logging.getLogger(__name__)


def damage_in(error: CorruptArtifact, root: str) -> str:
    """What is damaged, in words for replies, without the store's `root`."""
    return printable(str(error).replace(f"{root}/", ""))


def install(app: FastAPI) -> None:
    """Turns errors of the store into problem documents, whichever route raises them."""

    @app.exception_handler(StoreUnavailable)
    async def _on_unavailable(_: Request, error: StoreUnavailable) -> JSONResponse:
        logger.warning("%s", error)
        cause = error.__cause__ or error
        why = os.strerror(error.errno) if error.errno else type(cause).__name__
        detail = (
            f"The artifact store cannot be read or written now ({why}): {remedy(cause)}. "
            "RATCHET_STORE names it, and the API's log has the details."
        )
        title = "The artifact store cannot be reached"
        return reply(ApiProblem(503, "store-unavailable", title, detail, retry_after_s=RETRY_S))

    @app.exception_handler(CorruptArtifact)
    async def _on_damage(request: Request, error: CorruptArtifact) -> JSONResponse:
        logger.error("%s", error)
        what = damage_in(error, request.app.state.services.records.store.root)
        detail = f"{what}. To fix it, {error.remedy}."
        title = "An artifact of the run is damaged"
        return reply(ApiProblem(500, "damaged-artifact", title, detail))

    @app.exception_handler(NewerSchema)
    async def _on_newer(_: Request, error: NewerSchema) -> JSONResponse:
        logger.error("%s", error)
        detail = f"{printable(str(error))}. Start this API with the newer build, too."
        return reply(ApiProblem(503, "newer-schema", "A newer build wrote it", detail))
