"""Liveness and readiness. Liveness checks no dependency: an outage is no reason to restart the API.

Both are open to everyone, so that an API with keys hides addresses and paths from callers without a
key. However often readiness is requested, Temporal is queried and the store written at most once a
second.
"""

import asyncio
import os

from fastapi import APIRouter, Request

from ratchet.api.http.problems import documented
from ratchet.api.schemas.machines import Health
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.core import Served

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process is up."""
    return Health()


@router.get("/readyz", responses=documented(503))
async def readyz(request: Request, services: Served) -> Health:
    """Temporal answers and the artifact store is writable, as of the last second."""
    try:
        await services.probes.get("temporal", services.temporal.ping)
    except ApiProblem as problem:
        keyring = services.keyring
        if keyring is None or keyring.bearer(request.headers.get("authorization", "")):
            raise
        raise ApiProblem(
            problem.document.status,
            "temporal-unavailable",
            "Temporal does not answer",
            "With a key, the API's operator sees more here; its log has the details.",
            retry_after_s=problem.retry_after_s,
        ) from None
    try:
        await services.probes.get("store", lambda: asyncio.to_thread(services.records.probe))
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ApiProblem(
            503,
            "store-unavailable",
            "The artifact store cannot be written",
            f"{why}. Check that the store that RATCHET_STORE names exists, has space, and that "
            "this user may write to it.",
        ) from None
    return Health(checks={"temporal": "ok", "store": "ok"})
