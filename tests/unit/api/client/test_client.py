"""The Python client against a listening API: results, lost requests, refusals."""

import asyncio
import json
import os
import re
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.activities.contracts.controls import CONTROLS
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.client import Ratchet, Refused, Unreachable
from ratchet.api.client.client import Runs
from ratchet.api.client.transport import DEFAULT_ADDRESS, default_address
from ratchet.api.schemas import keys as api_keys
from ratchet.configs.load import load, validate
from tests import ROOT
from tests.unit.api.client.support import (
    breaking,
    on_server,
    serving,
)
from tests.unit.api.conftest import (
    Served,
    config,
    connection,
    listening,
    put_checkpoint,
)
from tests.unit.api.leaving import put_whole_checkpoint
from tests.unit.api.routes.test_rollouts import batch, group
from tests.unit.api.store.test_curves import damage


def test_the_address_is_the_one_named_or_the_stack_s(tmp_path: Path) -> None:
    home = {"RATCHET_HOME": str(tmp_path)}
    assert default_address({**home, "RATCHET_API": "http://far:1"}) == "http://far:1"
    assert default_address(home) == DEFAULT_ADDRESS
    record: dict[str, Any] = {"ports": {}, "processes": {}}
    (tmp_path / "stack.json").write_text(json.dumps(record))
    assert default_address(home) == DEFAULT_ADDRESS
    record |= {"ports": {"api": 9123}, "processes": {"api": {"pid": 1, "started": 0.0}}}
    (tmp_path / "stack.json").write_text(json.dumps(record))
    assert default_address(home) == "http://127.0.0.1:9123"
    record["processes"] = {}
    (tmp_path / "stack.json").write_text(json.dumps(record))
    assert default_address(home) == "http://127.0.0.1:9123", "another stack may have 8080"


def test_what_cannot_work_is_said_at_once() -> None:
    for address in ("localhost:8080", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="not an API address"):
            Ratchet(address)
    with pytest.raises(ValueError, match="RATCHET_API_KEY"):
        Ratchet("http://x", "rk_ä")
    with (
        Ratchet("http://127.0.0.1:1", max_retries=0) as client,
        pytest.raises(Unreachable, match=r"127\.0\.0\.1:1.*refused"),
    ):
        client.runs.retrieve("x")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "examples").glob("*.toml")), ids=lambda p: p.stem
)
def test_a_config_is_sent_as_it_was_meant(path: Path) -> None:
    before = load(path, ["max_steps=77"])
    assert validate(before.model_dump(mode="json", exclude_unset=True)) == before


def put_gauges(store: ArtifactStore, run_id: str) -> None:
    """Five samples each of two rollout workers and a trainer, at the same moments."""
    for source in ("rollout-host-a-71", "rollout-host-b-72", "trainer-host-b-73"):
        series = Series(run_id, source)
        for i in range(5):
            chunk = series.add({"time": 100.25 + 10 * i, "worker_inflight": i})
        chunk.write(store)


# -- requests -------------------------------------------------------------------------------------


