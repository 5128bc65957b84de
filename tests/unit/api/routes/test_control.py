"""Cancel, checkpoint, resume of what has ended, and fork: what is reported, started and refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage import configs, keys
from ratchet.api.routes.fork import forked_config
from ratchet.api.schemas.bodies import ForkBody
from ratchet.api.schemas.problems import ApiProblem
from ratchet.configs.load import validate
from tests.unit.api.conftest import Served, config, eventually, put_checkpoint
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_runs import signals

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def memo(served: Served, run_id: str) -> dict[str, Any]:
    described = await served.env.client.get_workflow_handle(run_id).describe()
    result: dict[str, Any] = (await described.memo())["ratchet"]
    return result


async def ended(served: Served, name: str = "stops", verb: str = "cancel") -> str:
    run_id = str((await served.start(name))["id"])
    await served.until(run_id, status="running")
    await served.http.post(f"/v1/runs/{run_id}/{verb}")
    await served.until(run_id, status={"cancel": "cancelled", "stop": "succeeded"}[verb])
    return run_id


async def test_cancel_ends_a_run_and_twice_is_once(served: Served) -> None:
    run_id = (await served.start("cancels"))["id"]
    await served.until(run_id, status="running")
    url = f"/v1/runs/{run_id}/cancel"
    result = await served.http.post(url, json={})
    assert result.status_code == 202 and result.json()["status"] == "stopping"
    await served.until(run_id, status="cancelled")
    again = await served.http.post(url)
    assert again.status_code == 202 and again.json()["status"] == "cancelled"
    done = await ended(served, "stops", "stop")
    body = problem(await served.http.post(f"/v1/runs/{done}/cancel"), 409, "run-conflict")
    assert body["run_status"] == "succeeded"


async def test_checkpoint_is_reported(served: Served) -> None:
    run_id = (await served.start("saves"))["id"]
    await served.until(run_id, status="running")
    url = f"/v1/runs/{run_id}/checkpoint"
    assert (await served.http.post(url, json={"reason": "lunch"})).status_code == 202
    assert (await signals(served, run_id, 1))[0] == ["checkpoint", {"reason": "lunch"}]
    problem(await served.http.post(url, json={"step": 3}), 422, "invalid-request")
    await served.http.post(f"/v1/runs/{run_id}/cancel")
    await served.until(run_id, status="cancelled")
    assert problem(await served.http.post(url), 409, "run-conflict")["run_status"] == "cancelled"


async def test_an_ended_run_goes_on_as_its_next_attempt(served: Served, tmp_path: Path) -> None:
    run_id = await ended(served)
    created = (await served.http.get(f"/v1/runs/{run_id}")).json()["created_at"]
    for step in (1, 2):
        put_checkpoint(served.store, run_id, step, tmp_path)
    result = await served.http.post(f"/v1/runs/{run_id}/resume")
    assert result.status_code == 202, result.text
    assert result.json()["id"] == run_id and result.json()["attempt"] == 2
    run = await served.until(run_id, status="running")
    assert run["attempt"] == 2 and run["created_at"] == created and run["finished_at"] is None
    second = f"{run_id}+2"
    assert (await memo(served, run_id))["restore"] == {
        "run_id": second,
        "source": run_id,
        "step": None,
    }
    assert served.store.committed(keys.config(second)) is not None

    # It is one run to whoever lists them.
    async def attempts() -> list[int]:
        listed = (await served.http.get("/v1/runs?limit=100")).json()["data"]
        found = [item["attempt"] for item in listed if item["id"] == run_id]
        assert len(found) <= 1
        return found

    await eventually(attempts, lambda found: found == [2])
    # A second attempt that never restored anything goes on from the first one's checkpoint.
    await served.http.post(f"/v1/runs/{run_id}/cancel")
    await served.until(run_id, status="cancelled")
    answers = await asyncio.gather(
        *(served.http.post(f"/v1/runs/{run_id}/resume") for _ in range(3))
    )
    assert {answer.status_code for answer in answers} == {202}
    assert (await served.until(run_id, status="running"))["attempt"] == 3
    restore = (await memo(served, run_id))["restore"]
    assert restore["source"] == run_id and restore["run_id"] == f"{run_id}+3"


async def test_changes_and_metadata_of_a_run_hold_in_its_next_attempt(
    served: Served, tmp_path: Path
) -> None:
    run_id = (await served.start("changes"))["id"]
    await served.until(run_id, status="running")
    patch = {"dispatch": {"tasks_per_minute": 77}, "metadata": {"note": "slow"}}
    changed = await served.http.patch(f"/v1/runs/{run_id}", json=patch)
    assert changed.status_code == 200, changed.text
    assert changed.json()["metadata"] == {"owner": "ana", "note": "slow"}
    await served.http.post(f"/v1/runs/{run_id}/cancel")
    await served.until(run_id, status="cancelled")
    put_checkpoint(served.store, run_id, 2, tmp_path)
    await served.http.post(f"/v1/runs/{run_id}/resume")
    saved = configs.document(served.store, f"{run_id}+2")
    assert saved["dispatch"]["tasks_per_minute"] == 77
    assert saved["metadata"] == {"owner": "ana", "note": "slow"}


async def test_a_change_that_does_not_hold_yet_is_pending(served: Served) -> None:
    run_id = (await served.start("patched"))["id"]
    await served.until(run_id, status="running")
    answer = await served.http.patch(f"/v1/runs/{run_id}", json={"max_steps": 7})
    assert answer.status_code == 200, answer.text
    run = answer.json()
    assert run["pending"] == {"max_steps": 7} and run["max_steps"] == 5
    assert run["config_changes"] == {"max_steps": 7}
    patch = {"dispatch": {"tasks_per_minute": 77}}
    run = (await served.http.patch(f"/v1/runs/{run_id}", json=patch)).json()
    assert run["pending"] == {}, "a limit holds at once"


async def test_a_paused_run_says_why(served: Served) -> None:
    run_id = (await served.start("why"))["id"]
    await served.until(run_id, status="running")
    await served.http.post(f"/v1/runs/{run_id}/pause", json={"reason": "a look"})
    run = await served.until(run_id, status="paused")
    assert run["pause_reason"] == "a look" and run["paused_because"] is None
    await served.http.post(f"/v1/runs/{run_id}/resume")
    assert (await served.until(run_id, status="running"))["pause_reason"] is None


async def test_a_fork_is_at_its_checkpoint_from_the_first_moment(
    served: Served, tmp_path: Path
) -> None:
    run_id = (await served.start("forked"))["id"]
    await served.until(run_id, status="running")
    put_checkpoint(served.store, run_id, 2, tmp_path)
    forked = (await served.http.post(f"/v1/runs/{run_id}/fork", json={})).json()
    handle = served.env.client.get_workflow_handle(forked["id"])
    async for event in handle.fetch_history_events():
        fields = event.workflow_execution_started_event_attributes.memo.fields
        assert json.loads(fields["ratchet"].data)["step"] == 2
        break


async def test_what_cannot_be_resumed_says_why(served: Served, tmp_path: Path) -> None:
    bare = await ended(served)
    body = problem(await served.http.post(f"/v1/runs/{bare}/resume"), 409, "run-conflict")
    assert body["run_status"] == "cancelled" and "no checkpoint" in body["detail"]
    run_id = (await served.start("ends"))["id"]
    await served.until(run_id, status="succeeded")
    put_checkpoint(served.store, run_id, 5, tmp_path)
    body = problem(await served.http.post(f"/v1/runs/{run_id}/resume"), 409, "run-conflict")
    assert "all its steps are done" in body["detail"]
    stopped = await ended(served, "stops", "stop")
    put_checkpoint(served.store, stopped, 3, tmp_path)
    assert (await served.http.post(f"/v1/runs/{stopped}/resume")).status_code == 202


ALONE: dict[str, Any] = {"max_steps": 0, "train": {"env": []}}


async def test_an_evaluation_takes_no_checkpoint(served: Served) -> None:
    run_id = (await served.start("evaluates", **ALONE))["id"]
    await served.until(run_id, status="running")
    answer = await served.http.post(f"/v1/runs/{run_id}/checkpoint")
    assert "it is an evaluation" in problem(answer, 409, "run-conflict")["detail"]


async def test_an_evaluation_that_was_stopped_is_not_resumed(served: Served) -> None:
    """It may have evals left, and has nothing to go on from."""
    run_id = (await served.start("stops", **ALONE))["id"]
    await served.until(run_id, status="running")
    await served.http.post(f"/v1/runs/{run_id}/stop")
    await served.until(run_id, status="succeeded")
    body = problem(await served.http.post(f"/v1/runs/{run_id}/resume"), 409, "run-conflict")
    assert "an evaluation has no checkpoint to resume from" in body["detail"]
    assert "Evaluate again with another run" in body["detail"] and "done" not in body["detail"]


async def test_a_run_without_an_end_goes_on_after_a_stop(served: Served, tmp_path: Path) -> None:
    """It is never done; a fork may give it an end, above the checkpoint's step."""
    run_id = (await served.start("stops", max_steps=None))["id"]
    assert (await served.http.get(f"/v1/runs/{run_id}")).json()["max_steps"] is None
    await served.http.post(f"/v1/runs/{run_id}/stop")
    await served.until(run_id, status="succeeded")
    put_checkpoint(served.store, run_id, 3, tmp_path)
    assert (await served.http.post(f"/v1/runs/{run_id}/resume")).status_code == 202
    short = await served.http.post(f"/v1/runs/{run_id}/fork", json={"config": {"max_steps": 3}})
    assert "must be above 3" in problem(short, 422, "invalid-config")["detail"]
    forked = await served.http.post(f"/v1/runs/{run_id}/fork", json={"config": {"max_steps": 4}})
    assert forked.status_code == 201 and forked.json()["max_steps"] == 4


