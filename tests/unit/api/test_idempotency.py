"""`Idempotency-Key`, filters by metadata, and the plan of a dry run."""

import asyncio

import pytest

from api.app import create_app
from api.plan import plan_of
from configs.load import validate
from tests.unit.api.conftest import Served, asgi, config, connection
from tests.unit.api.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ids(served: Served, query: str) -> list[str]:
    for _ in range(40):
        page = (await served.http.get(f"/v1/runs?limit=100&{query}")).json()
        if page["data"]:
            break
        await asyncio.sleep(0.05)
    return [run["id"] for run in page["data"]]


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


async def test_runs_are_found_by_their_metadata(served: Served) -> None:
    made = [
        (await served.start("tagged", metadata={"team": team, "a[b]": "c d"}))["id"]
        for team in ("red", "blue")
    ]
    assert await ids(served, "metadata[team]=red") == [made[0]]
    assert await ids(served, "metadata[a%5Bb%5D]=c%20d") == made[::-1]
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