@on_server
async def test_a_run_is_created_looked_at_steered_and_ended(served: Served, tmp_path: Path) -> None:
    def begin() -> str:
        plan = client.runs.plan(config("client"))
        assert plan.plan.steps == 5 and plan.config["train"]["batch_size"] == 16
        run = client.runs.create(validate(config("client", metadata={"who": "client"})))
        assert run.status in ("queued", "running") and run.max_steps == 5
        return run.id

    def steer(run_id: str) -> None:
        assert client.runs.retrieve(run_id).waiting_for is not None
        assert client.runs.eval(run_id, envs=["guess-hard"]).id == run_id
        client.runs.checkpoint(run_id, reason="lunch")
        assert client.runs.pause(run_id, mode="cancel", reason="lunch").status == "pausing"
        assert client.runs.resume(run_id).status in ("starting", "running")
        changed = client.runs.update(run_id, {"metadata": {"note": "x", "who": None}})
        assert changed.metadata == {"note": "x"}
        found = client.runs.config(run_id).config
        assert found["metadata"] == {"note": "x"} and found["max_steps"] == 5
        with pytest.raises(Refused) as refused:
            client.runs.eval(run_id, envs=["guess-hard", "nope"])
        assert refused.value.status == 422 and refused.value.problem.errors is not None
        assert [e.pointer for e in refused.value.problem.errors] == ["/envs/1"]
        fork = client.runs.fork(run_id, step=2, name="forked", config={"max_steps": 9})
        assert fork.id != run_id and (fork.max_steps, fork.name) == (9, "forked")
        with pytest.raises(Refused, match="step 4") as no_such:
            client.runs.fork(run_id, step=4)
        assert no_such.value.problem.type.endswith("no-checkpoint")
        assert [c.step for c in client.runs.checkpoints(run_id)] == [2]
        assert client.runs.stop(run_id, reason="seen enough").status == "stopping"
        client.runs.cancel(fork.id)

    async with serving(served) as address:
        with Ratchet(address) as client:
            run_id = await asyncio.to_thread(begin)
            await served.until(run_id, step=3)
            put_checkpoint(served.store, run_id, 2, tmp_path)
            await asyncio.to_thread(steer, run_id)
            run = await served.until(run_id, status="succeeded")
            assert (await asyncio.to_thread(client.runs.retrieve, run_id)).end_reason == "stopped"
            assert run["id"] == run_id
            with pytest.raises(Refused) as late:
                await asyncio.to_thread(client.runs.pause, run_id)
            assert late.value.problem.run_status == "succeeded"
            with pytest.raises(Refused, match="no run 'X y'"):
                await asyncio.to_thread(client.runs.retrieve, "X y")


@on_server
async def test_pages_go_through_everything_once(served: Served) -> None:
    made = [(await served.start("paged", metadata={"page": "yes"}))["id"] for _ in range(5)]
    run_id = made[0]
    for step in range(1, 8):
        value = {"step": step, "time": 0.0, "metrics": {"reward/all/mean": step / 10, "loss": 1.0}}
        served.store.put_json(keys.step_record(run_id, step), value)
    for number in range(4):
        group(served, run_id, f"train/{number}", "easy", [0.0, 0.5, None])
        batch(served, run_id, number + 1, f"train/{number}")
    put_gauges(served.store, run_id)
    await served.until(run_id, step=3)

    def look() -> None:
        while len([*client.runs.list(metadata={"page": "yes"}, limit=2)]) < 5:
            pass
        first = client.runs.list(metadata={"page": "yes"}, limit=2)
        assert len(first.data) == 2 and first.has_more
        assert [run.id for run in first] == made[::-1]
        assert first.next_page().data[0].id == made[2]
        assert [row.step for row in client.runs.metrics(run_id, limit=3)] == [*range(1, 8)]
        (row,) = client.runs.metrics(run_id, names=["loss"], after_step=5, until_step=6)
        assert row.metrics == {"loss": 1.0}
        assert len(client.runs.metrics_csv(run_id).splitlines()) == 8
        rollouts = [item.id for item in client.runs.rollouts(run_id, limit=5)]
        assert rollouts == [f"train:{g}:{i}" for g in (3, 2, 1, 0) for i in range(3)]
        (failed, *_) = client.runs.rollouts(run_id, errored=True, reward_max=0.1)
        assert failed.error is not None
        assert len(client.runs.rollout(run_id, "train:2:1").members) == 3
        last = client.runs.list_events(run_id, limit=1)
        assert last.has_more and len({e.id for e in last}) == len([*last])
        events = [*client.runs.list_events(run_id)]
        newest_first = [*client.runs.list_events(run_id, limit=2, order="desc")]
        assert newest_first == events[::-1] and len(events) > 2
        some = [*client.runs.list_events(run_id, limit=1, types=["run.step", "server"])]
        assert some == [e for e in events if e.type == "run.step"] and some
        lines = [*client.runs.logs(run_id, limit=2)]
        assert [line.id for line in lines] == [event.id for event in events]
        assert not client.runs.logs(run_id, level="error").data
        assert [b.step for b in client.runs.batches(run_id, limit=2)] == [1, 2, 3, 4]
        assert [b.step for b in client.runs.batches(run_id, after_step=2)] == [3, 4]
        gauges = [(g.source, g.time) for g in client.runs.gauges(run_id, after=110.25, limit=3)]
        assert sorted(set(gauges)) == sorted(gauges) and len(gauges) == 6
        assert {moment for _, moment in gauges} == {120.25, 130.25, 140.25}
        (trainer,) = client.runs.gauges(run_id, role="trainer", after=130.25)
        everyone = [*client.runs.gauges(run_id, role="all", limit=4)]
        assert len(everyone) == 15 and trainer in everyone and trainer.role == "trainer"
        with pytest.raises(ValueError, match="last page"):
            client.runs.evals(run_id).next_page()

    async with serving(served) as address:
        with Ratchet(address) as client:
            await asyncio.to_thread(look)