async def test_fork_starts_another_run_from_a_checkpoint(served: Served, tmp_path: Path) -> None:
    source = (await served.start("forked"))["id"]
    for step in (2, 3):
        put_checkpoint(served.store, source, step, tmp_path)
    body = {
        "step": 2,
        "name": "hotter",
        "metadata": {"why": "lr"},
        "config": {
            "trainer": {"optim": {"lr": 0.003}},
            "train": {"env": {"reverse-text": {"ratio": 2}}},
        },
    }
    url = f"/v1/runs/{source}/fork"
    dry = await served.http.post(f"{url}?dry_run=true", json=body)
    assert dry.status_code == 200 and dry.json()["config"]["trainer"]["optim"]["lr"] == 0.003
    key = {"Idempotency-Key": "fork-once"}
    answer = await served.http.post(url, json=body, headers=key)
    assert answer.status_code == 201, answer.text
    fork = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{fork['id']}"
    assert fork["name"] == "hotter" and fork["metadata"] == {"why": "lr"}
    assert fork["lineage"] == {"source": source, "step": 2, "kind": "fork"}
    await served.until(fork["id"], status="running")
    assert (await memo(served, fork["id"]))["restore"] == {
        "run_id": fork["id"],
        "source": source,
        "step": 2,
    }
    saved = configs.document(served.store, fork["id"])
    assert saved["trainer"]["optim"]["lr"] == 0.003
    assert saved["train"]["env"][0]["ratio"] == 2
    again = await served.http.post(url, json=body, headers=key)
    assert again.status_code == 201 and again.json() == fork
    other = await served.http.post(url, json={"step": 3}, headers=key)
    problem(other, 409, "idempotency-conflict")
    # Without a step it is the newest one; the name and the metadata are the source's.
    newest = (await served.http.post(url)).json()
    assert newest["lineage"]["step"] == 3 and newest["name"] == "forked"


