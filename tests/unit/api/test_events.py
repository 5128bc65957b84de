"""Events: told once and in order, over pages, reconnects, restarts of the API and of the run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.contracts.hosting import HostReport
from api.app import create_app
from api.redact import redacted
from tests.unit.api.conftest import Served, asgi, connection, listening, put_checkpoint
from tests.unit.api.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")

SSE = {"accept": "text/event-stream"}


async def steps(served: Served, run_id: str, *numbers: int) -> None:
    handle = served.env.client.get_workflow_handle(run_id)
    for number in numbers:
        await handle.signal("make_step", number)
        await served.until(run_id, step=number)


async def everything(http: httpx.AsyncClient, run_id: str, limit: int = 100) -> list[Any]:
    found: list[Any] = []
    cursor = ""
    while True:
        page = (await http.get(f"/v1/runs/{run_id}/events?limit={limit}{cursor}")).json()
        found += page["data"]
        if not page["has_more"]:
            return found
        cursor = f"&after={found[-1]['id']}"


async def streamed(
    http: httpx.AsyncClient, run_id: str, count: int | None, **headers: str
) -> list[dict[str, Any]]:
    """The next `count` events of the stream; None: all until it ends."""
    found: list[dict[str, Any]] = []
    given = {**SSE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with http.stream("GET", f"/v1/runs/{run_id}/events", headers=given) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        block: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                block[name] = value
                continue
            if "data" in block:
                event = json.loads(block["data"])
                assert (block["id"], block["event"]) == (event["id"], event["type"])
                found.append(event)
            block = {}
            if len(found) == count:
                break
    return found


async def test_what_happens_is_told_in_order_and_pages_cover_it_once(served: Served) -> None:
    run_id = (await served.start("tells"))["id"]
    await served.until(run_id, status="running")
    handle = served.env.client.get_workflow_handle(run_id)
    await steps(served, run_id, 4, 5)
    down = HostReport("engine", 0, 1, "down", detail="killed; api_key=sk-verysecret123")
    await handle.signal("host_report", down)
    await served.http.post(f"/v1/runs/{run_id}/pause", json={"reason": "lunch"})
    await served.until(run_id, status="paused")
    await served.http.post(f"/v1/runs/{run_id}/stop")
    await served.until(run_id, status="succeeded")
    found = await everything(served.http, run_id)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["run.created", "run.status"] and kinds[-1] == "run.ended"
    assert [e["data"]["step"] for e in found if e["type"] == "run.step"] == [3, 4, 5]
    assert {"run.checkpoint", "run.eval", "run.waiting", "server.down", "run.asked"} <= set(kinds)
    assert [e["data"]["status"] for e in found if e["type"] == "run.status"] == [
        "queued",
        "running",
        "paused",
        "stopping",
        "succeeded",
    ]
    lost = next(event for event in found if event["type"] == "server.down")
    assert lost["level"] == "warning" and lost["source"] == "engine"
    assert "killed" in lost["message"] and "verysecret" not in json.dumps(found)
    asked = [e["data"] for e in found if e["type"] == "run.asked"]
    assert asked[0] == {"asked": "pause", "mode": "drain", "reason": "lunch"}
    for limit in (1, 3):
        assert await everything(served.http, run_id, limit) == found
    warnings = (await served.http.get(f"/v1/runs/{run_id}/logs?level=warning")).json()["data"]
    assert [line["id"] for line in warnings] == [lost["id"]]
    text = (await served.http.get(f"/v1/runs/{run_id}/logs", headers={"accept": "text/plain"})).text
    assert len(text.splitlines()) == len(found) and "step 5 is done with reward 0.050" in text
    assert (await served.http.get(f"/v1/runs/{run_id}/logs?limit=2")).json()["has_more"] is True


async def test_a_stream_goes_on_where_it_broke_over_a_killed_api(served: Served) -> None:
    run_id = (await served.start("streams"))["id"]
    await served.until(run_id, step=3)
    told: list[dict[str, Any]] = []
    for lap in range(3):
        # Each lap is served by an API process that knows nothing of the one before.
        async with listening(create_app(served.settings, connection(served.env))) as http:
            last = {"last_event_id": told[-1]["id"]} if told else {}
            watching = asyncio.create_task(streamed(http, run_id, 5 if not told else 2, **last))
            await steps(served, run_id, *range(4 + lap * 3, 7 + lap * 3))
            told += await asyncio.wait_for(watching, 20)
    await served.http.post(f"/v1/runs/{run_id}/stop")
    await served.until(run_id, status="succeeded")
    async with listening(create_app(served.settings, connection(served.env))) as http:
        told += await streamed(http, run_id, None, last_event_id=told[-1]["id"])
        over = await http.get(
            f"/v1/runs/{run_id}/events", headers={**SSE, "last-event-id": told[-1]["id"]}
        )
        assert over.status_code == 204
    assert told == await everything(served.http, run_id)
    assert [e["data"]["step"] for e in told if e["type"] == "run.step"] == list(range(3, 13))


async def test_many_watchers_hear_the_same_as_it_happens(served: Served) -> None:
    run_id = (await served.start("watched"))["id"]
    await served.until(run_id, step=3)
    async with listening(create_app(served.settings, connection(served.env))) as http:
        before = await everything(http, run_id)
        watching = [asyncio.create_task(streamed(http, run_id, len(before) + 3)) for _ in range(20)]
        late = asyncio.create_task(latest(http, run_id))
        await asyncio.sleep(0.3)
        await steps(served, run_id, 4, 5, 6)
        heard = await asyncio.wait_for(asyncio.gather(*watching), 20)
        assert all(events == heard[0] for events in heard)
        assert heard[0][: len(before)] == before
        # One who asks only for what is to come gets a cursor first, and then just that.
        hello, first = await asyncio.wait_for(late, 20)
        assert hello == before[-1]["id"] and first == heard[0][len(before)]["id"]
    await served.env.client.get_workflow_handle(run_id).terminate()


async def latest(http: httpx.AsyncClient, run_id: str) -> tuple[str, str]:
    ids: list[str] = []
    async with http.stream("GET", f"/v1/runs/{run_id}/events?after=latest", headers=SSE) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
            if len(ids) == 2:
                break
    return ids[0], ids[1]


async def test_events_go_on_over_continue_as_new_and_resume(served: Served, tmp_path: Path) -> None:
    run_id = (await served.start("goes-on"))["id"]
    await served.until(run_id, step=3)
    await served.http.post(f"/v1/runs/{run_id}/cancel")
    await served.until(run_id, status="cancelled")
    put_checkpoint(served.store, run_id, 2, tmp_path)
    before = await everything(served.http, run_id)
    async with listening(create_app(served.settings, connection(served.env))) as http:
        assert [e["type"] for e in before].count("run.created") == 1
        assert [e["data"]["step"] for e in before if e["type"] == "run.step"] == [1, 3]
        await served.http.post(f"/v1/runs/{run_id}/resume")
        await served.until(run_id, status="running")
        after = await streamed(http, run_id, 2, last_event_id=before[-1]["id"])
    assert after[0]["type"] == "run.resumed" and after[0]["data"]["attempt"] == 2
    whole = await everything(served.http, run_id, 2)
    assert whole[: len(before) + 2] == before + after
    ids = [event["id"] for event in whole]
    assert len(ids) == len(set(ids)) and len({event.split(".")[0] for event in ids}) == 4


async def test_cursors_that_are_none_are_404(served: Served) -> None:
    run_id = (await served.start("cursors"))["id"]
    for cursor in ("nope", "1.2", "00000000-0000-0000-0000-000000000000.5.0"):
        for path in ("events", "logs"):
            answer = await served.http.get(f"/v1/runs/{run_id}/{path}?after={cursor}")
            problem(answer, 404, "unknown-cursor")
    problem(await served.http.get("/v1/runs/nope/events", headers=SSE), 404, "unknown-run")
    problem(await served.http.get(f"/v1/runs/{run_id}/events?limit=0"), 422, "invalid-request")
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        assert (await http.get(f"/v1/runs/{run_id}/events")).json()["data"]


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("OPENAI_API_KEY=sk-abcdef123456 is wrong", "abcdef"),
        ('{"password": "hunter2"}', "hunter2"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def"),
        ("postgres://user:hunter2@db/x", "hunter2"),
        ("token hf_AbCdEfGh1234 refused", "AbCdEfGh"),
    ],
)
async def test_secrets_are_taken_out_of_text(text: str, gone: str) -> None:
    assert gone not in redacted(text) and "[hidden]" in redacted(text)
    assert redacted("max_tokens: 64 of 128 at step 3") == "max_tokens: 64 of 128 at step 3"
