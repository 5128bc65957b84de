"""The FastAPI app. It boots without Temporal and without the store; /readyz says what is missing.

Nothing here may import torch, vllm, transformers or verifiers: the API starts in under 3 s.
"""

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from temporalio.envconfig import ClientConnectConfig

from activities.storage.store import ArtifactStore
from api import controls, docs, health, metrics, problems, runs
from api.records import Records
from api.services import Services
from api.settings import Settings
from api.temporal import Temporal

VERSION = "0.1.0"


def create_app(
    settings: Settings | None = None, connect: ClientConnectConfig | None = None
) -> FastAPI:
    """The app. `settings` and `connect` (Temporal) are read from the environment if not given."""
    settings = settings or Settings.from_env()
    app = FastAPI(title="Ratchet", version=VERSION, docs_url=None, redoc_url=None)
    app.state.services = Services(
        settings=settings,
        temporal=Temporal(connect, timeout_s=settings.rpc_timeout_s),
        records=Records(ArtifactStore(settings.store_url)),
    )
    problems.install(app)
    docs.install(app)
    for resource in (runs, controls, metrics, health):
        app.include_router(resource.router)

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app