async def test_a_fork_begins_at_once(served: Served, tmp_path: Path) -> None:
    """What its source once waited for is no concern of it."""
    first = (await served.start("goes-first"))["id"]
    source = (await served.start("waited", after=first))["id"]
    put_checkpoint(served.store, source, 2, tmp_path)
    answer = await served.http.post(f"/v1/runs/{source}/fork")
    assert answer.status_code == 201, answer.text
    saved = configs.document(served.store, answer.json()["id"])
    assert configs.document(served.store, source)["after"] == first and saved["after"] is None


async def test_a_fork_needs_no_version_that_its_source_began_with(
    served: Served, tmp_path: Path
) -> None:
    model = {"name": "run:parent-1a2b3c@3"}
    answer = await served.http.post("/v1/runs", json=config("of-a-version", model=model))
    assert problem(answer, 422, "invalid-config")["errors"][0]["message"] == "was removed"
    source = await served.start("child", model=model)
    assert source["lineage"] == {"source": "parent-1a2b3c", "step": 3, "kind": "model"}
    put_checkpoint(served.store, source["id"], 2, tmp_path)
    url = f"/v1/runs/{source['id']}/fork"
    answer = await served.http.post(url, json={"name": "of-a-version"})
    assert answer.status_code == 201, answer.text
    assert answer.json()["lineage"] == {"source": source["id"], "step": 2, "kind": "fork"}


