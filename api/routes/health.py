"""Liveness and readiness. Liveness asks nobody: a Temporal outage is no reason to restart us.

Both are open to everyone, so that where the API has keys they tell nobody without one where things
lie. However often readiness is asked for, Temporal is asked and the store written once a second at
most.
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
    """Temporal answers and the artifact store can be written, as of the last second."""
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
            "The API's operator learns more here with a key, and from its log.",
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
