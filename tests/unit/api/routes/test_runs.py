"""Listing, showing, stopping, evaluating: the run object in every state a run can be in."""

import asyncio
import re
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from temporalio.api.workflowservice.v1 import PauseWorkflowExecutionRequest

from ratchet.activities.contracts.hosting import keepers
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.rollouts import Gauges
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Series
from ratchet.api.__main__ import rebuild_index
from ratchet.api.app import create_app
from ratchet.configs.load import validate
from tests.unit.api.conftest import Served, asgi, config, connection, eventually
from tests.unit.api.routes.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def signals(served: Served, run_id: str, count: int) -> list[Any]:
    async def look() -> list[Any]:
        memo = await (await served.env.client.get_workflow_handle(run_id).describe()).memo()
        heard: list[Any] = memo["ratchet"].get("signals", [])
        return heard

    return await eventually(look, lambda heard: len(heard) >= count)


async def test_a_running_run_shows_what_it_does(served: Served) -> None:
    run = await served.start("shows")
    served.store.write_live(
        keys.live(run["id"], "old"),
        {"time": time.time() - 60, "inflight_train": 99, "tokens_per_s": 1e6},
    )
    for source, heard, inflight in (("a", 9.0, 8), ("b", 30.0, 7)):
        gauges = Gauges(
            inflight,
            2,
            permits=16,
            inflight={"train/reverse-text": inflight, "eval/guess-hard": 2},
            mode="eval",
            queued_eval=5,
            waiting_for="a free permit",
        )
        # The latest report is not the latest write.
        result = {"time": time.time() - 1.0, "heard": time.time() - heard, **asdict(gauges)}
        served.store.write_live(keys.live(run["id"], source), {**result, "tokens_per_s": 100.25})
    shown = await served.until(run["id"], status="running")
    assert shown["progress"] == {
        "rollouts_inflight_train": 8,
        "rollouts_inflight_eval": 2,
        "rollouts_inflight": {"train/reverse-text": 8, "eval/guess-hard": 2},
        "tokens_per_s": 200.5,
        "permits": 16,
        "mode": "eval",
        "queued_eval": 5,
        "waiting_for": "a free permit",
    }
    assert shown["links"]["gauges"] == f"/v1/runs/{run['id']}/gauges"
    assert shown["waiting_for"]["name"] == "rollouts of batch 4"
    message = shown["waiting_for"]["message"]
    assert re.fullmatch(r"waiting for rollouts of batch 4 for \d+ s", message)
    assert shown["checkpoint"] == {"step": 2}
    good = {"failed": None, "of": None, "error": None}
    good |= {"rollouts": None, "versions": None, "epoch": None}
    assert shown["eval"] == {"reverse-text": {"step": 0, "reward": 0.2, **good}}
    assert shown["restarts"] == {"engine": 1}
    assert shown["error"] is None and shown["finished_at"] is None


async def test_stop_is_reported_and_shown_and_idempotent(served: Served) -> None:
    run = await served.start("stops")
    answer = await served.http.post(f"/v1/runs/{run['id']}/stop", json={"reason": "enough"})
    assert answer.status_code == 202
    assert answer.json()["status"] == "stopping"
    ended = await served.until(run["id"], status="succeeded")
    assert ended["finished_at"] and ended["end_reason"] == "stopped"
    assert ended["waiting_for"] is None and ended["progress"] is None
    assert (await signals(served, run["id"], 1))[0] == ["stop", {"reason": "enough"}]
    body = problem(await served.http.post(f"/v1/runs/{run['id']}/stop"), 409, "run-conflict")
    assert body["run_status"] == "succeeded"


async def test_eval_names_known_envs_only(served: Served) -> None:
    run = await served.start("evaluates")
    path = f"/v1/runs/{run['id']}/eval"
    assert (await served.http.post(path)).status_code == 202
    assert (await served.http.post(path, json={"envs": ["guess-hard"]})).status_code == 202
    assert await signals(served, run["id"], 2) == [
        ["trigger_eval", {"envs": ["reverse-text", "guess-hard"]}],
        ["trigger_eval", {"envs": ["guess-hard"]}],
    ]
    answer = await served.http.post(path, json={"envs": ["reverse-text", "chess"]})
    body = problem(answer, 422, "invalid-request")
    assert body["errors"][0]["pointer"] == "/envs/1"
    assert "reverse-text, guess-hard" in body["errors"][0]["message"]