def test_every_verb_has_a_method_with_the_fields_of_its_body() -> None:
    for verb in CONTROLS.values():
        _, run_id, *said = signature(getattr(Runs, verb.name)).parameters.values()
        assert run_id.name == "run_id"
        assert {each.name for each in said} == {*verb.body.model_fields}
        assert {each.kind for each in said} == {Parameter.KEYWORD_ONLY}
        assert not [each for each in said if each.default is Parameter.empty]


@on_server
async def test_a_change_is_sent_as_a_merge_patch() -> None:
    sent: list[dict[bytes, bytes]] = []

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent.append(dict(scope["headers"]))
            about = {"type": "urn:ratchet:problem:unknown-run", "title": "x", "status": 404}
            await JSONResponse({**about, "detail": "no run"}, 404)(scope, receive, send)

    def change(address: str) -> None:
        with Ratchet(address) as client, pytest.raises(Refused, match="no run"):
            client.runs.update("r", {"metadata": {"note": None}})

    async with listening(refuses) as http:
        await asyncio.to_thread(change, str(http.base_url))
    assert sent[0][b"content-type"] == b"application/merge-patch+json"


@on_server
async def test_every_get_that_is_documented_has_a_method(served: Served, tmp_path: Path) -> None:
    """With each of its parameters; a page that omits something damaged says so."""
    run_id = (await served.start("whole"))["id"]
    await served.until(run_id, step=3)
    for step in (1, 2):
        value = {"step": step, "time": 0.0, "metrics": {"loss": 1.0}}
        served.store.put_json(keys.step_record(run_id, step), value)
        group(served, run_id, f"train/{step}", "easy", [0.5])
    damage(served.store, keys.step_record(run_id, 1), "content")
    damage(served.store, keys.group(run_id, "train/1"), "content")
    put_whole_checkpoint(served.store, run_id, 2)
    app = create_app(served.settings, connection(served.env))
    asked: list[str] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked.append(f"{scope['path']}?{scope['query_string'].decode()}")
        await app(scope, receive, send)

    def look(address: str) -> None:
        with Ratchet(address) as client:
            runs = client.runs
            runs.list(after=None, status="running", metadata={"owner": "ana"})
            runs.list(after=run_id)
            runs.list(archived=True)
            assert runs.retrieve(run_id).id == run_id
            (row,) = runs.metrics(run_id, names=["loss"], until_step=9, points=9)
            assert row.step == 2 and runs.metrics(run_id).damaged == [1]
            assert [row.step for row in runs.metrics(run_id, after="1")] == [2]
            assert runs.metrics_csv(run_id).splitlines()[0] == "step,time,loss"
            sides = {"step": 0, "to_step": 0, "env": "easy", "k": 1}
            with pytest.raises(Refused, match="eval"):
                runs.compare_evals(run_id, run_id, **sides)
            assert not runs.evals(run_id).data and not runs.batches(run_id, after="0").data
            assert runs.health(run_id).run_id == run_id
            assert not runs.gauges(run_id, role="trainer").data
            first = runs.list_events(run_id, limit=1, types=["run"]).data[0]
            assert runs.list_events(run_id, after=first.id).data[0].id != first.id
            assert runs.logs(run_id, after=first.id).data
            with pytest.raises(Refused, match="a worker of role orchestrator writes it"):
                runs.logs(run_id, source="orchestrator")
            some: dict[str, Any] = {"env": "easy", "kind": "train", "errored": False}
            page = runs.rollouts(run_id, reward_min=0.0, reward_max=1.0, **some)
            assert [item.id for item in page] == ["train:2:0"] and page.damaged == ["train/1"]
            assert not runs.rollouts(run_id, step=9, group="train/9", after="train:2:0").data
            assert runs.rollout(run_id, "train:2:0").reward == 0.5
            assert runs.checkpoints(run_id, verify=True).data[0].sound
            runs.export_model(run_id, tmp_path / "mine", step=2, merge=True)
            assert (tmp_path / "mine" / "README.md").is_file()
            with pytest.raises(Refused, match="no result of its eval"):
                runs.model(run_id, best="reverse-text", merge=True)
            assert runs.config(run_id, revision=0).config["name"] == "whole"
            assert 'name = "whole"' in runs.config_toml(run_id)
            assert not [engine for engine in client.engines() if engine.run_id == run_id]
            assert not client.services().data
            assert "orchestrator" in {worker.role for worker in client.workers()}
            assert client.health().status == client.readiness().status == "ok"
            assert "ratchet_temporal_up 1.0" in client.prometheus()

    async with listening(noting) as http:
        await asyncio.to_thread(look, str(http.base_url))
    for path, verbs in app.openapi()["paths"].items():
        if "get" not in verbs:
            continue
        place = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        queries = [urlsplit(one).query for one in asked if place.fullmatch(urlsplit(one).path)]
        assert queries, f"no method asks for {path}"
        sent = {name.partition("[")[0] for query in queries for name in parse_qs(query)}
        reported = verbs["get"].get("parameters", [])
        assert sent == {one["name"] for one in reported if one["in"] == "query"}, path


