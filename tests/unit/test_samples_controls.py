"""A verb, a panel and a metric cost what `docs/extending.md` shows, and work."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.e2e.browsing import browsing, reading
from tests.samples import LIMITS, SECTIONS, Copy
from tests.unit.api.conftest import temporal_binary

VERB = """
import asyncio, json, sys
from pathlib import Path
import httpx
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.envconfig import ClientConnectConfig
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner
from typer.testing import CliRunner
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.wire import WIRE
from ratchet.api.app import create_app
from ratchet.api.client.cli import app as command
from ratchet.api.dashboard.pages import contract
from ratchet.api.settings import Settings
from ratchet.worker.client import register_search_attributes
from ratchet.worker.compat import Worker
from ratchet.workflows.preflight import Preflight
from ratchet.workflows.training_run import TrainingRun

temporal, store = sys.argv[1:]
queues = Queues.prefixed("sample")

async def ask(http, run, handle):
    found = {}
    wrong = await http.post(f"{run}/mark", json={"reasons": "typo"})
    found["refused"] = wrong.json()["errors"][0]["message"]
    found["asked"] = (await http.post(f"{run}/mark", json={"reason": "here"})).status_code
    await handle.signal("MARK", "there")
    while "mark: there" not in found.get("notes", ""):
        metadata = "__temporal_workflow_metadata"
        told = await handle.query(metadata, result_type=WorkflowMetadata)
        found["notes"] = told.current_details
    events = []
    while len(events) < 2:
        answer = await http.get(f"{run}/events?types=run.asked")
        events = [event["message"] for event in answer.json()["data"]]
    return {**found, "events": events}

async def main():
    start = WorkflowEnvironment.start_local
    async with await start(dev_server_existing_path=temporal, data_converter=WIRE) as env:
        await register_search_attributes(env.client)
        address = env.client.service_client.config.target_host
        settings = Settings(
            store_url=store, queues=queues, min_free_bytes=1, preflight_timeout_s=0.1
        )
        app = create_app(settings, ClientConnectConfig(target_host=address))
        there = httpx.ASGITransport(app=app)
        runner = UnsandboxedWorkflowRunner()
        flows = [TrainingRun, Preflight]
        config = {"max_steps": 1, "train": {"env": [{"id": "reverse-text"}]}}
        async with (
            Worker(
                env.client,
                task_queue=queues.orchestrator,
                workflows=flows,
                workflow_runner=runner,
            ),
            httpx.AsyncClient(transport=there, base_url="http://api", timeout=60) as http,
        ):
            # Nobody checks its config; it waits, and hears what it is asked.
            run = (await http.post("/v1/runs", json=config)).json()["id"]
            handle = env.client.get_workflow_handle(run)
            found = await ask(http, f"/v1/runs/{run}", handle)
            found["documented"] = (await http.get("/openapi.json")).json()["paths"][
                "/v1/runs/{run_id}/mark"
            ]["post"]["summary"]
            await handle.terminate()
    found["help"] = CliRunner().invoke(command, ["runs", "mark", "--help"]).output
    found["contract"] = contract()
    return found

print(json.dumps(asyncio.run(main())))
"""

METRIC = """
import json
from ratchet.activities.scoring.batches import BatchGroup, BatchRollout, summarize
def rollout(reward):
    return BatchRollout(reward, 9, 4, 1, False, 1, 0.0)
groups = [BatchGroup("e", 2, 0, 0, [rollout(a), rollout(b)]) for a, b in ((0.0, 1.0), (0.5, 0.5))]
print(json.dumps(summarize(groups, 1)))
"""

CONTRACT = """
import json
from ratchet.api.dashboard.pages import contract
print(json.dumps(contract()))
"""

SITE = "http://dashboard.test"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Ratchet as it is."""
    return Copy(tmp_path / "copy")


def change(copy: Copy, seam: str) -> None:
    """Makes the sample change of a seam."""
    copy.apply(SECTIONS[seam])
    assert len(copy.touches) <= LIMITS[seam], copy.touches


@pytest.mark.timeout(180)
def test_verb(copy: Copy, tmp_path: Path) -> None:
    change(copy, "a verb")
    found = copy.run(VERB, temporal_binary(), f"file://{tmp_path}/store")
    assert found["refused"] == "unknown key; valid keys: reason"
    assert found["asked"] == 202 and found["documented"] == "Mark Run"
    assert "mark: here" in found["notes"]
    assert found["events"] == ["mark was requested: here", "mark was requested: there"]
    assert "Leave a mark" in found["help"] and "--reason" in found["help"]
    assert '"name": "mark", "label": "Mark"' in found["contract"]


# -- what the dashboard draws ---------------------------------------------------------------


@asynccontextmanager
async def drawn(copy: Copy, metrics: dict[str, float]) -> AsyncIterator[Any]:
    """The page of a run in Chromium, by the files of the copy. No server is needed for it."""
    module = copy.run(CONTRACT)
    static = copy.root / "api" / "dashboard" / "static"
    rows = [{"step": step, "time": 0.0, "metrics": metrics} for step in (1, 2, 3)]
    run = {"id": "r", "status": "succeeded", "step": 3, "max_steps": 3, "metadata": {}, "eval": {}}
    run |= {"links": {}, "restarts": {}, "policy_version": 3, "reward": 0.5}
    health = {"verdict": "ended", "message": "succeeded", "findings": []}
    answers = {
        "/v1/runs/r": run,
        "/v1/runs/r/health": health,
        "/v1/runs/r/metrics": {"data": rows},
    }

    async def answer(route: Any) -> None:
        path = route.request.url.removeprefix(SITE).partition("?")[0]
        if path.startswith("/v1"):
            empty: dict[str, Any] = {"data": []}
            found = {"damaged": [], "has_more": False, **answers.get(path, empty)}
            await route.fulfill(json=found)
        elif path.endswith("/contract.js"):
            await route.fulfill(body=module, content_type="text/javascript")
        else:
            file = static / (path.removeprefix("/dashboard/") or "index.html")
            await route.fulfill(path=file, content_type=guess_type(file)[0])

    async with browsing() as browser, reading(browser, SITE) as reader:
        await reader.page.route(f"{SITE}/**", answer)
        await reader.page.goto(f"{SITE}/dashboard/#/runs/r")
        yield reader.page
        assert reader.complaints == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seam", "panel", "metric"),
    [("a panel", "turns", "num_turns/all/mean"), ("a metric", "spread", "spread/all/mean")],
)
async def test_panel_and_metric(copy: Copy, seam: str, panel: str, metric: str) -> None:
    change(copy, seam)
    metrics = copy.run(METRIC)
    if seam == "a metric":
        assert metrics[metric] == 0.5 and metrics["spread/e/max"] == 1.0
    async with drawn(copy, metrics) as page:
        legend = page.locator(f"#panel-{panel} .legend")
        await expect(legend).to_contain_text(re.compile(rf"all\s*{metrics[metric]:g}"))
