"""A store that cannot be reached, and damaged artifacts: how each route reports them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.configs.upgrades import CONFIG
from tests.unit.api.conftest import Served, asgi, config, connection
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_rollouts import batch, group, ids
from tests.unit.api.store.test_curves import damage, record

READS = (
    "metrics",
    "metrics?format=csv",
    "evals",
    "gauges",
    "rollouts",
    "rollouts/train:1:0",
    "checkpoints",
    "batches",
    "config",
)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_store_that_is_away_is_reported_and_the_run_is_shown(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = (await served.start("away"))["id"]
    await served.until(run, status="running")
    # Whatever is asked for below a file is neither there nor missing.
    (tmp_path / "store").write_text("")
    settings = replace(served.settings, store_url=f"file://{tmp_path}/store")
    async with asgi(create_app(settings, connection(served.env))) as http:
        shown = await http.get(f"/v1/runs/{run}")
        assert shown.status_code == 200 and shown.json()["progress"] is None
        asked = [await http.get(f"/v1/runs/{run}/{path}") for path in READS]
        asked.append(await http.get("/v1/workers"))
        asked.append(await http.post("/v1/runs", json=config("new")))
        asked.append(await http.post(f"/v1/runs/{run}/eval"))
    for answer in asked:
        result = problem(answer, 503, "store-unavailable")
        assert answer.headers["retry-after"] == "5"
        assert str(tmp_path) not in answer.text and "RATCHET_STORE" in result["detail"]
    assert str(tmp_path) in caplog.text and caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize("what", ["content", "marker"])
@pytest.mark.asyncio(loop_scope="session")
async def test_a_damaged_lineage_is_named(served: Served, tmp_path: Path, what: str) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    store.put_json(keys.config("y"), {})
    store.put_json(keys.lineage("y"), {"source": "x", "step": 3, "kind": "fork"})
    damage(store, keys.lineage("y"), what)
    settings = replace(served.settings, store_url=store.url)
    async with asgi(create_app(settings, connection(served.env))) as http:
        for path in ("metrics", "evals", "rollouts?step=1", "checkpoints", "batches"):
            answer = await http.get(f"/v1/runs/y/{path}")
            result = problem(answer, 500, "damaged-artifact")
            assert (
                "runs/y/lineage.json" in result["detail"] and "restore it from" in result["detail"]
            )
            assert str(tmp_path) not in answer.text and "retry-after" not in answer.headers


@pytest.mark.asyncio(loop_scope="session")
async def test_lists_go_on_past_what_is_damaged(served: Served) -> None:
    run = (await served.start("battered"))["id"]
    for name in ("train/1", "train/2", "train/3"):
        group(served, run, name, "e", [0.0, 1.0])
    for step in (1, 2):
        batch(served, run, step, f"train/{step}")
        value = {"env": "e", "step": step, "reward_mean": 0.5}
        served.store.put_json(keys.eval_record(run, f"{step}-1/e"), value)
        record(served.store, run, step)
    damage(served.store, keys.group(run, "train/2"), "content")
    damage(served.store, keys.batch(run, 1), "marker")
    damage(served.store, keys.eval_record(run, "2-1/e"), "content")
    url = f"/v1/runs/{run}"
    page = (await served.http.get(f"{url}/rollouts")).json()
    assert page["damaged"] == ["train/2"] and page["has_more"] is False
    wanted = [f"train:{number}:{index}" for number in (3, 1) for index in (0, 1)]
    assert [item["id"] for item in page["data"]] == wanted
    assert await ids(served, run) == wanted
    problem(await served.http.get(f"{url}/rollouts/train:2:0"), 500, "damaged-artifact")
    first, second = (await served.http.get(f"{url}/batches")).json()["data"]
    assert "marker" in first["problem"] and served.store.root not in first["problem"]
    assert (first["step"], second["step"], second["problem"]) == (1, 2, None)
    problem(await served.http.get(f"{url}/rollouts?step=1"), 500, "damaged-artifact")
    sound, bad = (await served.http.get(f"{url}/evals")).json()["data"]
    assert (sound["reward_mean"], sound["problem"]) == (0.5, None)
    assert (bad["step"], bad["env"]) == (2, "e") and "does not match" in bad["problem"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_config_that_is_damaged_hides_nothing_else(served: Served) -> None:
    run = (await served.start("unread"))["id"]
    record(served.store, run, 1)
    damage(served.store, keys.config(run), "content")
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        page = (await http.get(f"/v1/runs/{run}/metrics")).json()
        assert [row["step"] for row in page["data"]] == [1]
        problem(await http.get(f"/v1/runs/{run}/config"), 500, "damaged-artifact")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_config_of_a_newer_build_is_reported(served: Served) -> None:
    run = (await served.start("later"))["id"]
    stored = configs.document(served.store, run)
    assert stored["schema"] == CONFIG.current
    newer = CONFIG.current + 1
    document = {**stored, "schema": newer, "of_a_newer_build": True}
    served.store.put_json(keys.config(run, 1), document)
    url = f"/v1/runs/{run}/config"
    result = problem(await served.http.get(f"{url}?revision=1"), 503, "newer-schema")
    assert (
        f"has schema {newer}" in result["detail"]
        and "Start this API with the newer build" in result["detail"]
    )
    shown = (await served.http.get(f"{url}?revision=0")).json()["config"]
    # What is shown can be sent again.
    assert {**shown, "schema": CONFIG.current} == stored and "schema" not in shown
    assert "schema" not in (await served.http.get(f"{url}?revision=0&format=toml")).text


def test_every_route_documents_them(served: Served) -> None:
    paths = create_app(served.settings, connection(served.env)).openapi()["paths"]
    operations = [
        (verb, path, result) for path, verbs in paths.items() for verb, result in verbs.items()
    ]
    versioned = [result["responses"] for _, path, result in operations if path.startswith("/v1/")]
    assert versioned
    for responses in versioned:
        assert {"500", "503"} <= responses.keys()
        assert "application/problem+json" in responses["503"]["content"]
