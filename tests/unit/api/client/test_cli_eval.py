"""`ratchet eval` and `ratchet runs compare`, and the client's methods for both."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.client import Ratchet
from ratchet.api.schemas.problems import ApiProblem
from ratchet.configs.load import ConfigError
from tests.unit.api.client.support import on_server, serving
from tests.unit.api.client.test_cli import config_file, ratchet
from tests.unit.api.conftest import Served, config, listening
from tests.unit.api.leaving import app_of, leave
from tests.unit.api.routes.test_evals import ALONE, BASE, ENV, NEW, OFTEN, SELDOM, put


async def names(served: Served) -> set[str]:
    """The names of the newest runs."""
    page = (await served.http.get("/v1/runs?limit=100")).json()
    return {run["name"] for run in page["data"]}


@on_server
async def test_a_run_for_each_model_one_after_another(served: Served, tmp_path: Path) -> None:
    async with serving(served) as address, config_file(tmp_path, "evaluated") as path:
        models = ["--model", "ratchet/tiny", "--model", "reverse-1a2b3c@40"]
        done = await ratchet(address, "eval", path, *models, "--env", "reverse-text", "--json")
    assert done.status == 0, done.err
    first, second = done.json["data"]
    assert [run["kind"] for run in (first, second)] == ["eval", "eval"]
    assert [run["max_steps"] for run in (first, second)] == [0, 0]
    assert second["lineage"] == {"source": "reverse-1a2b3c", "step": 40, "kind": "model"}
    stored = (await served.http.get(f"/v1/runs/{second['id']}/config")).json()["config"]
    assert stored["after"] == first["id"] and stored["model"]["name"] == "run:reverse-1a2b3c@40"
    assert stored["train"]["env"] == [] and len(stored["eval"]["env"]) == 1
    execution = await served.env.client.get_workflow_handle(first["id"]).describe()
    assert await execution.static_summary() == "reverse-text · ratchet/tiny · evaluation"
    assert (await execution.static_details() or "").startswith("**evaluated** evaluates `ratchet/t")


@on_server
async def test_it_says_where_the_runs_are_and_how_they_are_compared(
    served: Served, tmp_path: Path
) -> None:
    async with serving(served) as address, config_file(tmp_path, "told") as path:
        models = ["--model", "ratchet/tiny", "--model", "owner/model"]
        done = await ratchet(address, "eval", path, "eval.group_size=4", *models)
        assert done.status == 0, done.err
        first, second = (line.split() for line in done.out.splitlines())
        assert first[1:3] == ["evaluates", "ratchet/tiny:"] and "/dashboard/#/runs/" in first[-1]
        assert done.err.startswith(
            "workers check the config, which takes some 10 to 20 s, longer on a busy machine …\n"
        )
        assert f"ratchet runs compare {second[0]} {first[0]}" in done.err
        assert f"{address}/dashboard/#/compare?runs={first[0]},{second[0]}" in done.err
        listed = await ratchet(address, "runs", "list")
        line = next(line for line in listed.out.splitlines() if line.startswith(first[0]))
        assert " eval " in line, "it has no steps"


@on_server
async def test_the_same_key_is_the_same_runs(served: Served, tmp_path: Path) -> None:
    async with serving(served) as address, config_file(tmp_path, "keyed") as path:
        words = [
            "eval",
            path,
            "--model",
            "a/b",
            "--model",
            "c/d",
            "--idempotency-key",
            "k",
            "--json",
        ]
        once, again = [await ratchet(address, *words) for _ in range(2)]
    assert [run["id"] for run in once.json["data"]] == [run["id"] for run in again.json["data"]]


@on_server
async def test_nothing_starts_where_one_model_is_no_good(served: Served, tmp_path: Path) -> None:
    before = await names(served)
    async with serving(served) as address:
        async with config_file(tmp_path, "of-a-version") as path:
            refused = await ratchet(address, "eval", path, "--model", "a/b", "--model", "c/d")
            assert refused.status == 1 and "was removed" in refused.err
        async with config_file(tmp_path, "asked-wrongly") as path:
            for words, text in (
                (["--model", "a/b", "--model", "a/b"], "model: 'a/b' is named twice"),
                (["--env", "nothing"], "its eval envs: reverse-text, guess-hard"),
                (["after=nobody"], "there is no run 'nobody' to begin after"),
            ):
                done = await ratchet(address, "eval", path, *words)
                assert done.status == 1 and text in done.err, done.err
    # What the API starts is in the index at once.
    assert await names(served) == before


def full_after_one(app: ASGIApp) -> ASGIApp:
    """An API whose disk is full once it has started a run."""
    started = 0

    async def through(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal started
        at = (scope.get("method"), scope.get("path"), scope.get("query_string"))
        started += at == ("POST", "/v1/runs", b"")
        if started > 1:
            full = ApiProblem(507, "no-disk-space", "No disk space for a run", "It is full.")
            body = full.document.model_dump_json(exclude_none=True)
            answer = Response(body, 507, media_type="application/problem+json")
            return await answer(scope, receive, send)
        await app(scope, receive, send)

    return through


@on_server
async def test_a_failure_names_what_has_started(served: Served, tmp_path: Path) -> None:
    models = ["--model", "a/b", "--model", "c/d"]
    async with config_file(tmp_path, "half-started") as path:
        async with serving(served, full_after_one) as address:
            done = await ratchet(address, "eval", path, *models)
        (run,) = [
            run
            for run in (await served.http.get("/v1/runs?limit=100")).json()["data"]
            if run["name"] == "half-started"
        ]
        assert done.status == 1 and "refused (507): No disk space" in done.err
        assert f"already started: {run['id']}; `ratchet runs stop {run['id']}`" in done.err
        async with serving(served, full_after_one) as address:
            words = ["--idempotency-key", "half", "--json"]
            done = await ratchet(address, "eval", path, *models, *words)
        (note,) = json.loads(done.err)["notes"]
        assert "half-started-" in note and "the same idempotency key starts the others" in note


@on_server
async def test_all_are_followed_though_one_fails(served: Served, tmp_path: Path) -> None:
    """What there is gets shown, and the status says that it is not all."""
    models = ["--model", "a/b", "--model", "c/d"]
    async with serving(served) as address, config_file(tmp_path, "fails") as path:
        done = await ratchet(address, "eval", path, *models, "--env", "reverse-text", "--follow")
    assert done.status == 1, done.err
    for model in ("a/b", "c/d"):
        assert any(line.startswith(f"{model} (fails-") for line in done.out.splitlines()), done.out
    assert "has no result of this eval yet" in done.out


def test_the_client_refuses_before_it_asks() -> None:
    with Ratchet("http://127.0.0.1:1", max_retries=0) as client, pytest.raises(ConfigError):
        client.runs.evaluate(config(), models=["a/b", "a/b"])


@on_server
async def test_two_evals_are_compared(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    leave(store, BASE, model={"name": "ratchet/tiny"}, **ALONE)
    leave(store, NEW, model={"name": "run:reverse-9f8e7d@40"}, **ALONE)
    put(store, BASE, SELDOM)
    put(store, NEW, OFTEN)
    async with listening(app_of(store)) as http:
        address = str(http.base_url).rstrip("/")
        shown = await ratchet(address, "runs", "compare", NEW, BASE)
        assert shown.status == 0, shown.err
        assert f"{ENV} by avg@2" in shown.out and "7 wins, 0 losses, 3 ties" in shown.out
        assert f"/dashboard/#/runs/{NEW}/rollouts?kind=eval&r=eval:0-0:{ENV}:0:0" in shown.out
        assert "0.35 [" in shown.out and "paired over 10 examples" in shown.out
        assert f"({NEW}, step 0)" in shown.out and f"({BASE}, step 0)" in shown.out
        as_json: Any = (await ratchet(address, "runs", "compare", NEW, BASE, "--json")).json
        assert json.dumps(as_json["data"][0]["wins"]) == "7"
        refused = await ratchet(address, "runs", "compare", NEW, BASE, "--k", "3")
        assert refused.status == 1 and "pass@3 needs 3 rollouts" in refused.out
        evals = await ratchet(address, "runs", "evals", NEW)
        assert "avg@2 0.7 [" in evals.out and "pass@2 1" in evals.out
