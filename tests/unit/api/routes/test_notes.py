"""Notes of runs: they need no workflow, and outlive it."""

from typing import Any

import httpx
import pytest

from ratchet.activities.storage import keys
from ratchet.api.app import create_app
from tests.unit.api.conftest import Served, asgi, connection
from tests.unit.api.leaving import leave
from tests.unit.api.routes.test_control import ended
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_runs import signals

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "lr halved\n\tafter the jump <b>ß🙂</b>"


async def put(served: Served, run_id: str, body: Any) -> httpx.Response:
    return await served.http.put(f"/v1/runs/{run_id}/note", json=body)


async def test_a_note_is_shown_wherever_its_run_is(served: Served) -> None:
    going, over = (await served.start("goes"))["id"], await ended(served)
    await served.until(going, status="running")
    for run_id in (going, over):
        assert (await served.http.get(f"/v1/runs/{run_id}")).json()["note"] == ""
        for _ in range(2):
            answer = await put(served, run_id, {"note": f"  {TEXT}\n"})
            assert answer.status_code == 200 and answer.json()["note"] == TEXT
        assert (await served.http.get(f"/v1/runs/{run_id}")).json()["note"] == TEXT
    # Another API process has read nothing of it yet.
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        data = (await http.get("/v1/runs?limit=100")).json()["data"]
    assert {run["id"] for run in data if run["note"] == TEXT} >= {going, over}
    assert (await put(served, over, {"note": ""})).json()["note"] == ""
    assert served.store.read_live(keys.note(over)) is None
    assert (await served.http.get(f"/v1/runs/{going}")).json()["note"] == TEXT
    # No workflow heard of it: what is sent after it is the first signal.
    await served.http.post(f"/v1/runs/{going}/stop")
    assert [name for name, _ in await signals(served, going, 1)] == ["stop"]


async def test_a_run_that_temporal_has_forgotten_has_a_note(served: Served) -> None:
    leave(served.store, "forgotten-9a2b3c", steps=2)
    assert (await put(served, "forgotten-9a2b3c", {"note": TEXT})).json()["note"] == TEXT
    assert (await served.http.get("/v1/runs/forgotten-9a2b3c")).json()["note"] == TEXT


async def test_what_is_no_plain_text_of_some_length_is_refused(served: Served) -> None:
    run_id = await ended(served)
    await put(served, run_id, {"note": TEXT})
    for body, said in (
        ({"note": "x" * 2001}, "at most 2000 characters"),
        ({"note": "a\rb"}, "U+000D at position 1 is not allowed"),
        ({"note": "\x00"}, "U+0000"),
        ({"note": "a\x9bb"}, "U+009B"),
        ({"note": None}, "valid string"),
        ({}, "Field required"),
        ({"note": "x", "text": "y"}, "valid keys: note"),
    ):
        errors = problem(await put(served, run_id, body), 422, "invalid-request")["errors"]
        assert said in errors[0]["message"], body
    problem(await put(served, run_id, ["x"]), 400, "unreadable-body")
    problem(await put(served, "nope-000000", {"note": "x"}), 404, "unknown-run")
    assert (await served.http.get(f"/v1/runs/{run_id}")).json()["note"] == TEXT
    assert (await put(served, run_id, {"note": "ß" * 2000})).status_code == 200


async def test_a_run_that_is_deleted_meanwhile_leaves_no_note(served: Served) -> None:
    run_id = await ended(served)
    # A deletion removes this first; Temporal still knows the run.
    served.store.delete_folder(keys.config(run_id) + ".commit")
    assert (await served.http.get(f"/v1/runs/{run_id}")).status_code == 200
    problem(await put(served, run_id, {"note": TEXT}), 404, "unknown-run")
    assert served.store.read_live(keys.note(run_id)) is None
