"""The dashboard's site: an API with three recorded runs, one of them long."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from temporalio import activity
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.contracts.wire import WIRE
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.compat import Worker
from tests.e2e import recorded
from tests.e2e.browsing import browsing, serving
from tests.unit.api.conftest import temporal_binary
from tests.unit.api.standin import Preflight, TrainingRun

SHORT = 60
MOST, FEWER = 10_000, 2_500
"""Steps of the long run: where time is measured, and where it is only thinned out."""
PAGES = {
    "runs": ("#/runs", '="runs"'),
    "run": ("#/runs/short", '="all"'),
    "failed": ("#/runs/other", '="all"'),
    "timeline": ("#/runs/short/timeline", '="timeline"'),
    "rollouts": ("#/runs/short/rollouts?r=train:5:2", '="rollouts"'),
    "events": ("#/runs/short/events", '="events"'),
    "config": ("#/runs/short/config", '="config"'),
    "model": ("#/runs/short/model", '="model"'),
    "compare": ("#/compare?runs=short,other", '="all"'),
    "launch": ("#/launch", '="launch"'),
}
"""Each page: where it is, and the end of the selector of its mark once it is there."""


@activity.defn
async def stands_by() -> None:
    """Nobody calls it."""


@dataclass
class Site:
    """An API with three recorded runs, one of `long` steps, and a browser."""

    long: int
    api: str
    browser: Any
    temporal: str
    screenshots: Path


@asynccontextmanager
async def recorded_site(home: Path, *, long: int) -> AsyncIterator[Site]:
    """The site on a store in `home`, until the block ends."""
    store = ArtifactStore(f"file://{home}/store")
    now = time.time()
    recorded.write(store, "long", steps=long, ended=now)
    recorded.write(store, "short", steps=SHORT, ended=now, seed=3)
    recorded.write(store, "other", steps=80, ended=now, seed=5)
    queues = Queues.prefixed("recorded")
    error = {"code": "GateFailed", "role": "inference", "message": "0.31 is not 0.12"}
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(), data_converter=WIRE
    ) as env:
        await recorded.show(env.client, queues, "long", steps=long, ended=now)
        await recorded.show(env.client, queues, "short", steps=SHORT, ended=now)
        failed = {"max_steps": 200, "status": "failed", "error": error}
        await recorded.show(env.client, queues, "other", steps=80, ended=now, **failed)
        address = env.client.service_client.config.target_host
        # What is launched from the page is taken up by a stand-in, recorded runs by nobody.
        standin = Worker(
            env.client,
            task_queue=Queues.prefixed("standin").orchestrator,
            workflows=[TrainingRun, Preflight],
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        # Runs miss no worker of any role.
        roles = [
            Worker(
                env.client,
                task_queue=Queues.prefixed("standin").of(role),
                activities=[stands_by],
            )
            for role in WORKER_ROLES
            if role != "orchestrator"
        ]
        async with AsyncExitStack() as up:
            for worker in (standin, *roles):
                await up.enter_async_context(worker)
            with serving(home, address, "standin") as api:
                # The first reader of a run has the API read its records from the store.
                async with httpx.AsyncClient(base_url=api, timeout=120) as http:
                    assert (await http.get("/v1/runs/long/metrics?points=4")).status_code == 200
                async with browsing() as browser:
                    kept = os.environ.get("RATCHET_SCREENSHOTS")
                    pictures = Path(kept) if kept else home / "screenshots"
                    yield Site(long, api, browser, address, pictures)
