"""The page at /docs: what comes first, what it can be filtered by, and its curl calls."""

import asyncio
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.http.curl import ADDRESS
from tests import ROOT
from tests.unit.api.client.support import on_server, serving
from tests.unit.api.conftest import Served
from tests.unit.api.http.test_openapi import leave_everything
from tests.unit.api.leaving import app_of

CALL = re.compile(r"```sh\n(curl .*)\n```\Z", re.DOTALL)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(app_of(ArtifactStore(f"file://{tmp_path}")))


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_operations_come_as_they_are_used(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    tags = [tag["name"] for tag in document["tags"]]
    assert tags.index("runs") < tags.index("events") < tags.index("control")
    # The page shows the operations of a tag in the order of the document.
    order = sorted(operations(document).items(), key=lambda item: tags.index(item[1]["tags"][0]))
    names = [name for name, _ in order]
    assert names[0] == "POST /v1/runs", "create"
    assert names.index("GET /v1/runs/{run_id}/events") < names.index("POST /v1/runs/{run_id}/pause")
    assert {operation["tags"][0] for _, operation in order} <= set(tags)


def test_the_page_filters_and_folds(client: TestClient) -> None:
    page = client.get("/docs").text
    for setting in ('"filter": true', '"docExpansion": "list"', '"defaultModelsExpandDepth": 0'):
        assert setting in page


@on_server
async def test_every_operation_has_a_curl_call_that_works(served: Served) -> None:
    run_id = (await served.start("curled"))["id"]
    await served.until(run_id, status="running")
    rollout = leave_everything(served, run_id)
    document = (await served.http.get("/openapi.json")).json()
    # Those who end or delete the run come last.
    ends = re.compile("stop|cancel|DELETE")
    listed = sorted(operations(document).items(), key=lambda item: bool(ends.search(item[0])))
    async with serving(served) as address:
        for name, operation in listed:
            match = CALL.search(operation["description"])
            assert match, name
            words = [
                word.replace(ADDRESS, address)
                .replace("RUN", run_id)
                .replace("ROLLOUT", rollout)
                .replace("config.json", "model.safetensors")
                for word in shlex.split(match[1])
            ]
            done = await asyncio.to_thread(
                subprocess.run,
                [*words, "-o", "/dev/null", "-w", "%{http_code}"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
            )
            refused = "409" if name.startswith(("POST", "PATCH", "DELETE")) else ""
            assert done.stdout[0] == "2" or done.stdout == refused, (name, words, done)
