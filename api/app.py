"""The FastAPI app. It starts without Temporal and without the store; /readyz says what is missing.

Nothing here may import torch, vllm, transformers or verifiers: the API starts in under 3 s.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from temporalio.envconfig import ClientConnectConfig

from ratchet import __version__
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.dashboard import pages
from ratchet.api.http import docs, idempotency, problems, store_errors
from ratchet.api.http.audit import Audit
from ratchet.api.http.conventions import Head, require_known_query
from ratchet.api.http.keyring import Keyring
from ratchet.api.http.security import Guard
from ratchet.api.routes import (
    artifacts,
    control,
    evals,
    events,
    fork,
    health,
    machines,
    metrics,
    model,
    notes,
    prometheus,
    removal,
    rollouts,
    runs,
)
from ratchet.api.services import ended
from ratchet.api.services.absence import Absences
from ratchet.api.services.core import Services
from ratchet.api.services.disk import Disk
from ratchet.api.services.run_list import RunList
from ratchet.api.settings import Settings
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import Rollouts
from ratchet.api.store.run_index import RunIndex
from ratchet.api.temporal.client import Temporal
from ratchet.api.temporal.histories import Histories

logger = logging.getLogger(__name__)


def _log_failure(chore: asyncio.Task[Any]) -> None:
    if not chore.cancelled() and (error := chore.exception()) is not None:
        logger.error("a background task of the API has ended", exc_info=error)


def create_app(
    settings: Settings | None = None, connect: ClientConnectConfig | None = None
) -> FastAPI:
    """The app. By default `settings` and `connect` (Temporal) come from the environment."""
    settings = settings or Settings.from_env()
    temporal = Temporal(connect, timeout_s=settings.rpc_timeout_s)
    records = Records(ArtifactStore(settings.store_url, settings.known_stores))
    histories = Histories(temporal)
    keyring = Keyring(settings.keys, settings.key_file) if settings.guarded else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        chores = [
            asyncio.create_task(idempotency.forgetting(records.store)),
            asyncio.create_task(ended.keeping(temporal, records)),
            asyncio.create_task(Absences(app.state.services).watching()),
        ]
        for chore in chores:
            chore.add_done_callback(_log_failure)
        yield
        for chore in chores:
            chore.cancel()
        histories.close()

    app = FastAPI(
        title="Ratchet",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        # A route's name is its operation id, so a path may change while a client's method stays.
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.services = Services(
        settings=settings,
        temporal=temporal,
        records=records,
        histories=histories,
        rollouts=Rollouts(records),
        run_list=RunList(temporal, RunIndex(records.store), settings.temporal_ui),
        disk=Disk(records.store),
        keyring=keyring,
    )
    problems.install(app)
    store_errors.install(app)
    docs.install(app)
    for resource in (
        runs,
        control,
        notes,
        fork,
        removal,
        metrics,
        evals,
        events,
        rollouts,
        artifacts,
        model,
        machines,
        health,
    ):
        app.include_router(resource.router, dependencies=[Depends(require_known_query)])
    requests = prometheus.install(app)
    pages.install(app)
    app.add_middleware(Head)
    app.add_middleware(Guard, keyring=keyring, hosts=settings.hosts, public_url=settings.public_url)
    app.add_middleware(Audit, on_refused=lambda problem: requests.refused.labels(problem).inc())
    return app