@on_server
async def test_a_page_whose_items_were_deleted_meanwhile_is_requested_again() -> None:
    """Retention deletes batches between the listing of a page and the look at its items."""
    kept = {"step": 7, "attempt": "x", "created_at": None, "size": 1, "sha256": "", "path": "p"}
    pages = [
        {"object": "list", "data": [], "has_more": True},
        {"object": "list", "data": [kept], "has_more": False},
    ]
    asked: list[bytes] = []

    async def deleting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked.append(scope["query_string"])
            await JSONResponse(pages.pop(0))(scope, receive, send)

    async with listening(deleting) as http:
        with Ratchet(str(http.base_url)) as client:
            found = await asyncio.to_thread(lambda: [*client.runs.batches("x", after_step=4)])
    assert [item.step for item in found] == [7]
    assert asked[0] == asked[1] and b"after_step=4" in asked[0]


@on_server
async def test_a_create_whose_answer_was_lost_is_one_run(served: Served) -> None:
    async with serving(served) as address, breaking(address, 0, 40) as way:
        with Ratchet(way.address) as client:
            body = config("lost", metadata={"lost": "yes"})
            run = await asyncio.to_thread(client.runs.create, body)
            assert way.broken == 2
            again = await asyncio.to_thread(
                lambda: client.runs.create(body, idempotency_key="mine")
            )
            twice = await asyncio.to_thread(
                lambda: client.runs.create(body, idempotency_key="mine")
            )
    assert twice.id == again.id != run.id
    page: dict[str, Any] = {"data": []}
    while len(page["data"]) < 2:
        page = (await served.http.get("/v1/runs?metadata[lost]=yes&limit=100")).json()
    assert {item["id"] for item in page["data"]} == {run.id, again.id}


@on_server
async def test_keys_are_sent_and_answers_of_others_are_known(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = api_keys.add(tmp_path / "keys.json", "ci", ["read"], 6000)
    reported = api_keys.load_keys(None, tmp_path / "keys.json")
    guarded = create_app(replace(served.settings, keys=reported), connection(served.env))

    def look(address: str) -> None:
        with Ratchet(address) as client, pytest.raises(Refused, match="key is required"):
            client.runs.list()
        monkeypatch.setenv("RATCHET_API_KEY", f"{secret}\n")
        with Ratchet(address) as client:
            client.runs.list()
            with pytest.raises(Refused, match="does not have the scope 'write'"):
                client.runs.stop("x")

    async with listening(guarded) as http:
        await asyncio.to_thread(look, str(http.base_url))
    assert os.environ["RATCHET_API_KEY"].strip() == secret

    def stranger(status: int) -> ASGIApp:
        return PlainTextResponse("<html>hello", status)

    async with listening(stranger(200)) as http:
        client = Ratchet(str(http.base_url))
        with pytest.raises(Unreachable, match="not Ratchet's API"):
            await asyncio.to_thread(client.runs.retrieve, "x")
    async with listening(stranger(404)) as http:
        client = Ratchet(str(http.base_url))
        with pytest.raises(Refused, match="check the address"):
            await asyncio.to_thread(client.runs.retrieve, "x")