@pytest.mark.parametrize(
    ("content", "media", "status"),
    [
        (b'{"envs": "reverse-text"}', "application/json", 422),
        (b'{"env": ["reverse-text"]}', "application/json", 422),
        (b"[]", "application/json", 400),
        (b"{", "application/json", 400),
        (b"a=1", "application/x-www-form-urlencoded", 415),
        (b"x" * 70_000, "application/json", 413),
    ],
)
async def test_bad_eval_bodies(served: Served, content: bytes, media: str, status: int) -> None:
    run = await served.start("eval-bodies")
    answer = await served.http.post(
        f"/v1/runs/{run['id']}/eval", content=content, headers={"content-type": media}
    )
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_failed_run_carries_its_error(served: Served) -> None:
    run = await served.start("fails")
    failed = await served.until(run["id"], status="failed")
    assert failed["error"]["code"] == "GateFailed" and failed["error"]["role"] == "inference"
    answer = await served.http.post(f"/v1/runs/{run['id']}/eval")
    assert problem(answer, 409, "run-conflict")["run_status"] == "failed"


async def test_a_crashed_run_is_failed_though_its_memo_says_running(served: Served) -> None:
    run = await served.start("crashes")
    failed = await served.until(run["id"], status="failed")
    assert failed["error"] == {
        "code": "workflow_failed",
        "role": None,
        "message": "The workflow failed: a bug",
        "param": None,
        "is_user_error": False,
    }


async def test_ends_made_in_temporal_are_seen(served: Served) -> None:
    handles = {}
    for name in ("killed", "called-off"):
        run = await served.start(name)
        await served.until(run["id"], status="running")
        handles[name] = served.env.client.get_workflow_handle(run["id"])
    await handles["killed"].terminate(reason="wrong data")
    await handles["called-off"].cancel()
    killed = await served.until(handles["killed"].id, status="failed")
    assert killed["error"]["message"] == "The workflow was terminated in Temporal: wrong data"
    assert killed["finished_at"]
    called_off = await served.until(handles["called-off"].id, status="cancelled")
    assert called_off["error"] is None


async def test_a_workflow_paused_in_temporal_breaks_neither_get_nor_list(served: Served) -> None:
    run = await served.start("held")
    await served.until(run["id"], status="running")
    await served.env.client.workflow_service.pause_workflow_execution(
        PauseWorkflowExecutionRequest(namespace="default", workflow_id=run["id"], request_id="1"),
        retry=True,
    )
    held = await served.until(run["id"], status="paused")
    assert "unpaused" in held["waiting_for"]["name"]

    async def look() -> list[Any]:
        listed = (await served.http.get("/v1/runs?status=paused")).json()["data"]
        # What other tests left paused is in the list, too.
        return [item for item in listed if item["id"].startswith("held-")]

    listed = await eventually(look, bool)
    assert [item["id"] for item in listed] == [run["id"]]
    await served.env.client.get_workflow_handle(run["id"]).terminate()


async def ids_by_page(served: Served, limit: int) -> list[str]:
    """The ids of all runs, asked for `limit` at a time. Others than this test's are among them."""
    ids: list[str] = []
    cursor = ""
    while True:
        page = (await served.http.get(f"/v1/runs?limit={limit}{cursor}")).json()
        assert page["object"] == "list" and len(page["data"]) <= limit
        ids += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            return ids
        assert len(page["data"]) == limit
        cursor = f"&after={ids[-1]}"


async def test_pages_cover_all_runs_once_newest_first(served: Served) -> None:
    ids = [(await served.start("paged"))["id"] for _ in range(5)]
    order = await eventually(lambda: ids_by_page(served, 100), lambda seen: set(ids) <= set(seen))
    assert order[:5] == ids[::-1]
    assert len(set(order)) == len(order)
    paged = await ids_by_page(served, 2)
    assert len(set(paged)) == len(paged)
    # Runs that other tests started past the API may enter the list between the two walks.
    assert [run_id for run_id in paged if run_id in set(order)] == order


