"""Runs that Temporal has forgotten are shown as they ended; 404 is for what nobody knows."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.services import ended
from ratchet.api.services.ended import forgotten, keep_ended
from ratchet.api.store.records import Records
from tests.unit.api.conftest import Served, asgi, connection, eventually, put_checkpoint
from tests.unit.api.leaving import leave, put_eval
from tests.unit.api.routes.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")
SSE = {"accept": "text/event-stream"}


@pytest.fixture(autouse=True)
def no_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that other tests left ended before these."""
    monkeypatch.setattr(ended, "MARGIN", timedelta(seconds=30))
    served.store.write_live(keys.ENDED_UNTIL, {"until": datetime.now(UTC).isoformat()})


async def forget(served: Served, run_id: str) -> None:
    """Has Temporal forget a run, as its retention does."""
    request = DeleteWorkflowExecutionRequest(
        namespace="default", workflow_execution=WorkflowExecution(workflow_id=run_id)
    )
    await served.env.client.workflow_service.delete_workflow_execution(request, retry=True)
    app = create_app(served.settings, connection(served.env))

    async def known() -> bool:
        return await app.state.services.temporal.describe(run_id) is None

    await eventually(known, bool)


async def test_a_run_that_temporal_forgot_is_shown_as_it_ended(
    served: Served, tmp_path: Path
) -> None:
    runs = {name: (await served.start(name))["id"] for name in ("crashes", "ends", "fails")}
    shown = {
        name: await served.until(run_id, status="succeeded" if name == "ends" else "failed")
        for name, run_id in runs.items()
    }
    put_checkpoint(served.store, runs["crashes"], 2, tmp_path)
    shown["crashes"]["checkpoint"] = {"step": 2}
    app = create_app(served.settings, connection(served.env))
    services = app.state.services

    async def kept() -> bool:
        # Temporal's list of what ended lags a moment behind.
        await keep_ended(services.temporal, services.records)
        places = [keys.ended(run_id) for run_id in runs.values()]
        return all(served.store.read_live(place) for place in places)

    await eventually(kept, bool)
    for run_id in runs.values():
        await forget(served, run_id)
    async with asgi(app) as http:
        for name, run_id in runs.items():
            url = f"/v1/runs/{run_id}"
            again = (await http.get(url)).json()
            # What it takes in the store is measured anew.
            assert {**again, "disk": None} == {**shown[name], "disk": None}, name
            assert (await http.get(f"{url}/config")).json()["config"]["name"] == name
            for part in ("events", "logs"):
                problem(await http.get(f"{url}/{part}"), 410, "history-forgotten")
            assert (await http.get(f"{url}/events", headers=SSE)).status_code == 204
            problem(await http.post(f"{url}/pause"), 409, "run-conflict")
            problem(await http.patch(url, json={"metadata": {"a": "b"}}), 409, "run-conflict")
            assert (await http.get(f"/v1/runs?limit=1&after={run_id}")).status_code == 200
        # It may still go on from what it left.
        resumed = await http.post(f"/v1/runs/{runs['crashes']}/resume")
        assert resumed.status_code == 202 and resumed.json()["attempt"] == 2
        assert (await http.get(f"/v1/runs/{runs['crashes']}/events")).status_code == 200
        problem(await http.get("/v1/runs/nobody-knows"), 404, "unknown-run")


async def test_why_an_attempt_ended_is_known_while_a_later_one_runs(
    served: Served, tmp_path: Path
) -> None:
    run_id = (await served.start("crashes-once"))["id"]
    await served.until(run_id, status="failed")
    put_checkpoint(served.store, run_id, 2, tmp_path)
    services = create_app(served.settings, connection(served.env)).state.services
    first = await services.temporal.describe(run_id)
    assert first is not None and first.state == "failed"
    assert (await served.http.post(f"/v1/runs/{run_id}/resume")).status_code == 202
    await served.until(run_id, status="running")
    # Well below what Temporal waits for the end of an execution that has none.
    async with asyncio.timeout(10):
        assert await services.temporal.close_reason(first) == "a bug"


async def test_of_a_run_whose_end_nobody_kept_the_store_says_what_it_left(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}")
    leave(store, "done", steps=5)
    leave(store, "half", steps=3)
    leave(store, "never-began")
    records = Records(store)
    done, half = forgotten(records, "done"), forgotten(records, "half")
    assert done is not None and half is not None
    assert (done.state, done.memo["step"], done.run) == ("completed", 5, "")
    assert (half.state, half.memo["step"]) == ("forgotten", 3)
    assert half.memo["metadata"] == {"owner": "ana"}
    for run_id in ("never-began", "nobody"):
        assert forgotten(records, run_id) is None


async def test_an_evaluation_is_done_with_a_result_of_each_env(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}")
    envs = {"env": [{"id": "reverse-text"}, {"id": "guess"}]}
    for run_id, results in (("all", 2), ("some", 1), ("none", 0)):
        leave(store, run_id, max_steps=0, train={"env": []}, eval=envs)
        for env in envs["env"][:results]:
            put_eval(store, run_id, env["id"], 0, 0.5)
    records = Records(store)
    found = {run_id: forgotten(records, run_id) for run_id in ("all", "some", "none")}
    assert [run and (run.state, run.memo["step"]) for run in found.values()] == [
        ("completed", 0),
        ("forgotten", 0),
        None,
    ]


async def test_it_is_failed_and_says_that_nothing_says_how(served: Served) -> None:
    leave(served.store, "long-gone", steps=3)
    run = (await served.http.get("/v1/runs/long-gone")).json()
    assert (run["status"], run["step"], run["finished_at"]) == ("failed", 3, None)
    assert run["error"]["code"] == "workflow_forgotten"
    assert "how it ended was not recorded" in run["error"]["message"]
    assert run["created_at"] and run["metadata"] == {"owner": "ana"}


async def test_only_what_ended_since_is_kept_and_later_ends_stay(served: Served) -> None:
    run_id = (await served.start("ends"))["id"]
    await served.until(run_id, status="succeeded")
    services = create_app(served.settings, connection(served.env)).state.services
    kept = {"state": "failed", "started": "2999-01-01T00:00:00+00:00", "closed": "", "memo": {}}
    served.store.write_live(keys.ended(run_id), kept)
    await keep_ended(services.temporal, services.records)
    assert served.store.read_live(keys.ended(run_id)) == kept
    await asyncio.to_thread(
        served.store.write_live, keys.ENDED_UNTIL, {"until": "2999-01-01T00:00:00+00:00"}
    )
    assert await keep_ended(services.temporal, services.records) == 0


async def test_a_damaged_run_keeps_no_other_end_from_being_kept(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = [(await served.start("ends"))["id"] for _ in range(2)]
    for run_id in (bad, good):
        await served.until(run_id, status="succeeded")
    Path(served.store.root, f"{keys.config(bad)}.commit").write_text("{")
    services = create_app(served.settings, connection(served.env)).state.services

    async def kept() -> bool:
        await keep_ended(services.temporal, services.records)
        return served.store.read_live(keys.ended(good)) is not None and bad in caplog.text

    await eventually(kept, bool)
    assert served.store.read_live(keys.ended(bad)) is None
