"""Events: sent once and in order, over pages, reconnects, restarts of the API and of the run."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio import workflow
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.redact import redacted
from ratchet.api.app import create_app
from ratchet.api.schemas.events import EVENT_TYPES
from ratchet.api.services import core
from ratchet.api.temporal import histories
from ratchet.api.temporal.client import Temporal
from ratchet.worker.compat import Worker
from ratchet.workflows.protocol.messages import MEMO_KEY, TRAINING_RUN, RunInput
from ratchet.workflows.protocol.state import RunState
from tests.e2e import recorded
from tests.unit.api.conftest import (
    WITHIN_S,
    Served,
    asgi,
    connection,
    eventually,
    listening,
    put_checkpoint,
)
from tests.unit.api.routes.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")

SSE = {"accept": "text/event-stream"}


async def steps(served: Served, run_id: str, *numbers: int) -> None:
    handle = served.env.client.get_workflow_handle(run_id)
    for number in numbers:
        await handle.signal("make_step", number)
        await served.until(run_id, step=number)


async def everything(
    http: httpx.AsyncClient, run_id: str, limit: int = 100, path: str = "events", **asked: Any
) -> list[Any]:
    found: list[Any] = []
    asked["limit"] = limit
    while True:
        answer = await http.get(f"/v1/runs/{run_id}/{path}", params=asked)
        if answer.status_code == 503 and answer.headers["retry-after"]:
            await asyncio.sleep(0.05)
            continue
        page = answer.json()
        assert page["has_more"] == (page["next_after"] is not None)
        assert path != "events" or {event["type"] for event in page["data"]} <= set(EVENT_TYPES)
        found += page["data"]
        if not page["has_more"]:
            return found
        asked["after"] = page["next_after"]


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


async def test_what_happens_is_reported_in_order_and_pages_cover_it_once(served: Served) -> None:
    run_id = (await served.start("tells"))["id"]
    await served.until(run_id, status="running")
    handle = served.env.client.get_workflow_handle(run_id)
    await steps(served, run_id, 4, 5)
    down = HostReport("engine", 0, 1, "down", detail="killed; api_key=sk-verysecret123")
    await handle.signal("host_report", down)
    answer = await served.http.post(f"/v1/runs/{run_id}/pause", json={"reason": "lunch"})
    who = {"by": "", "request_id": answer.headers["x-request-id"]}
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
    assert asked[0] == {"asked": "pause", "mode": "drain", "reason": "lunch", **who}
    for limit in (1, 3):
        assert await everything(served.http, run_id, limit) == found
    warnings = (await served.http.get(f"/v1/runs/{run_id}/logs?level=warning")).json()["data"]
    assert [line["id"] for line in warnings] == [lost["id"]]
    text = (await served.http.get(f"/v1/runs/{run_id}/logs", headers={"accept": "text/plain"})).text
    assert len(text.splitlines()) == len(found) and "step 5 is done with reward 0.050" in text
    assert (await served.http.get(f"/v1/runs/{run_id}/logs?limit=2")).json()["has_more"] is True
    some = await everything(served.http, run_id, 2, types="run.step,server")
    assert some == [e for e in found if e["type"] in ("run.step", "server.down")] and len(some) == 4
    some = await everything(served.http, run_id, 1, types="run.step", order="desc")
    assert [event["data"]["step"] for event in some] == [5, 4, 3]
    unknown = await served.http.get(f"/v1/runs/{run_id}/events?types=run.step,run.sleep,servers")
    assert unknown.status_code == 422
    assert "there is no 'run.sleep' or 'servers'" in unknown.json()["detail"]
    assert "types run.created" in unknown.json()["detail"]


async def test_the_reason_of_every_verb_is_kept(served: Served, tmp_path: Path) -> None:
    run_id = (await served.start("reasons"))["id"]
    url = f"/v1/runs/{run_id}"

    async def ask(verb: str, status: str) -> None:
        answer = await served.http.post(f"{url}/{verb}", json={"reason": f"{verb} at {status}"})
        assert answer.status_code == 202, answer.text
        await served.until(run_id, status=status)

    await served.until(run_id, status="running")
    await ask("checkpoint", "running")
    await ask("eval", "running")
    secret = {"reason": "password=hunter2"}
    assert (await served.http.post(f"{url}/eval", json=secret)).status_code == 202
    await ask("pause", "paused")
    await ask("resume", "running")
    await ask("cancel", "cancelled")
    put_checkpoint(served.store, run_id, 2, tmp_path)
    await ask("resume", "running")
    await ask("stop", "succeeded")
    found = await everything(served.http, run_id, types="run.asked,run.resumed")
    assert [event["data"]["reason"] for event in found] == [
        "checkpoint at running",
        "eval at running",
        "password=[hidden]",
        "pause at paused",
        "resume at running",
        "cancel at cancelled",
        "resume at running",
        "stop at succeeded",
    ]
    assert found[-2]["message"] == "the run is resumed: attempt 2: resume at running"
    # Redacted when it was written, not only when it is read.
    handle = served.env.client.get_workflow_handle(run_id, first_execution_run_id=None)
    history = await handle.fetch_history()
    assert "hunter2" not in str(history.events)


async def test_a_stream_goes_on_where_it_broke_over_a_killed_api(served: Served) -> None:
    run_id = (await served.start("streams"))["id"]
    await served.until(run_id, step=3)
    result: list[dict[str, Any]] = []
    for lap in range(3):
        # Each lap is served by an API process that knows nothing of the one before.
        async with listening(create_app(served.settings, connection(served.env))) as http:
            last = {"last_event_id": result[-1]["id"]} if result else {}
            watching = asyncio.create_task(streamed(http, run_id, 5 if not result else 2, **last))
            await steps(served, run_id, *range(4 + lap * 3, 7 + lap * 3))
            result += await asyncio.wait_for(watching, WITHIN_S)
    await served.http.post(f"/v1/runs/{run_id}/stop")
    await served.until(run_id, status="succeeded")
    async with listening(create_app(served.settings, connection(served.env))) as http:
        result += await streamed(http, run_id, None, last_event_id=result[-1]["id"])
        over = await http.get(
            f"/v1/runs/{run_id}/events", headers={**SSE, "last-event-id": result[-1]["id"]}
        )
        assert over.status_code == 204
    assert result == await everything(served.http, run_id)
    assert [e["data"]["step"] for e in result if e["type"] == "run.step"] == list(range(3, 13))


async def test_a_stream_that_ended_with_the_run_does_not_open_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the API has cached of the run still says that it is running."""
    run_id = (await served.start("over"))["id"]
    await served.until(run_id, step=3)
    monkeypatch.setattr(core, "FRESH_S", WITHIN_S)
    async with listening(create_app(served.settings, connection(served.env))) as http:
        assert (await http.get(f"/v1/runs/{run_id}")).json()["status"] == "running"
        await served.http.post(f"/v1/runs/{run_id}/stop")
        found = await streamed(http, run_id, None)
        assert found[-1]["type"] == "run.ended"
        assert (await http.get(f"/v1/runs/{run_id}")).json()["status"] == "running"
        last = {**SSE, "last-event-id": found[-1]["id"]}
        again = await http.get(f"/v1/runs/{run_id}/events", headers=last)
        assert again.status_code == 204
        # Whoever heard of the end finds a run that has ended.
        assert (await http.get(f"/v1/runs/{run_id}")).json()["status"] == "succeeded"


