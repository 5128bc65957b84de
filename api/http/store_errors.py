"""Trouble with the artifact store as problem documents: whatever request meets it, and wherever.

Where the store lies, and what its filesystem said, may hold secrets: it is in the log, not in
replies.
"""

import logging
import os

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable, remedy
from ratchet.api.http.problems import reply
from ratchet.api.schemas.problems import ApiProblem, printable

RETRY_S = 5

logger = logging.getLogger(__name__)


def unavailable(error: StoreUnavailable) -> ApiProblem:
    """503: the artifact store cannot be used now."""
    cause = error.__cause__ or error
    why = os.strerror(error.errno) if error.errno else type(cause).__name__
    return ApiProblem(
        503,
        "store-unavailable",
        "The artifact store cannot be reached",
        f"The artifact store cannot be read or written now ({why}): {remedy(cause)}. "
        "RATCHET_STORE names it, and the API's log says what was asked of it.",
        retry_after_s=RETRY_S,
    )


def damaged(error: CorruptArtifact, root: str) -> ApiProblem:
    """500: what was asked for is damaged, and stays so; the store's `root` is not shown."""
    return ApiProblem(
        500,
        "damaged-artifact",
        "An artifact of the run is damaged",
        f"{damage_in(error, root)}. To mend it, {error.remedy}.",
    )


def damage_in(error: CorruptArtifact, root: str) -> str:
    """What is damaged, in words for replies, without the store's `root`."""
    return printable(str(error).replace(f"{root}/", ""))


async def _on_unavailable(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreUnavailable)
    logger.warning("%s", error)
    return reply(unavailable(error))


async def _on_damage(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CorruptArtifact)
    logger.error("%s", error)
    return reply(damaged(error, request.app.state.services.records.store.root))


def install(app: FastAPI) -> None:
    """Makes trouble with the store a problem document, whichever route meets it."""
    app.add_exception_handler(StoreUnavailable, _on_unavailable)
    app.add_exception_handler(CorruptArtifact, _on_damage)
