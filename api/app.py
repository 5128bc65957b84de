"""The FastAPI app. It boots without Temporal and without the store; /readyz says what is missing.

Nothing here may import torch, vllm, transformers or verifiers: the API starts in under 3 s.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from temporalio.envconfig import ClientConnectConfig

from activities.storage.store import ArtifactStore
from api import (
    belongings,
    controls,
    docs,
    events,
    health,
    machines,
    metrics,
    problems,
    prometheus,
    restoring,
    rollouts,
    runs,
    store_trouble,
)
from api.dashboard import pages
from api.histories import Histories
from api.records import Records
from api.rollout_records import Rollouts
from api.security import Guard
from api.services import Services
from api.settings import Settings
from api.temporal import Temporal

VERSION = "0.1.0"


def create_app(
    settings: Settings | None = None, connect: ClientConnectConfig | None = None
) -> FastAPI:
    """The app. `settings` and `connect` (Temporal) are read from the environment if not given."""
    settings = settings or Settings.from_env()
    temporal = Temporal(connect, timeout_s=settings.rpc_timeout_s)
    records = Records(ArtifactStore(settings.store_url))
    histories = Histories(temporal)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        histories.close()

    app = FastAPI(
        title="Ratchet", version=VERSION, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.services = Services(
        settings=settings,
        temporal=temporal,
        records=records,
        histories=histories,
        rollouts=Rollouts(records),
    )
    problems.install(app)
    store_trouble.install(app)
    docs.install(app)
    for resource in (
        runs,
        controls,
        restoring,
        metrics,
        events,
        rollouts,
        belongings,
        machines,
        health,
    ):
        app.include_router(resource.router)
    prometheus.install(app)
    pages.install(app)
    app.add_middleware(
        Guard, keys=settings.keys, hosts=settings.hosts, public_url=settings.public_url
    )
    return app