async def test_many_watchers_hear_the_same_as_it_happens(served: Served) -> None:
    run_id = (await served.start("watched"))["id"]
    await served.until(run_id, step=3)
    async with listening(create_app(served.settings, connection(served.env))) as http:
        before = await everything(http, run_id)
        watching = [asyncio.create_task(streamed(http, run_id, len(before) + 3)) for _ in range(20)]
        ready = asyncio.Event()
        late = asyncio.create_task(latest(http, run_id, ready))
        await asyncio.wait_for(ready.wait(), WITHIN_S)
        await steps(served, run_id, 4, 5, 6)
        heard = await asyncio.wait_for(asyncio.gather(*watching), WITHIN_S)
        assert all(events == heard[0] for events in heard)
        assert heard[0][: len(before)] == before
        # One who asks only for what is to come gets a cursor first, and then just that.
        hello, first = await asyncio.wait_for(late, WITHIN_S)
        assert hello == before[-1]["id"] and first == heard[0][len(before)]["id"]
    await served.env.client.get_workflow_handle(run_id).terminate()


async def latest(http: httpx.AsyncClient, run_id: str, ready: asyncio.Event) -> tuple[str, str]:
    """The cursor that comes first, which sets `ready`, and the id of the next event."""
    ids: list[str] = []
    async with http.stream("GET", f"/v1/runs/{run_id}/events?after=latest", headers=SSE) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
                ready.set()
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
    # That the run goes on is known a moment later.
    whole = await eventually(
        lambda: everything(served.http, run_id, 2), lambda found: len(found) >= len(before) + 2
    )
    assert whole[: len(before) + 2] == before + after
    for limit in (2, 100):
        assert await everything(served.http, run_id, limit, order="desc") == whole[::-1]
    # A cursor leads both ways, over the ends of executions and attempts.
    for place in (0, len(before) - 1, len(before), len(whole) - 1):
        cursor = whole[place]["id"]
        assert await everything(served.http, run_id, 3, after=cursor) == whole[place + 1 :]
        older = await everything(served.http, run_id, 3, after=cursor, order="desc")
        assert older == whole[:place][::-1]
    ids = [event["id"] for event in whole]
    assert len(ids) == len(set(ids)) and len({event.split(".")[0] for event in ids}) == 4


