"""POST /v1/runs: what is accepted, what is refused and how it is said."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import tomli_w
from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from ratchet.activities.contracts.checks import CheckProblem, CheckResult
from ratchet.activities.contracts.controls import CONTROLS
from ratchet.activities.contracts.names import Queues
from ratchet.activities.storage import configs
from ratchet.api.app import create_app
from ratchet.api.temporal.client import Temporal, details_of, summary_of
from ratchet.workflows.protocol.messages import PREFLIGHT, PreflightInput
from tests import ROOT
from tests.unit.api.conftest import Served, asgi, config, connection, eventually
from tests.unit.api.standin import ESTIMATES

pytestmark = pytest.mark.asyncio(loop_scope="session")


def problem(answer: Any, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["type"] == f"urn:ratchet:problem:{kind}"
    assert body["status"] == status
    assert body["title"] and body["detail"]
    return body


async def test_json_body_starts_a_run(served: Served) -> None:
    answer = await served.http.post("/v1/runs", json=config())
    assert answer.status_code == 201
    run = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{run['id']}"
    assert run["object"] == "run" and run["unchecked"] is None
    assert run["name"] == "reverse" and run["id"].startswith("reverse-")
    assert run["max_steps"] == 5 and run["metadata"] == {"owner": "ana"}
    assert run["links"]["temporal_ui"] == f"http://ui:8233/namespaces/default/workflows/{run['id']}"
    saved = configs.document(served.store, run["id"])
    assert saved["trainer"]["optim"]["type"] == "adamw", "defaults are written out"
    execution = await served.env.client.get_workflow_handle(run["id"]).describe()
    assert execution.workflow_type == "TrainingRun"
    memo = await served.until(run["id"], status="running")
    assert memo["step"] == 3
    # The counts of the preflight reach the run.
    result = await (await served.env.client.get_workflow_handle(run["id"]).describe()).memo()
    assert result["ratchet"]["examples"] == {"train/reverse-text": 512}


async def test_temporal_shows_what_a_run_is_and_lists_runs_alone(served: Served) -> None:
    """The page on steering names the filters."""
    run = await served.start("seen")
    assert (run["envs"], run["model"]) == (["reverse-text"], "ratchet/tiny")
    execution = await served.env.client.get_workflow_handle(run["id"]).describe()
    assert await execution.static_summary() == "reverse-text · ratchet/tiny · 5 steps"
    details = await execution.static_details() or ""
    assert details.startswith("**seen** trains `ratchet/tiny` on reverse-text: 5 steps.\n\n- owner")
    assert f"temporal workflow signal --workflow-id {run['id']} --name trigger_eval" in details
    memo = {"envs": ["e" * 90, "f" * 90], "model": "m", "max_steps": None}
    assert len(summary_of(memo)) == 120 and summary_of(memo).endswith("…")
    full = {**memo, "name": "n", "attempt": 1, "metadata": {f"k{n}": "語" * 512 for n in range(16)}}
    cut = details_of("x", full)
    assert 15_900 < len(cut.encode()) <= 16_000 and "…\n\nSteer it" in cut
    assert "--workflow-id x --name trigger_eval" in cut, "the commands stay whole"
    page = (ROOT / "docs" / "steering.md").read_text()
    for query in ('WorkflowType="TrainingRun"', "ParentWorkflowId is null"):
        assert f"`{query}`" in page

        async def listed(query: str = query) -> list[str]:
            return [found.id async for found in served.env.client.list_workflows(query)]

        found = await eventually(listed, lambda ids: run["id"] in ids)
        assert "Parent" in query or not any("/" in workflow for workflow in found)


async def test_every_signal_has_its_tctl_spelling() -> None:
    page = (ROOT / "docs" / "steering.md").read_text()
    signals = [verb.signal for verb in CONTROLS.values() if verb.signal]
    for command in ("temporal workflow signal --workflow-id", "tctl workflow signal --workflow_id"):
        assert sorted(re.findall(rf"^{command} RUN --name (\w+)", page, re.M)) == sorted(signals)


async def test_toml_body_starts_a_run(served: Served) -> None:
    answer = await served.http.post(
        "/v1/runs",
        content=tomli_w.dumps(config("from-toml")),
        headers={"content-type": "application/toml; charset=utf-8"},
    )
    assert answer.status_code == 201
    assert answer.json()["name"] == "from-toml"


async def test_dry_run_starts_nothing(served: Served) -> None:
    answer = await served.http.post("/v1/runs?dry_run=true", json=config("dry"))
    assert answer.status_code == 200
    assert answer.json()["object"] == "config"
    assert answer.json()["config"]["train"]["max_lag"] == 1
    listed = (await served.http.get("/v1/runs?limit=100")).json()["data"]
    assert "dry" not in {run["name"] for run in listed}


async def test_a_dry_run_is_checked_by_workers_too(served: Served) -> None:
    url = "/v1/runs?dry_run=true"
    checked = (await served.http.post(url, json=config("dry"))).json()
    assert checked["unchecked"] is None and checked["examples"] == {"train/reverse-text": 512}
    assert checked["estimates"] == ESTIMATES
    refused = problem(await served.http.post(url, json=config("bad-env")), 422, "invalid-config")
    assert refused["errors"][0]["message"] == "no such environment"
    left_out = await served.http.post(f"{url}&preflight=false", json=config("bad-env"))
    assert left_out.status_code == 200 and "was left out" in left_out.json()["unchecked"]


async def test_env_servers_are_planned_and_started_for_the_cores_that_a_worker_found(
    served: Served,
) -> None:
    many = config("many", dispatch={"max_inflight_rollouts": 600})
    planned = [
        (await served.http.post(f"/v1/runs?dry_run=true{more}", json=many)).json()["plan"][
            "servers"
        ]
        for more in ("", "&preflight=false")
    ]
    assert [plan["env"] for plan in planned] == [
        ["reverse-text", "reverse-text:2", "guess-hard", "guess-hard:2"],
        ["reverse-text", "guess-hard"],
    ]
    run = (await served.http.post("/v1/runs", json=many)).json()
    history = await served.env.client.get_workflow_handle(run["id"]).fetch_history()
    started = history.events[0].workflow_execution_started_event_attributes
    assert json.loads(started.input.payloads[0].data)["cores"] == 8


async def test_a_dry_run_that_nobody_checked_says_so(served: Served) -> None:
    settings = replace(served.settings, queues=Queues.prefixed("nobody"), preflight_timeout_s=0.5)
    async with asgi(create_app(settings, connection(served.env))) as http:
        answer = await http.post("/v1/runs?dry_run=true", json=config("lonely-dry"))
    assert answer.status_code == 200
    assert "environments, model" in answer.json()["unchecked"]
    assert "nobody-env" in answer.json()["unchecked"]
    broken = await served.http.post("/v1/runs?dry_run=true", json=config("broken-preflight"))
    assert "the disk is on fire" in broken.json()["unchecked"]


@workflow.defn(name=PREFLIGHT)
class SlowPreflight:
    """Finds a mistake after the signal `go`."""

    def __init__(self) -> None:
        self.going = False

    @workflow.signal
    def go(self) -> None:
        self.going = True

    @workflow.run
    async def run(self, arg: PreflightInput) -> CheckResult:
        await workflow.wait_condition(lambda: self.going)
        return CheckResult([CheckProblem("/train/env/0/id", "train.env.0.id", "found late")])


@activity.defn
async def nothing() -> None: ...


async def test_workers_that_are_there_but_busy_get_more_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = Queues.prefixed("busy")
    # What follows the first look for missing workers has six seconds.
    settings = replace(served.settings, queues=queues, preflight_timeout_s=4.0)
    look, looks = Temporal.unpolled, list[list[str]]()

    async def unpolled(self: Temporal, wanted: Queues) -> list[str]:
        looks.append(await look(self, wanted))
        async for found in served.env.client.list_workflows("ExecutionStatus = 'Running'"):
            if found.task_queue == queues.orchestrator:
                await served.env.client.get_workflow_handle(found.id).signal(SlowPreflight.go)
        return looks[-1]

    monkeypatch.setattr(Temporal, "unpolled", unpolled)
    async with (
        Worker(
            served.env.client,
            task_queue=queues.orchestrator,
            workflows=[SlowPreflight],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
        Worker(served.env.client, task_queue=queues.env, activities=[nothing]),
        Worker(served.env.client, task_queue=queues.trainer, activities=[nothing]),
        asgi(create_app(settings, connection(served.env))) as http,
    ):
        answer = await http.post("/v1/runs", json=config("slow"))
    assert looks == [[]], "it gave up on workers that were there"
    body = problem(answer, 422, "invalid-config")
    assert [error["message"] for error in body["errors"]] == ["found late"]


async def test_every_mistake_is_listed_with_its_place(served: Served) -> None:
    bad = config(max_stepz=3)
    bad["train"]["group_size"] = 0
    bad["trainer"] = {"optim": {"lr": "fast"}}
    body = problem(await served.http.post("/v1/runs", json=bad), 422, "invalid-config")
    errors = {error["pointer"]: error for error in body["errors"]}
    assert errors["/max_stepz"]["message"] == "unknown key; did you mean 'max_steps'?"
    assert errors["/train/group_size"]["value"] == 0
    assert errors["/trainer/optim/lr"]["value"] == "fast"
    assert errors["/trainer/optim/lr"]["key"] == "trainer.optim.lr"
    assert set(errors["/max_stepz"]) == {"pointer", "key", "value", "message"}


async def test_a_refused_preflight_is_the_same_422_and_starts_nothing(served: Served) -> None:
    answer = await served.http.post("/v1/runs", json=config("bad-env"))
    body = problem(answer, 422, "invalid-config")
    assert body["errors"] == [
        {
            "pointer": "/train/env/0/id",
            "key": "train.env.0.id",
            "value": "reverse-text",
            "message": "no such environment",
        }
    ]
    listed = (await served.http.get("/v1/runs?limit=100")).json()["data"]
    assert "bad-env" not in {run["name"] for run in listed}
    assert not [f for f in served.store.folders("runs") if f.startswith("bad-env")]


async def test_without_a_worker_the_run_is_queued_and_says_why(served: Served) -> None:
    settings = replace(served.settings, queues=Queues.prefixed("nobody"), preflight_timeout_s=0.5)
    async with asgi(create_app(settings, connection(served.env))) as http:
        answer = await http.post("/v1/runs", json=config("lonely"))
    assert answer.status_code == 201
    run = answer.json()
    assert run["status"] == "queued" and run["started_at"] is None
    for queue in ("nobody-orchestrator", "nobody-env", "nobody-trainer"):
        assert queue in run["waiting_for"]["name"]
    assert run["waiting_for"]["since"]
    said = "environments, model and what algorithms name (the check waits for"
    assert run["unchecked"].startswith(said)
    preflight = served.env.client.get_workflow_handle(f"{run['id']}/preflight")
    described = await preflight.describe()
    assert described.status is not None and described.status.name == "TERMINATED"


async def test_a_queued_run_that_names_no_wait_shows_which_worker_is_missing(
    served: Served,
) -> None:
    run = await served.start("unchecked")
    # The stand-ins have no activity workers.
    waits = {"name": "workers on task queues api-test-env, api-test-trainer"}
    message = f"waiting for {waits['name']}"
    known = {**waits, "since": None, "until": None, "message": message}
    shown = await served.until(run["id"], waiting_for=known)
    assert shown["status"] == "queued"
    await served.env.client.get_workflow_handle(run["id"]).terminate()


async def test_a_broken_preflight_queues_the_run(served: Served) -> None:
    run = await served.start("broken-preflight")
    assert run["status"] in ("queued", "running")


@pytest.mark.parametrize(
    ("content", "media", "status", "kind"),
    [
        (b"{", "application/json", 400, "unreadable-body"),
        (b"a = ", "application/toml", 400, "unreadable-body"),
        (b"\xff\xfe", "application/json", 400, "unreadable-body"),
        (b"[" * 100_000, "application/json", 400, "unreadable-body"),
        (b"x = " + b"[" * 5000, "application/toml", 400, "unreadable-body"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "unreadable-body"),
        (b'{"metadata": {"a": "\\ud800"}}', "application/json", 400, "unreadable-body"),
        (b'{"seed": NaN}', "application/json", 400, "unreadable-body"),
        (b"seed = inf", "application/toml", 400, "unreadable-body"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "application/json", 400, "unreadable-body"),
        (b"", "application/json", 400, "unreadable-body"),
        (b"[]", "application/json", 422, "invalid-config"),
        (b"null", "application/json", 422, "invalid-config"),
        (b"{}", "application/xml", 415, "unsupported-media-type"),
        (b"{}", "", 415, "unsupported-media-type"),
        (b'"' + b"x" * (1 << 20) + b'"', "application/json", 413, "body-too-large"),
    ],
)
async def test_bodies_that_cannot_be_used(
    served: Served, content: bytes, media: str, status: int, kind: str
) -> None:
    answer = await served.http.post(
        "/v1/runs", content=content, headers={"content-type": media} if media else {}
    )
    problem(answer, status, kind)


async def test_a_stream_without_length_is_bounded_too(served: Served) -> None:
    async def endless() -> Any:
        for _ in range(64):
            yield b"x" * 65536

    answer = await served.http.post(
        "/v1/runs", content=endless(), headers={"content-type": "application/json"}
    )
    problem(answer, 413, "body-too-large")


async def test_no_disk_space_is_507_and_says_how_to_fix_it(served: Served) -> None:
    settings = replace(served.settings, min_free_bytes=1 << 62)
    async with asgi(create_app(settings, connection(served.env))) as http:
        for query in ("", "?dry_run=true&preflight=false"):
            answer = await http.post(f"/v1/runs{query}", json=config())
            assert "RATCHET_STORE" in problem(answer, 507, "no-disk-space")["detail"]
