"""Liveness and readiness. Liveness asks nobody: a Temporal outage is no reason to restart us."""

import asyncio

from fastapi import APIRouter

from api.models import Health
from api.problems import ApiProblem, documented
from api.services import Served

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process is up."""
    return Health()


@router.get("/readyz", responses=documented(503))
async def readyz(services: Served) -> Health:
    """Temporal answers and the artifact store can be written."""
    await services.temporal.ping()
    try:
        await asyncio.to_thread(services.records.probe)
    except OSError as error:
        raise ApiProblem(
            503,
            "store-unavailable",
            "The artifact store cannot be written",
            f"{services.records.store.url}: {error.strerror or type(error).__name__}. Check that "
            "it exists, has space, and that this user may write to it; RATCHET_STORE names it.",
        ) from None
    return Health(checks={"temporal": "ok", "store": "ok"})