async def test_a_refused_fork_points_into_its_own_body(served: Served, tmp_path: Path) -> None:
    source = (await served.start("forked"))["id"]
    url = f"/v1/runs/{source}/fork"
    found = problem(await served.http.post(url), 409, "no-checkpoint")["errors"][0]
    assert found["pointer"] == "/step" and "none" in found["message"]
    put_checkpoint(served.store, source, 3, tmp_path)
    found = problem(await served.http.post(url, json={"step": 4}), 409, "no-checkpoint")
    assert "its steps: 3" in found["errors"][0]["message"] and found["run_status"]
    for body, pointer in [
        ({"config": {"trainer": {"optim": {"lr": "fast"}}}}, "/config/trainer/optim/lr"),
        ({"config": {"max_stepz": 1}}, "/config/max_stepz"),
        ({"config": {"model": {"name": "other/model"}}}, "/config/model/name"),
        ({"config": {"model": {"dtype": "bfloat16"}}}, "/config/model"),
        ({"config": {"trainer": {"lora": {"rank": 8}}}}, "/config/trainer/lora"),
        ({"config": {"max_steps": 3}}, "/config/max_steps"),
        ({"config": {"after": source}}, "/config/after"),
        ({"config": {"train": {"env": {"chess": {"ratio": 1}}}}}, "/env/chess"),
        ({"name": "No Slug"}, "/name"),
        ({"name": "bad-env"}, "/config/train/env/0/id"),
    ]:
        reply = problem(await served.http.post(url, json=body), 422, "invalid-config")
        assert reply["errors"][0]["pointer"].endswith(pointer), reply
    reply = problem(await served.http.post(url, json={"steps": 3}), 422, "invalid-request")
    assert reply["errors"][0]["pointer"] == "/steps"
    problem(await served.http.post(url, content=b"[]", headers=JSON), 400, "unreadable-body")
    problem(await served.http.post("/v1/runs/nope/fork"), 404, "unknown-run")


@pytest.mark.parametrize(("before", "after"), [("store", "auto"), ("adapter", "store")])
async def test_a_fork_keeps_how_versions_of_an_adapter_are_exported(
    before: str, after: str
) -> None:
    env = {"env": [{"id": "a"}]}
    base = validate(
        {
            "max_steps": 9,
            "train": env,
            "trainer": {"lora": {}},
            "inference": {"transfer": before},
        }
    )
    with pytest.raises(ApiProblem) as refused:
        forked_config(base, ForkBody(config={"inference": {"transfer": after}}), 3)
    (error,) = refused.value.document.errors or []
    assert error.pointer == "/config/inference/transfer"
    same = {"store": "store", "adapter": "auto"}[before]
    forked_config(base, ForkBody(config={"inference": {"transfer": same}}), 3)


JSON = {"content-type": "application/json"}


async def test_a_damaged_checkpoint_is_reported_and_passed_over(
    served: Served, tmp_path: Path
) -> None:
    source = (await served.start("damaged"))["id"]
    for step in (2, 3):
        put_checkpoint(served.store, source, step, tmp_path)
    path = Path(served.store.path(served.store.require(keys.checkpoint(source, 3)).path))
    (path / "run.json").write_text("short")
    url = f"/v1/runs/{source}"
    listed = (await served.http.get(f"{url}/checkpoints")).json()["data"]
    assert [(item["step"], item["sound"]) for item in listed] == [(2, True), (3, False)]
    assert "run.json does not have its committed size" in listed[1]["problem"]
    (path / "run.json").write_text("run.json of 7")
    for query, sound in (("", True), ("?verify=true", False)):
        listed = (await served.http.get(f"{url}/checkpoints{query}")).json()["data"]
        assert listed[1]["sound"] is sound
    (path / "run.json").unlink()
    problem(await served.http.post(f"{url}/fork", json={"step": 3}), 409, "damaged-checkpoint")
    fork = (await served.http.post(f"{url}/fork")).json()
    assert fork["lineage"]["step"] == 2


async def test_config_shows_what_holds_and_every_revision(served: Served) -> None:
    run_id = (await served.start("configured"))["id"]
    await served.until(run_id, status="running")
    served.store.put_json(keys.config(run_id, 1), config("configured", max_steps=9))
    url = f"/v1/runs/{run_id}/config"
    shown = (await served.http.get(url)).json()
    assert [item["revision"] for item in shown["revisions"]] == [0, 1]
    assert shown["config"]["max_steps"] == 5 and shown["attempt"] == run_id
    await served.http.patch(f"/v1/runs/{run_id}", json={"dispatch": {"tasks_per_minute": 60}})
    shown = (await served.http.get(url)).json()
    assert shown["config"]["dispatch"]["tasks_per_minute"] == 60
    assert shown["changes"] == {"dispatch": {"tasks_per_minute": 60}}
    first = (await served.http.get(f"{url}?revision=0")).json()
    assert first["config"]["dispatch"]["tasks_per_minute"] is None
    assert (await served.http.get(f"{url}?revision=1")).json()["config"]["max_steps"] == 9
    assert 'name = "configured"' in (await served.http.get(f"{url}?format=toml")).text
    assert (
        "0, 1"
        in problem(await served.http.get(f"{url}?revision=2"), 404, "unknown-revision")["detail"]
    )
