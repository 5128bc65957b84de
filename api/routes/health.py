"""Liveness and readiness. Liveness asks nobody: a Temporal outage is no reason to restart us.

Both are open to everyone, so that they say nothing of where things lie, and however often readiness
is asked for, the store is written once a second at most.
"""

import asyncio
import os

from fastapi import APIRouter

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
async def readyz(services: Served) -> Health:
    """Temporal answers and the artifact store can be written, as of the last second."""
    await services.temporal.ping()
    try:
        await services.probes.get("", lambda: asyncio.to_thread(services.records.probe))
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
