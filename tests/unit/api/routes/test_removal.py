"""Runs that are archived and deleted: what goes, what stays, and what keeps them from going."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.contracts.logs import orchestrator_log
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.store import removal
from ratchet.api.store.run_index import RunIndex
from ratchet.configs.load import validate
from tests.unit.api.conftest import Served, asgi, config, connection, eventually, put_checkpoint
from tests.unit.api.leaving import leave
from tests.unit.api.routes.test_control import ended
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_rollouts import group

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(served: Served, **params: Any) -> list[str]:
    answer = await served.http.get("/v1/runs", params={"limit": 100, **params})
    return [run["id"] for run in answer.json()["data"]]


async def until_listed(served: Served, run_id: str, there: bool = True, **params: Any) -> None:
    """Requests of about the same moment share a reply, and what Temporal lists lags."""
    await eventually(lambda: listed(served, **params), lambda ids: (run_id in ids) is there)


def lineage(served: Served, run_id: str, source: str, kind: str) -> None:
    value = {"source": source, "step": 1, "kind": kind}
    served.store.put_json(keys.lineage(run_id), value)


async def test_nothing_is_left_of_a_deleted_run(served: Served, tmp_path: Path) -> None:
    run_id = await ended(served)
    group(served, run_id, "train/1", "e", [1.0, 0.0])
    put_checkpoint(served.store, run_id, 2, tmp_path)
    configs.save(served.store, f"{run_id}+2", validate(config()), attempt="t")
    log = served.settings.home / orchestrator_log(run_id)
    log.parent.mkdir(parents=True)
    log.write_text("said")
    assert (await served.http.put(f"/v1/runs/{run_id}/note", json={"note": "x"})).is_success
    await until_listed(served, run_id)
    for part in ("", "/metrics", "/checkpoints", "/events"):
        assert (await served.http.get(f"/v1/runs/{run_id}{part}")).status_code == 200
    answer = await served.http.delete(f"/v1/runs/{run_id}")
    assert answer.status_code == 200, answer.text
    gone = answer.json()
    assert gone.pop("freed") > 0
    assert gone == {"id": run_id, "object": "run", "deleted": True}
    for part in ("", "/metrics", "/checkpoints", "/events"):
        problem(await served.http.get(f"/v1/runs/{run_id}{part}"), 404, "unknown-run")
    assert not [name for name in served.store.folders("runs") if name.startswith(run_id)]
    assert not log.parent.exists()
    root = Path(served.store.root)
    assert not [path for path in root.rglob(f"*{run_id}*") if "deleted" not in path.parts]
    await until_listed(served, run_id, False)
    # A client that did not hear of it asks again.
    again = await served.http.delete(f"/v1/runs/{run_id}")
    assert again.status_code == 200 and again.json()["freed"] == 0
    problem(await served.http.get(f"/v1/runs/{run_id}"), 404, "unknown-run")


async def test_a_run_that_is_resumed_meanwhile_is_not_deleted(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await ended(served)
    put_checkpoint(served.store, run_id, 2, tmp_path)
    loop, needed_by, resumed = asyncio.get_running_loop(), removal.needed_by, []

    def resume_first(store: ArtifactStore, run: str) -> list[str]:
        if not resumed:
            sent = served.http.post(f"/v1/runs/{run_id}/resume")
            resumed.append(asyncio.run_coroutine_threadsafe(sent, loop).result().status_code)
        return needed_by(store, run)

    monkeypatch.setattr(removal, "needed_by", resume_first)
    answer = await served.http.delete(f"/v1/runs/{run_id}")
    assert resumed == [202]
    assert "it was resumed" in problem(answer, 409, "run-conflict")["detail"]
    assert served.store.committed(keys.checkpoint(run_id, 2)) is not None
    assert (await served.http.get(f"/v1/runs/{run_id}")).json()["attempt"] == 2


async def test_what_is_being_deleted_neither_goes_on_nor_is_forked(
    served: Served, tmp_path: Path
) -> None:
    run_id = await ended(served)
    put_checkpoint(served.store, run_id, 2, tmp_path)
    index = RunIndex(served.store)
    for verb, body in (("resume", None), ("fork", {"step": 2})):
        assert (await served.http.get(f"/v1/runs/{run_id}")).status_code == 200
        # By another API process, of which this one hears a moment later.
        index.hide(run_id)
        answer = await served.http.post(f"/v1/runs/{run_id}/{verb}", json=body)
        assert run_id in problem(answer, 404, "unknown-run")["detail"]
        index.unhide(run_id)
        await eventually(
            lambda: served.http.get(f"/v1/runs/{run_id}"),
            lambda reports: reports.status_code == 200,
        )
    assert (await served.http.get(f"/v1/runs/{run_id}")).json()["attempt"] == 1


async def test_a_run_under_way_is_neither_deleted_nor_archived(served: Served) -> None:
    run_id = (await served.start("goes"))["id"]
    await served.until(run_id, status="running")
    for answer in (
        await served.http.delete(f"/v1/runs/{run_id}"),
        await served.http.post(f"/v1/runs/{run_id}/archive"),
    ):
        body = problem(answer, 409, "run-conflict")
        assert body["run_status"] == "running" and "stop or cancel it first" in body["detail"]
    assert served.store.committed(keys.config(run_id)) is not None
    for path in ("nope-000000", "A%20B"):
        problem(await served.http.delete(f"/v1/runs/{path}"), 404, "unknown-run")


async def test_a_run_is_kept_while_its_servers_are_being_closed(served: Served) -> None:
    run_id = await ended(served)
    host = await served.env.client.start_workflow(
        "TrainingRun", id=f"{run_id}/host/engine/0", task_queue="nobody-polls-this"
    )

    async def refused() -> Any:
        return await served.http.delete(f"/v1/runs/{run_id}")

    # What Temporal lists lags a moment behind.
    await eventually(
        lambda: served.env.client.count_workflows(f"WorkflowId = '{host.id}'"),
        lambda found: found.count == 1,
    )
    body = problem(await refused(), 409, "run-conflict")
    assert f"{run_id}/host/engine/0 has not ended" in body["detail"]
    await host.terminate()
    await eventually(refused, lambda answer: answer.status_code == 200)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_temporal_forgets_a_deleted_run_and_all_below_it(served: Served) -> None:
    run_id = await ended(served)
    host = await served.env.client.start_workflow(
        "TrainingRun", id=f"{run_id}/host/engine/0", task_queue="nobody-polls-this"
    )
    await host.terminate()
    below = f"WorkflowId STARTS_WITH '{run_id}'"

    async def count() -> int:
        return (await served.env.client.count_workflows(below)).count

    # The run, its preflight, and the server; and none of another run.
    await eventually(count, lambda found: found == 3)
    await until_listed(served, other := await ended(served))
    assert (await served.http.delete(f"/v1/runs/{run_id}")).status_code == 200
    # It deletes once its queues have caught up, which they note twice a minute.
    async with asyncio.timeout(240):
        while await count():
            await asyncio.sleep(1.0)
    assert (await served.http.get(f"/v1/runs/{other}")).status_code == 200


async def test_what_another_run_needs_is_refused_with_its_name(
    served: Served, tmp_path: Path
) -> None:
    run_id = await ended(served)
    put_checkpoint(served.store, run_id, 2, tmp_path)
    # One that was resumed, which is the run itself; a fork; a run that trains one of its versions.
    lineage(served, f"{run_id}+2", run_id, "resume")
    fork, heir = f"fork-of-{run_id}", f"heir-of-{run_id}"
    configs.save(served.store, fork, validate(config()), attempt="t")
    lineage(served, fork, f"{run_id}+2", "fork")
    named = validate(config(model={"name": f"run:{run_id}@2"}))
    configs.save(served.store, heir, named, attempt="t")
    waits = await served.http.post(f"/v1/runs/{run_id}/fork", json={"name": "queued"})
    assert waits.status_code == 201, waits.text
    queued = waits.json()["id"]

    async def needing() -> str:
        answer = await served.http.delete(f"/v1/runs/{run_id}")
        return str(problem(answer, 409, "run-needed")["detail"])

    said = await eventually(needing, lambda said: queued in said)
    assert fork in said and heir in said and "archive" in said
    assert served.store.committed(keys.config(run_id)) is not None
    # Another run of another source is of no concern.
    lineage(served, "unrelated-run", "other-run", "fork")
    await served.http.post(f"/v1/runs/{queued}/cancel")
    await served.until(queued, status="cancelled")
    for other in (fork, heir):
        assert other in await needing()
        assert (await served.http.delete(f"/v1/runs/{other}")).status_code == 200
    assert (await served.http.delete(f"/v1/runs/{run_id}")).status_code == 200


async def test_a_damaged_run_keeps_no_other_from_being_deleted(served: Served) -> None:
    run_id, bad = await ended(served), "torn-1a2b3c"
    configs.save(served.store, bad, validate(config()), attempt="t")
    Path(served.store.root, f"{keys.config(bad)}.commit").write_text("{")
    assert (await served.http.delete(f"/v1/runs/{run_id}")).status_code == 200


async def test_a_deletion_that_was_cut_off_is_requested_again(served: Served) -> None:
    run_id = await ended(served)
    await until_listed(served, run_id)
    served.store.delete_folder(keys.run_folder(run_id))
    assert (await served.http.get(f"/v1/runs/{run_id}")).status_code == 200
    assert (await served.http.delete(f"/v1/runs/{run_id}")).json()["freed"] == 0
    problem(await served.http.get(f"/v1/runs/{run_id}"), 404, "unknown-run")


async def test_what_temporal_has_forgotten_is_deleted_too(served: Served) -> None:
    run_id = "forgotten-1a2b3c"
    leave(served.store, run_id, steps=2)
    # A run that goes on is known to another Temporal.
    served.store.write_live(keys.live(run_id, "rollout-a"), {"time": 2e9})
    body = problem(await served.http.delete(f"/v1/runs/{run_id}"), 409, "run-conflict")
    assert "but workers reported on it" in body["detail"]
    served.store.write_live(keys.live(run_id, "rollout-a"), {"time": 1.0})
    assert (await served.http.delete(f"/v1/runs/{run_id}")).status_code == 200
    assert not served.store.folders(keys.run_folder(run_id))


async def test_an_archived_run_is_out_of_the_list_and_all_there(
    served: Served, tmp_path: Path
) -> None:
    run_id = await ended(served)
    put_checkpoint(served.store, run_id, 2, tmp_path)
    await until_listed(served, run_id)
    for _ in range(2):
        answer = await served.http.post(f"/v1/runs/{run_id}/archive")
        assert answer.status_code == 200 and answer.json()["archived"] is True
    await until_listed(served, run_id, False)
    await until_listed(served, run_id, archived=True)
    await until_listed(served, run_id, archived=True, status="cancelled")
    assert await listed(served, archived=True, status="running") == []
    assert (await served.http.get(f"/v1/runs/{run_id}")).json()["archived"] is True
    assert (await served.http.get(f"/v1/runs/{run_id}/checkpoints")).json()["data"]
    # An API that starts anew looks at every run again.
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        fresh = (await http.get("/v1/runs?limit=100")).json()["data"]
        assert run_id not in [run["id"] for run in fresh] and fresh
    answer = await served.http.post(f"/v1/runs/{run_id}/unarchive")
    assert answer.status_code == 200 and answer.json()["archived"] is False
    await until_listed(served, run_id)
    await until_listed(served, run_id, False, archived=True)

    await served.http.post(f"/v1/runs/{run_id}/archive")
    resumed = await served.http.post(f"/v1/runs/{run_id}/resume")
    assert resumed.status_code == 202, resumed.text
    await until_listed(served, run_id)
    await until_listed(served, run_id, False, archived=True)


async def test_archived_runs_can_be_deleted(served: Served) -> None:
    run_id = await ended(served)
    await served.http.post(f"/v1/runs/{run_id}/archive")
    assert (await served.http.delete(f"/v1/runs/{run_id}")).status_code == 200
    await until_listed(served, run_id, False, archived=True)
    index = Path(served.store.root, "index")
    assert [path.parent.name for path in index.rglob(f"*{run_id}")] == ["deleted"]


async def test_who_deleted_a_run_is_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = await ended(served)
    caplog.set_level(logging.INFO, "ratchet.audit")
    await served.http.post(f"/v1/runs/{run_id}/archive")
    await served.http.delete(f"/v1/runs/{run_id}")
    lines = [json.loads(r.message) for r in caplog.records if r.name == "ratchet.audit"]
    reports = [(line["method"], line["action"], line["run"], line["status"]) for line in lines]
    assert reports == [
        ("POST", "archive_run", run_id, 200),
        ("DELETE", "delete_run", run_id, 200),
    ]


async def test_a_run_says_what_it_takes(served: Served, tmp_path: Path) -> None:
    run_id = (await served.start("measured"))["id"]
    (tmp_path / "big").write_bytes(b"x" * 2_000_000)
    served.store.put_folder(keys.weights(run_id, 0), tmp_path, attempt="t")
    (tmp_path / "big").write_bytes(b"y" * 2_000_000)
    served.store.put_folder(keys.weights(f"{run_id}+2", 0), tmp_path, attempt="t")
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        # The first list says what is known yet, which is nothing, and waits for nothing.
        first = {run["id"]: run for run in (await http.get("/v1/runs")).json()["data"]}
        assert first[run_id]["disk"] is None

        async def look() -> list[Any]:
            shown = (await http.get(f"/v1/runs/{run_id}")).json()["disk"]
            data = (await http.get("/v1/runs")).json()["data"]
            return [shown, next(run["disk"] for run in data if run["id"] == run_id)]

        sizes = await eventually(look, lambda seen: None not in seen)
    assert len(set(sizes)) == 1 and 4_000_000 < sizes[0] < 4_200_000
    await asyncio.sleep(0)
