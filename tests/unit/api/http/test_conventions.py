"""What holds of every route: HEAD, `Allow`, known query parameters, one cursor, a description."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from tests.fuzzing import ODD_NAMES, ODD_VALUES
from tests.unit.api.conftest import Served, connection, listening
from tests.unit.api.leaving import app_of, leave
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_runs import signals

on_server = pytest.mark.asyncio(loop_scope="session")
LISTS = ("evals", "checkpoints", "metrics", "batches", "gauges", "rollouts")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """An API whose Temporal is away, of a store with one run."""
    store = ArtifactStore(f"file://{tmp_path_factory.mktemp('store')}")
    leave(store, "left", steps=5, checkpoints=[2])
    for step in range(1, 5):
        store.put_json(keys.batch("left", step), {"step": step})
    return app_of(store)


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, verbs in document["paths"].items():
        for method, operation in verbs.items():
            yield method, path, operation


def test_head_is_get_without_a_body(api: TestClient, document: dict[str, Any]) -> None:
    there = {"run_id": "left", "rid": "train:0:0", "name": "model.safetensors"}
    for method, path, _ in operations(document):
        if method != "get":
            continue
        url = path.format(**there)
        got, head = api.get(url), api.head(url)
        assert head.status_code == got.status_code, url
        assert head.content == b"", url
        own = {"x-request-id"}
        assert head.headers.keys() == got.headers.keys(), url
        for name in got.headers.keys() - own:
            assert head.headers[name] == got.headers[name] or path == "/metrics", (url, name)
    assert api.head("/dashboard/").status_code == api.head("/docs").status_code == 200
    assert api.head("/v1/nope").status_code == 404


@on_server
async def test_head_of_a_stream_ends(served: Served) -> None:
    run_id = (await served.start("headed"))["id"]
    async with listening(create_app(served.settings, connection(served.env))) as http:
        answer = await asyncio.wait_for(
            http.head(f"/v1/runs/{run_id}/events", headers={"accept": "text/event-stream"}), 30
        )
        assert answer.status_code == 200 and answer.content == b""
        assert answer.headers["content-type"].startswith("text/event-stream")
        # The connection is as good as new.
        assert (await http.get(f"/v1/runs/{run_id}")).status_code == 200


def test_allow_names_all_methods_of_a_path(api: TestClient, document: dict[str, Any]) -> None:
    offered = {path: {*map(str.upper, verbs)} for path, verbs in document["paths"].items()}
    assert {"GET", "POST"} <= offered["/v1/runs"] and {"GET", "PATCH"} <= offered[
        "/v1/runs/{run_id}"
    ]
    for path in ("/openapi.json", "/dashboard/", "/docs"):
        offered[path] = {"GET"}
    for path, methods in offered.items():
        url = path.format(run_id="left", rid="train:0:0", name="model.safetensors")
        allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        for method in {"GET", "POST", "PUT", "OPTIONS"} - methods:
            answer = api.request(method, url)
            assert answer.headers["allow"] == allowed, (method, path)
            problem(answer, 405, "method-not-allowed")


def test_unknown_query_parameters_are_refused(api: TestClient, document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        url = path.format(run_id="left", rid="train:0:0", name="model.safetensors")
        body = problem(api.request(method, f"{url}?nope=1"), 422, "invalid-request")
        (error,) = body["errors"]
        assert error["key"] == "query.nope" and error["value"] == "1", (method, path)
        for name in (p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"):
            assert name in error["message"], (method, path)
    body = problem(api.get("/v1/runs/left/metrics?afterstep=3&x=1"), 422, "invalid-request")
    assert "did you mean 'after_step'?" in body["errors"][0]["message"]
    assert len(body["errors"]) == 2
    for query in ("metadata=ana", "metadata[owner=ana", "meta[owner]=ana"):
        problem(api.get(f"/v1/runs?{query}"), 422, "invalid-request")
    # What is missing is Temporal.
    assert api.get("/v1/runs?metadata[owner]=ana&metadata[a]b]=c").status_code == 503


def test_every_list_is_paged_alike(api: TestClient, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for method, path, operation in operations(document):
        reply = operation["responses"].get("200", {}).get("content", {}).get("application/json")
        listed = schemas[reply["schema"]["$ref"].rpartition("/")[2]] if reply else {}
        if method != "get" or "has_more" not in listed.get("properties", ()):
            continue
        assert {"object", "data", "has_more", "next_after"} <= listed["properties"].keys(), path
        query = {p["name"]: p["schema"] for p in operation.get("parameters", ())}
        if "limit" in query:
            assert "string" in json.dumps(query["after"]), path
    for name in ("metrics", "batches"):
        seen, after = [], ""
        while after is not None:
            page = api.get(f"/v1/runs/left/{name}?limit=2{after and '&after='}{after}").json()
            seen += [item["step"] for item in page["data"]]
            after = page["next_after"]
            assert page["has_more"] is (after is not None)
        assert seen == ([1, 2, 3, 4, 5] if name == "metrics" else [1, 2, 3, 4])
        assert api.get(f"/v1/runs/left/{name}?after=2&after_step=3").json()["data"][0]["step"] == 4
    for name in LISTS:
        assert "next_after" in api.get(f"/v1/runs/left/{name}").json()
    for name in ("metrics", "batches", "gauges"):
        problem(api.get(f"/v1/runs/left/{name}?after=x"), 404, "unknown-cursor")


def test_everything_is_described_and_has_an_example(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        assert schema.get("description") or schema.get("type") == "string", name
        for key, field in schema.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key}"
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        assert operation["summary"] and operation["description"], where
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (where, parameter["name"])
        assert "422" in operation["responses"], where
        for status, reply in operation["responses"].items():
            assert "x-request-id" in reply["headers"], (where, status)
            assert ("Location" in reply["headers"]) is (status == "201"), (where, status)
            assert ("Retry-After" in reply["headers"]) is (status in ("409", "429", "503")), where
            assert ("requestBody" in operation) is ("408" in operation["responses"]), where
            for media, content in reply.get("content", {}).items():
                if media in ("application/problem+json", "application/octet-stream"):
                    continue
                whole = {**content["schema"], "components": document["components"]}
                validator = jsonschema.Draft202012Validator(whole)
                errors = [error.message for error in validator.iter_errors(content["example"])]
                assert not errors, (where, media, errors)


def test_operation_ids_are_names_that_stay(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    assert {"create_run", "list_runs", "get_run", "change_run", "pause_run", "fork_run"} <= {*ids}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in ids), ids


@on_server
async def test_a_change_with_a_key_has_one_effect_and_one_reply(served: Served) -> None:
    run_id = (await served.start("patched"))["id"]
    await served.until(run_id, status="running")
    url, key = f"/v1/runs/{run_id}", {"Idempotency-Key": "a change"}
    patch = {"metadata": {"note": "a"}}
    problem(await served.http.patch(url, json={"nope": 1}, headers=key), 422, "invalid-request")
    answers = await asyncio.gather(
        *(served.http.patch(url, json=patch, headers=key) for _ in range(3))
    )
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert all(answer.json() == answers[0].json() for answer in answers)
    history = await served.env.client.get_workflow_handle(run_id).fetch_history()
    accepted = "workflow_execution_update_accepted_event_attributes"
    assert sum(event.HasField(accepted) for event in history.events) == 1
    other = await served.http.patch(url, json={"metadata": {"note": "b"}}, headers=key)
    problem(other, 409, "idempotency-conflict")
    later = await served.http.patch(url, json={"metadata": {"note": "c"}})
    assert later.json()["metadata"]["note"] == "c"
    again = await served.http.patch(url, json=patch, headers=key)
    assert again.json() == answers[0].json(), "it is answered as it was"
    assert (await served.until(run_id, status="running"))["metadata"]["note"] == "c"


@on_server
async def test_a_change_may_be_a_merge_patch(served: Served) -> None:
    run_id = (await served.start("merged"))["id"]
    await served.until(run_id, status="running")
    url, media = f"/v1/runs/{run_id}", "application/merge-patch+json"

    async def patched(media: str) -> httpx.Response:
        body = b'{"metadata": {"owner": null, "note": "x"}}'
        return await served.http.patch(url, content=body, headers={"content-type": media})

    answer = await patched(f"{media}; charset=utf-8")
    assert answer.status_code == 200 and answer.json()["metadata"] == {"note": "x"}
    refused = problem(await patched("application/toml"), 415, "unsupported-media-type")
    assert media in refused["detail"]
    verb = await served.http.post(f"{url}/eval", content=b"{}", headers={"content-type": media})
    problem(verb, 415, "unsupported-media-type")
    assert await signals(served, run_id, 0) == []


def test_malformed_headers_are_no_5xx(api: TestClient, document: dict[str, Any]) -> None:
    for method, path, _ in operations(document):
        url = path.format(run_id="left", rid="train:0:0", name="model.safetensors")
        plain = api.request(method, url, content=b"{}").status_code
        for name, value in zip(ODD_NAMES * 2, ODD_VALUES, strict=False):
            headers = {name: value.encode("latin-1")}
            status = api.request(method, url, content=b"{}", headers=headers).status_code
            # What Temporal is needed for is a 503 here.
            assert status < 500 or status == plain == 503, (method, path, name, value)
