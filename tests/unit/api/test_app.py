"""The app around its resources: documentation, health, start-up weight, a Temporal that is away."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from temporalio.envconfig import ClientConnectConfig

from ratchet.activities.contracts.names import Queues
from ratchet.api.app import create_app
from ratchet.api.settings import Settings
from tests import ROOT
from tests.unit.api.conftest import Served, config

HEAVY = ("torch", "vllm", "transformers", "verifiers", "pyarrow", "numpy")


@pytest.fixture
def away(tmp_path: Path) -> TestClient:
    """The app with a Temporal address where nobody listens."""
    settings = Settings(store_url=f"file://{tmp_path}", queues=Queues(), min_free_bytes=1)
    return TestClient(create_app(settings, ClientConnectConfig(target_host="127.0.0.1:1")))


def test_without_temporal_every_call_says_how_to_fix_it(away: TestClient, tmp_path: Path) -> None:
    answers = [
        away.get("/v1/runs"),
        away.get("/v1/runs/some-run"),
        away.post("/v1/runs", json=config()),
        away.post("/v1/runs/some-run/stop"),
        away.get("/readyz"),
    ]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"]
        detail = answer.json()["detail"]
        assert "127.0.0.1:1" in detail and "TEMPORAL_ADDRESS" in detail
        assert "connection refused" in detail
    assert not (tmp_path / "runs").exists(), "nothing was recorded"
    assert away.get("/healthz").json()["status"] == "ok"


def test_config_mistakes_are_found_without_temporal(away: TestClient) -> None:
    assert away.post("/v1/runs", json=config(max_steps=0)).status_code == 422
    dry = away.post("/v1/runs?dry_run=true", json=config())
    assert dry.status_code == 200 and "127.0.0.1:1" in dry.json()["unchecked"]


@pytest.mark.asyncio(loop_scope="session")
async def test_ready_when_temporal_and_store_are(served: Served) -> None:
    answer = await served.http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["checks"] == {"temporal": "ok", "store": "ok"}


def test_docs_work_without_a_network(away: TestClient) -> None:
    page = away.get("/docs").text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(addresses) == 3
    for address in addresses:
        assert address.startswith("/docs/assets/")
        assert away.get(address).status_code == 200
    assert away.get("/", follow_redirects=False).headers["location"] == "/dashboard/"


def test_openapi_documents_bodies_errors_and_examples(away: TestClient) -> None:
    document = away.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(schemas), "every reference resolves"
    create = document["paths"]["/v1/runs"]["post"]
    assert set(create["requestBody"]["content"]) == {"application/json", "application/toml"}
    assert "max_steps" in schemas["RunConfig"]["properties"]
    assert schemas["Run"]["examples"][0]["object"] == "run"
    for path, verbs in document["paths"].items():
        for operation in verbs.values():
            assert operation["description"], path
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert set(response["content"]) == {"application/problem+json"}, (path, status)


def test_documented_example_bodies_are_valid(away: TestClient) -> None:
    content = away.get("/openapi.json").json()["paths"]["/v1/runs"]["post"]["requestBody"][
        "content"
    ]
    for media, described in content.items():
        example = described["example"]
        body = example if isinstance(example, str) else json.dumps(example)
        answer = away.post("/v1/runs?dry_run=true", content=body, headers={"content-type": media})
        assert answer.status_code == 200, answer.text


def started(code: str) -> tuple[str, float]:
    """What a new Python prints for `code`, and the CPU seconds that it takes."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = os.times()
    user = after.children_user - before.children_user
    return done.stdout.strip(), user + after.children_system - before.children_system


@pytest.mark.alone
def test_the_api_imports_nothing_heavy_and_starts_quickly() -> None:
    """Compared with the libraries that it cannot do without, since machines differ."""
    code = (
        "import sys, ratchet.api.__main__; from ratchet.api.app import create_app; "
        "create_app().openapi();"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    ratios = []
    for _ in range(3):
        _, libraries = started("import fastapi, uvicorn, temporalio.client")
        heavy, ours = started(code)
        assert heavy == "[]"
        ratios.append(ours / libraries)
    assert min(ratios) < 3.5, ratios


def test_settings_refuse_what_they_cannot_use() -> None:
    assert Settings.from_env({"RATCHET_HOME": "/r"}).store_url == "file:///r/store"
    assert Settings.from_env({"RATCHET_QUEUE_PREFIX": "x"}).queues.env == "x-env"
    for text in ("soon", "0", "-3", "nan"):
        with pytest.raises(ValueError, match="RATCHET_PREFLIGHT_TIMEOUT_S"):
            Settings.from_env({"RATCHET_PREFLIGHT_TIMEOUT_S": text})
