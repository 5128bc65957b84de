"""`Idempotency-Key`, filters by metadata, and the plan of a dry run."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable
from ratchet.api.app import create_app
from ratchet.api.client import Ratchet
from ratchet.api.schemas.keys import add, load_keys
from ratchet.api.services.launch import plan_of
from ratchet.configs.load import validate
from tests.unit.api.client.support import breaking, serving
from tests.unit.api.conftest import Served, asgi, config, connection, eventually
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_runs import signals

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ids(served: Served, query: str, count: int = 1) -> list[str]:
    """The runs that are found, once they are at least so many."""

    async def look() -> list[str]:
        page = (await served.http.get(f"/v1/runs?limit=100&{query}")).json()
        return [run["id"] for run in page["data"]]

    return await eventually(look, lambda found: len(found) >= count)


async def test_the_same_key_and_body_are_one_run_and_one_reply(served: Served) -> None:
    body, key = config("once"), {"Idempotency-Key": "a key: 1"}
    first = await served.http.post("/v1/runs", json=body, headers=key)
    assert first.status_code == 201
    await served.until(first.json()["id"], status="running")
    # Another process, that knows nothing of the first request.
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        again = await http.post("/v1/runs", json=body, headers=key)
    assert again.status_code == 201 and again.json() == first.json()
    assert again.headers["location"] == first.headers["location"]
    other = await served.http.post("/v1/runs", json=config("once", seed=1), headers=key)
    reply = problem(other, 409, "idempotency-conflict")
    assert first.json()["id"] in reply["detail"]
    dry = await served.http.post("/v1/runs?dry_run=true", json=body, headers=key)
    assert dry.status_code == 200


async def test_at_the_same_moment_they_are_one_run_too(served: Served) -> None:
    body, key = config("twin", metadata={"twin": "yes"}), {"Idempotency-Key": "twins"}
    answers = await asyncio.gather(
        *(served.http.post("/v1/runs", json=body, headers=key) for _ in range(4))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert all(answer.json() == answers[0].json() for answer in answers)
    assert await ids(served, "metadata[twin]=yes") == [answers[0].json()["id"]]


async def test_two_callers_may_choose_the_same_key(served: Served, tmp_path: Path) -> None:
    callers = {
        name: add(tmp_path / "keys", name, ("read", "write"), 6000) for name in ("ana", "ben")
    }
    guarded = replace(served.settings, keys=load_keys(None, tmp_path / "keys"))
    made: dict[str, list[str]] = {}
    async with asgi(create_app(guarded, connection(served.env))) as http:
        for name, key in callers.items():
            headers = {"Idempotency-Key": "first", "authorization": f"Bearer {key}"}
            body = config("mine", metadata={"owner": "both"})
            answers = [await http.post("/v1/runs", json=body, headers=headers) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [201, 201], answers[0].text
            made[name] = [answer.json()["id"] for answer in answers]
    assert made["ana"][0] == made["ana"][1] != made["ben"][0] == made["ben"][1]


async def test_a_refused_request_uses_no_key_up(served: Served) -> None:
    key = {"Idempotency-Key": "second try"}
    bad = await served.http.post("/v1/runs", json=config(max_steps=0), headers=key)
    problem(bad, 422, "invalid-config")
    bad = await served.http.post("/v1/runs", json=config("bad-env"), headers=key)
    problem(bad, 422, "invalid-config")
    good = await served.http.post("/v1/runs", json=config(), headers=key)
    assert good.status_code == 201
    for text in ("", "x" * 256):
        answer = await served.http.post(
            "/v1/runs", json=config(), headers={"Idempotency-Key": text}
        )
        problem(answer, 400, "bad-idempotency-key")


async def test_every_verb_with_a_key_has_one_effect_and_one_reply(served: Served) -> None:
    run_id = (await served.start("verbs"))["id"]
    await served.until(run_id, status="running")
    url = f"/v1/runs/{run_id}"
    document = (await served.http.get("/openapi.json")).json()
    verbs: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("eval", {"envs": ["guess-hard"]}, {}),
        ("checkpoint", {"reason": "a"}, {}),
        ("pause", {"mode": "cancel"}, {"mode": "drain"}),
        ("resume", {}, {"reason": "b"}),
        ("stop", {"reason": "c"}, {"reason": "d"}),
    ]
    for number, (verb, body, other) in enumerate(verbs, 1):
        operation = document["paths"][f"/v1/runs/{{run_id}}/{verb}"]["post"]
        assert "Idempotency-Key" in [result["name"] for result in operation["parameters"]]
        key = {"Idempotency-Key": f"key of {verb}"}
        bad = await served.http.post(f"{url}/{verb}", json={"nope": 1}, headers=key)
        problem(bad, 422, "invalid-request")
        answers = await asyncio.gather(
            *(served.http.post(f"{url}/{verb}", json=body, headers=key) for _ in range(3))
        )
        await signals(served, run_id, number)
        # Also later, and of another process.
        async with asgi(create_app(served.settings, connection(served.env))) as http:
            answers.append(await http.post(f"{url}/{verb}", json=body, headers=key))
        assert [answer.status_code for answer in answers] == [202] * 4, answers[-1].text
        assert all(answer.json() == answers[0].json() for answer in answers)
        refused = await served.http.post(f"{url}/{verb}", json=other, headers=key)
        assert run_id in problem(refused, 409, "idempotency-conflict")["detail"]
    await served.until(run_id, status="succeeded")
    heard = [name for name, _ in await signals(served, run_id, 5)]
    assert heard == ["trigger_eval", "checkpoint", "pause", "resume", "stop"]
    again = await served.http.post(
        f"{url}/stop", json={"reason": "c"}, headers={"Idempotency-Key": "key of stop"}
    )
    assert again.status_code == 202 and again.json()["status"] == "stopping"


async def test_an_eval_whose_answer_was_lost_is_requested_once(served: Served) -> None:
    run_id = (await served.start("verbs"))["id"]
    await served.until(run_id, status="running")
    async with serving(served) as address, breaking(address, 0, 40) as way:
        with Ratchet(way.address) as client:
            await asyncio.to_thread(client.runs.eval, run_id, envs=["guess-hard"])
            assert way.broken == 2
            # Asked anew it is another one.
            await asyncio.to_thread(client.runs.eval, run_id, envs=["guess-hard"])
            await asyncio.to_thread(client.runs.stop, run_id)
    heard = [name for name, _ in await signals(served, run_id, 3)]
    assert heard == ["trigger_eval", "trigger_eval", "stop"]


async def test_a_cancel_with_a_key_is_answered_alike(served: Served) -> None:
    run_id = (await served.start("verbs"))["id"]
    await served.until(run_id, status="running")
    url, key = f"/v1/runs/{run_id}/cancel", {"Idempotency-Key": "cancel"}
    first = await served.http.post(url, json={}, headers=key)
    await served.until(run_id, status="cancelled")
    again = await served.http.post(url, json={}, headers=key)
    assert again.json() == first.json() and again.json()["status"] == "stopping"
    other = await served.http.post(url, json={"reason": "x"}, headers=key)
    problem(other, 409, "idempotency-conflict")


async def test_a_store_that_cannot_be_written_keeps_nobody_from_ending_a_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = (await served.start("verbs"))["id"]
    await served.until(run_id, status="running")

    def full(*_: object, **__: object) -> None:
        raise StoreUnavailable(28, "No space left on device")

    async with asgi(create_app(served.settings, connection(served.env))) as http:
        with monkeypatch.context() as patch:
            patch.setattr(ArtifactStore, "put_json", full)
            key = {"Idempotency-Key": "full"}
            for _ in range(2):
                answer = await http.post(f"/v1/runs/{run_id}/checkpoint", json={}, headers=key)
                assert answer.status_code == 202, answer.text
            answer = await http.post(f"/v1/runs/{run_id}/stop", json={}, headers=key)
            assert answer.status_code == 202, answer.text
    await served.until(run_id, status="succeeded")
    assert [name for name, _ in await signals(served, run_id, 2)] == ["checkpoint", "stop"]


async def test_runs_are_found_by_their_metadata(served: Served) -> None:
    made = [
        (await served.start("tagged", metadata={"team": team, "a[b]": "c d"}))["id"]
        for team in ("red", "blue")
    ]
    assert await ids(served, "metadata[team]=red") == [made[0]]
    assert await ids(served, "metadata[a%5Bb%5D]=c%20d", 2) == made[::-1]
    assert await ids(served, "metadata[a%5Bb%5D]=c%20d&metadata[team]=blue") == [made[1]]
    page = (await served.http.get("/v1/runs?metadata[team]=green")).json()
    assert page["data"] == []


async def test_a_plan_counts_what_a_config_would_do(served: Served) -> None:
    plan = plan_of(
        validate(
            config(
                max_steps=25,
                train={
                    "batch_size": 48,
                    "env": [
                        {"id": "a", "ratio": 2, "group_size": 8},
                        {"id": "b", "ratio": 1, "group_size": 2},
                    ],
                },
                eval={"interval": 10, "env": [{"id": "a", "num_examples": 6, "group_size": 2}]},
                checkpoint={"interval": 10},
                inference={"engines": 2},
            )
        )
    )
    # Three groups in turn are 8 + 8 + 2 rollouts, so that 48 rollouts are 8 groups.
    assert plan.groups_per_step == {"a": 5.33, "b": 2.67}
    assert (plan.train_rollouts, plan.permits, plan.checkpoints) == (1200, 48, 3)
    (evals,) = plan.evals
    assert (evals.count, evals.rollouts) == (4, 12)
    assert plan.servers == {
        "trainer": ["trainer"],
        "engine": ["engine-0", "engine-1"],
        "env": ["a", "b"],
    }
    answer = await served.http.post("/v1/runs?dry_run=true", json=config())
    assert answer.json()["plan"]["algorithms"] == {"reverse-text": "grpo"}