async def test_a_lost_index_is_rebuilt_by_a_command(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [(await served.start("indexed"))["id"] for _ in range(2)]
    order = await eventually(lambda: ids_by_page(served, 100), lambda seen: set(ids) <= set(seen))
    served.store.delete_folder("index")
    given = connection(served.env)
    monkeypatch.setenv("TEMPORAL_ADDRESS", given["target_host"])
    monkeypatch.setenv("TEMPORAL_NAMESPACE", given["namespace"])

    async def rebuilt() -> list[str]:
        assert await asyncio.to_thread(rebuild_index, served.settings) == 0
        return await ids_by_page(served, 100)

    # Temporal's list of executions lags a moment behind.
    assert (await eventually(rebuilt, lambda seen: len(seen) >= len(order)))[:2] == ids[::-1]
    said = capsys.readouterr().out
    assert f"in the Temporal at {given['target_host']}; all of them are in the list" in said
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    assert await asyncio.to_thread(rebuild_index, served.settings) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_unknown_runs_and_parameters(served: Served) -> None:
    for path in ("/v1/runs/nope-000000", "/v1/runs/A%20B", "/v1/runs?after=nope"):
        problem(await served.http.get(path), 404, "unknown-run")
    for verb in ("stop", "eval"):
        problem(await served.http.post(f"/v1/runs/nope-000000/{verb}"), 404, "unknown-run")
    for path in ("/v1/runs?limit=0", "/v1/runs?limit=x", "/v1/runs?status=happy"):
        body = problem(await served.http.get(path), 422, "invalid-request")
        assert body["errors"][0]["key"].startswith("query.")
    problem(await served.http.get("/v2/runs"), 404, "not-found")
    problem(await served.http.delete("/v1/runs"), 405, "method-not-allowed")


async def test_a_workflow_that_is_no_run_is_not_found(served: Served) -> None:
    run = await served.start("has-preflight")
    # The preflight's id holds a '/', and no other workflow type is shown as a run either.
    assert (await served.http.get(f"/v1/runs/{run['id']}%2Fpreflight")).status_code == 404


async def test_metrics_are_read_from_the_store(served: Served) -> None:
    run_id = (await served.start("measured"))["id"]
    for step in (1, 2, 3):
        served.store.put_json(
            keys.step_record(run_id, step),
            {"step": step, "time": 1.5, "metrics": {"reward": step / 10}},
        )
    path = f"/v1/runs/{run_id}/metrics"
    page = (await served.http.get(path)).json()
    assert [item["step"] for item in page["data"]] == [1, 2, 3]
    assert page["data"][2]["metrics"] == {"reward": 0.3}
    page = (await served.http.get(f"{path}?after_step=1&limit=1")).json()
    assert [item["step"] for item in page["data"]] == [2] and page["has_more"] is True
    assert (await served.http.get(f"{path}?after_step=3")).json()["data"] == []
    problem(await served.http.get("/v1/runs/nope/metrics"), 404, "unknown-run")
    problem(await served.http.get("/v1/runs/nope/evals"), 404, "unknown-run")


LAG = {
    "mean": 0.001,
    "max": 0.02,
    "p99": 0.01,
    "min": 0.0,
    "median": 0.001,
    "p90": 0.002,
    "n": 100,
}


async def test_a_running_run_says_which_workers_are_missing(served: Served) -> None:
    run_id = (await served.start("silent"))["id"]
    await served.until(run_id, status="running")
    now = time.time()
    for source, ago in (("trainer-a-1-aaaaaa", 34), ("env-a-2-bbbbbb", 4), ("rollout-a-3-c", 99)):
        Series(run_id, source).add({"time": now - ago}).write(served.store)
    found = (await served.http.get(f"/v1/runs/{run_id}")).json()["silent"]
    while not found:
        # What was answered before may be a quarter of a second old.
        found = (await served.http.get(f"/v1/runs/{run_id}")).json()["silent"]
    assert [*found] == ["trainer"] and 34 <= found["trainer"] < 60
    await served.http.post(f"/v1/runs/{run_id}/pause")
    assert (await served.until(run_id, status="paused"))["silent"] == {}


async def test_no_worker_is_missed_for_what_a_run_does_not_have(served: Served) -> None:
    """An evaluation has no trainer, though a trainer worker prepared its weights."""
    alone = {"max_steps": 0, "train": {"env": []}, "eval": {"env": [{"id": "reverse-text"}]}}
    run_id = (await served.start("lone", **alone))["id"]
    await served.until(run_id, status="running")
    now = time.time()
    for source in ("trainer-a-1-aaaaaa", "env-a-2-bbbbbb", "inference-a-3-cccccc"):
        Series(run_id, source).add({"time": now - 34}).write(served.store)

    async def look() -> list[str]:
        return [*(await served.http.get(f"/v1/runs/{run_id}")).json()["silent"]]

    assert await eventually(look, bool) == ["env", "inference"]
    env = {"id": "reverse-text", "address": "tcp://127.0.0.1:9"}
    elsewhere = validate(config(**{**alone, "eval": {"env": [env]}}))
    assert keepers(elsewhere) == {"inference"}


async def test_gauges_are_paged_by_time(served: Served) -> None:
    run_id = (await served.start("gauged"))["id"]
    lag = LAG
    for source, times in (("rollout-a", (1.25, 2.25, 3.25)), ("rollout-b", (1.5, 2.25))):
        series = Series(run_id, source)
        for at in times:
            result = asdict(Gauges(4, inflight={"train/reverse-text": 4}, waiting_for="an engine"))
            sample = {"time": at, "worker_inflight": 3, **result, "event_loop_lag": lag}
            series.add(sample).write(served.store)
    path = f"/v1/runs/{run_id}/gauges"
    page = (await served.http.get(path)).json()
    found = [(item["time"], item["source"].removeprefix("rollout-")) for item in page["data"]]
    assert found == [(1.25, "a"), (1.5, "b"), (2.25, "a"), (2.25, "b"), (3.25, "a")]
    assert page["object"] == "list" and page["has_more"] is False
    first = page["data"][0]
    assert first["event_loop_lag"] == lag and first["inflight"] == {"train/reverse-text": 4}
    assert (first["worker_inflight"], first["waiting_for"]) == (3, "an engine")
    page = (await served.http.get(f"{path}?after=1.5&limit=1")).json()
    assert [item["time"] for item in page["data"]] == [2.25, 2.25] and page["has_more"] is True
    assert (await served.http.get(f"{path}?after=3.25")).json()["data"] == []
    for bad in ("after=-1", "after=nan"):
        problem(await served.http.get(f"{path}?{bad}"), 404, "unknown-cursor")
    for bad in ("limit=0", "role=nobody"):
        problem(await served.http.get(f"{path}?{bad}"), 422, "invalid-request")
    problem(await served.http.get("/v1/runs/nope/gauges"), 404, "unknown-run")


async def test_gauges_are_of_one_role_or_of_all(served: Served) -> None:
    """Those who ask for no role get rollout workers; others have their lag and usage alone."""
    run_id = (await served.start("lagging"))["id"]
    lag, used = LAG, {"cpu_cores": 0.5, "memory_bytes": 1 << 30, "gpus": []}
    roles = ("env", "inference", "orchestrator", "rollout", "trainer")
    for i, role in enumerate(roles):
        sample = {"time": 1.0 + i, "event_loop_lag": lag, "usage": used}
        Series(run_id, f"{role}-host-7-0a1b2c").add(sample).write(served.store)
    path = f"/v1/runs/{run_id}/gauges"
    (rollout,) = (await served.http.get(path)).json()["data"]
    assert rollout["role"] == "rollout" and rollout["permits"] == 0
    everyone = (await served.http.get(f"{path}?role=all")).json()["data"]
    assert [item["role"] for item in everyone] == list(roles)
    (trainer,) = (await served.http.get(f"{path}?role=trainer")).json()["data"]
    assert trainer == everyone[-1]
    source = "trainer-host-7-0a1b2c"
    own = {"role": "trainer", "event_loop_lag": lag, "usage": used}
    assert trainer == {"time": 5.0, "source": source, **own}


async def test_evals_are_read_from_the_store(served: Served) -> None:
    run_id = (await served.start("examined"))["id"]
    for epoch, step in (("10-1/reverse-text", 10), ("0-0/reverse-text", 0), ("0-0/guess", 0)):
        served.store.put_json(
            keys.eval_record(run_id, epoch),
            {"env": epoch.split("/")[1], "step": step, "reward_mean": 0.5},
        )
    failed = {
        "env": "wrong",
        "step": 11,
        "reward_mean": None,
        "error": "TaskError: 401 for Authorization: Bearer sk-abcdefghijklmnop1234",
        "frames": [{"file": "/e.py", "line": 2, "function": "f"}],
    }
    served.store.put_json(keys.eval_record(run_id, "11-2/wrong"), failed)
    data = (await served.http.get(f"/v1/runs/{run_id}/evals")).json()["data"]
    assert [item["epoch"] for item in data] == [
        "0-0/guess",
        "0-0/reverse-text",
        "10-1/reverse-text",
        "11-2/wrong",
    ]
    assert data[0]["reward_mean"] == 0.5
    last = data[-1]
    assert last["reward_mean"] is None and last["frames"] == failed["frames"]
    assert "TaskError: 401" in last["error"] and "abcdefghijklmnop1234" not in last["error"]


async def test_limits_of_a_running_run_change_and_what_cannot_change_is_refused(
    served: Served,
) -> None:
    run = await served.start("changes")
    url = f"/v1/runs/{run['id']}"
    change = {"dispatch": {"max_inflight_rollouts": 512, "tasks_per_minute": 600}}
    changed = await served.http.patch(url, json=change)
    assert changed.status_code == 200 and changed.json()["config_changes"] == change
    assert (await served.until(run["id"], config_changes=change))["status"] == "running"
    for body, pointer in [
        ({"train": {"batch_size": 1}}, "/train/batch_size"),
        ({"dispatch": {"tasks_per_minute": -1}}, "/dispatch/tasks_per_minute"),
        ({"dispatch": {"max_inflight_rollouts": 1}}, ""),
        ({}, ""),
    ]:
        refused = await served.http.patch(url, json=body)
        found = problem(refused, 422, "invalid-request")["errors"][0]
        assert found["pointer"] == pointer and found["message"]
    await served.http.post(f"{url}/stop")
    await served.until(run["id"], status="succeeded")
    ended = await served.http.patch(url, json=change)
    assert problem(ended, 409, "run-conflict")["run_status"] == "succeeded"


async def test_change_that_the_run_itself_refuses_is_a_conflict(served: Served) -> None:
    run = await served.start("refuses")
    change = {"dispatch": {"tasks_per_minute": 600}}
    reply = await served.http.patch(f"/v1/runs/{run['id']}", json=change)
    assert "not now" in problem(reply, 409, "run-conflict")["detail"]


async def test_pause_and_resume_signal_the_run_and_show_what_comes(served: Served) -> None:
    run = await served.start("pauses")
    url = f"/v1/runs/{run['id']}"
    await served.until(run["id"], status="running")
    wrong = await served.http.post(f"{url}/pause", json={"mode": "x"})
    assert problem(wrong, 422, "invalid-request")
    paused = await served.http.post(f"{url}/pause", json={"mode": "cancel"})
    assert paused.status_code == 202 and paused.json()["status"] == "pausing"
    await served.until(run["id"], status="paused")
    again = await served.http.post(f"{url}/pause")
    assert again.status_code == 202 and again.json()["status"] == "paused"
    resumed = await served.http.post(f"{url}/resume")
    assert resumed.status_code == 202 and resumed.json()["status"] == "starting"
    await served.until(run["id"], status="running")
    heard = await signals(served, run["id"], 3)
    first = {"mode": "cancel", "reason": "requested over the API"}
    assert [name for name, _ in heard] == ["pause", "pause", "resume"] and heard[0][1] == first
    await served.http.post(f"{url}/stop")
    await served.until(run["id"], status="succeeded")
    for verb in ("pause", "resume"):
        assert problem(await served.http.post(f"{url}/{verb}"), 409, "run-conflict")


async def test_a_run_says_how_it_is(served: Served) -> None:
    """By its recorded steps, and by the workers that are there."""
    run = (await served.start("ails"))["id"]
    await served.until(run, step=3)
    for step in range(1, 6):
        metrics = {"errors/reverse-text/rate": 0.5, "time/step": 4.0, "time/train": 3.0}
        value = {"step": step, "time": 100.0 + 5 * step, "metrics": metrics}
        served.store.put_json(keys.step_record(run, step), value)
    # Workers that other tests had stay known for a while: these queues had none but the one.
    queues = replace(Queues.prefixed("ails"), orchestrator=served.settings.queues.orchestrator)
    settings = replace(served.settings, queues=queues)
    async with asgi(create_app(settings, connection(served.env))) as http:
        health = (await http.get(f"/v1/runs/{run}/health")).json()
    assert health["verdict"] == "attention" and health["seconds_per_step"] == 5.0
    assert health["message"].startswith("no worker polls for rollout, trainer, inference, env")
    assert [finding["rule"] for finding in health["findings"]] == ["no_worker", "env_failing"]
    assert health["waits"] == "the engines run ahead while the trainer trains 75 % of the time"
    problem(await served.http.get("/v1/runs/none-such/health"), 404, "unknown-run")