async def test_cursors_that_are_none_are_404(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is waited for: a test that did would end with its time-out.
    monkeypatch.setattr(histories, "CATCH_UP_S", 600.0)
    run_id = (await served.start("cursors"))["id"]
    newest = (await everything(served.http, run_id))[-1]["id"].split(".")[0]
    unknown = "00000000-0000-0000-0000-000000000000.5.0"
    for cursor in ("nope", "1.2", unknown, f"{'z' * 36}.1.0", f"{newest}.-1.0", f"{newest}.{9**9}"):
        for path in ("events", "logs"):
            answer = await served.http.get(f"/v1/runs/{run_id}/{path}?after={cursor}")
            problem(answer, 404, "unknown-cursor")
        # A stream is refused like a page, and before it begins.
        answer = await served.http.get(f"/v1/runs/{run_id}/events?after={cursor}", headers=SSE)
        problem(answer, 404, "unknown-cursor")
    for asked, headers in (("order=desc", SSE), ("order=desc&after=latest", {}), ("order=up", {})):
        answer = await served.http.get(f"/v1/runs/{run_id}/events?{asked}", headers=headers)
        problem(answer, 422, "invalid-request")
    problem(await served.http.get("/v1/runs/nope/events", headers=SSE), 404, "unknown-run")
    problem(await served.http.get(f"/v1/runs/{run_id}/events?limit=0"), 422, "invalid-request")
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        assert (await http.get(f"/v1/runs/{run_id}/events")).json()["data"]


async def test_a_cursor_beyond_the_end_is_404(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = (await served.start("beyond"))["id"]
    newest = (await everything(served.http, run_id))[-1]["id"].split(".")[0]
    # Nothing is waited for, whichever number was made up.
    monkeypatch.setattr(histories, "CATCH_UP_S", 600.0)
    for number in (9999, 10**15):
        beyond = await served.http.get(f"/v1/runs/{run_id}/events?after={newest}.{number}.0")
        problem(beyond, 404, "unknown-cursor")


async def test_a_page_that_is_not_read_in_time_says_that_there_is_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = (await served.start("goes-on"))["id"]
    await served.until(run_id, step=3)
    monkeypatch.setattr(histories, "CATCH_UP_S", 0.1)
    app = create_app(served.settings, connection(served.env))
    async with asgi(app) as http:
        before = await everything(http, run_id)
        with monkeypatch.context() as slow:
            # Nothing more is read for now, nor anything that another process received.
            app.state.services.histories.close()
            slow.setattr(histories.Reader, "start", lambda reader: None)
            await steps(served, run_id, 4, 5, 6)
            some = (await http.get(f"/v1/runs/{run_id}/events")).json()
            assert (some["data"], some["next_after"]) == (before, before[-1]["id"])
            for asked in ("order=desc", f"after={before[-1]['id']}", "after=latest"):
                answer = await http.get(f"/v1/runs/{run_id}/events?{asked}")
                problem(answer, 503, "history-unread")
                assert answer.headers["retry-after"] == "1"
        rest = await everything(http, run_id, after=some["next_after"])
    assert [*before, *rest] == await everything(served.http, run_id) and len(rest) == 3


async def test_a_page_passes_over_no_more_than_it_may(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = (await served.start("fails"))["id"]
    await served.until(run_id, status="failed")
    whole = await everything(served.http, run_id)
    monkeypatch.setattr(histories, "MOST_LOOKED_AT", 2)
    path = f"/v1/runs/{run_id}/logs?level=error"
    first = (await served.http.get(path)).json()
    assert (first["data"], first["has_more"]) == ([], True)
    assert first["next_after"] == whole[1]["id"]
    found = await everything(served.http, run_id, path="logs", level="error")
    assert [line["id"] for line in found] == [e["id"] for e in whole if e["level"] == "error"]
    text = await served.http.get(path, headers={"accept": "text/plain"})
    assert f'after={whole[1]["id"]}>; rel="next"' in text.headers["link"]


@workflow.defn(name=TRAINING_RUN)
class JustContinued:
    """A run whose newest execution has no events yet."""

    @workflow.run
    async def run(self, arg: RunInput) -> None:
        if arg.state is None:
            workflow.upsert_memo({MEMO_KEY: {"status": "running", "step": 1}})
            workflow.continue_as_new(replace(arg, state=RunState()))
        await workflow.wait_condition(lambda: False)


async def test_latest_is_the_end_of_a_run_that_just_continued_as_new(served: Served) -> None:
    client, run_id = served.env.client, "just-continued-1a2b3c"
    worker = Worker(
        client,
        task_queue=run_id,
        workflows=[JustContinued],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        handle = await client.start_workflow(
            TRAINING_RUN, RunInput(run_id, {}), id=run_id, task_queue=run_id
        )
        while (await handle.describe()).run_id == handle.first_execution_run_id:
            await asyncio.sleep(0.05)
        before = await everything(served.http, run_id)
        assert before and {e["id"].split(".")[0] for e in before} == {handle.first_execution_run_id}
        assert await everything(served.http, run_id, after="latest") == []
        ids: list[str] = []
        path = f"/v1/runs/{run_id}/events?after=latest"
        async with (
            listening(create_app(served.settings, connection(served.env))) as http,
            asyncio.timeout(WITHIN_S),
            http.stream("GET", path, headers=SSE) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    ids.append(line.removeprefix("id: "))
                    down = HostReport("engine", 0, 1, "down", detail="killed")
                    await handle.signal("host_report", down)
                if len(ids) == 2:
                    break
        hello, first = ids
        news = await everything(served.http, run_id, after=hello)
        assert hello.endswith(".0.0") and news[0]["id"] == first
        older = await everything(served.http, run_id, order="desc", after=hello)
        assert older == before[::-1]
        await handle.terminate()


async def test_a_stream_says_that_it_is_there_while_temporal_is_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "KEEP_ALIVE_S", 0.2)
    run_id = (await served.start("away"))["id"]
    await served.until(run_id, step=3)
    temporal = Temporal(connection(served.env), timeout_s=5)
    execution = await temporal.describe(run_id)
    assert execution is not None
    followed = histories.Histories(temporal)
    stream = await followed.stream(execution, await followed.latest(execution))
    reader = followed._reader(run_id, execution.run)

    async def fail() -> None:
        # What a reader does again and again while its calls fail.
        while True:
            reader._notify()
            await asyncio.sleep(0.02)

    failing = asyncio.create_task(fail())
    try:
        for _ in range(2):
            said = await asyncio.wait_for(anext(stream), WITHIN_S)
            assert said.startswith(b":")
    finally:
        failing.cancel()
        followed.close()


async def test_the_newest_of_a_long_run_comes_first(served: Served) -> None:
    run_id, count = "recorded-1a2b3c", 1200
    queues = Queues.prefixed("recorded")
    await recorded.show(served.env.client, queues, run_id, steps=count, ended=time.time())
    page = (await served.http.get(f"/v1/runs/{run_id}/events?order=desc&limit=1000")).json()
    kinds = [event["type"] for event in page["data"]]
    assert kinds[:2] == ["server.up", "server.down"] and page["has_more"]
    assert next(e["data"]["step"] for e in page["data"] if e["type"] == "run.step") == count
    marks = await everything(
        served.http, run_id, 1000, order="desc", types="run.created,server,run.status"
    )
    kinds = [event["type"] for event in marks]
    assert kinds == ["server.up", "server.down", "run.status", "run.status", "run.created"]
    result = await everything(served.http, run_id, 1000, types="run.step")
    assert [event["data"]["step"] for event in result] == list(range(1, count + 1))
    assert len({event["id"].split(".")[0] for event in result}) == 5


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
