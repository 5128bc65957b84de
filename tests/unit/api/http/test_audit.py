"""Who did what, to which run, and how it went: in the log, in the run's events, in the metrics."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from ratchet.api.app import create_app
from ratchet.api.http import audit
from ratchet.api.http.audit import Caller, record_of
from ratchet.api.schemas import keys as api_keys
from tests.unit.api.conftest import Served, asgi, config, connection, eventually
from tests.unit.api.http.test_security import AWAY, bearer, settings
from tests.unit.api.routes.test_events import everything


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == "ratchet.audit"]


def test_what_is_refused_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ratchet.audit")
    monkeypatch.setattr(audit, "MOST_REFUSED", 30)
    reader = api_keys.add(tmp_path / "api_keys.json", "eyes", ["read"], 6000)
    app = TestClient(create_app(settings(tmp_path), AWAY))
    denied = app.post("/v1/runs/some-run/stop", headers=bearer(reader))
    assert denied.status_code == 403
    for _ in range(9):
        assert app.get("/v1/runs", headers=bearer("rk_guess")).status_code == 401
    assert app.post("/v1/x", headers={"origin": "http://evil", **bearer(reader)}).status_code == 403
    seen = lines(caplog)
    # As many lines as are allowed at once, and a count of all.
    assert [line["refused"] for line in seen] == ["scope-missing", "no-key", "no-key"]
    first = seen[0]
    assert (first["key"], first["run"], first["status"]) == ("eyes", "some-run", 403)
    assert first["request"] == denied.headers["x-request-id"]
    assert not any(secret in caplog.text for secret in (reader, "rk_guess"))
    families = text_string_to_metric_families(app.get("/metrics", headers=bearer(reader)).text)
    counted = {
        sample.labels["problem"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "ratchet_api_refused_total"
    }
    assert counted == {"scope-missing": 1, "no-key": 9, "foreign-origin": 1}


def test_an_identity_is_read_as_it_was_written() -> None:
    for name in ("", "ci.2_x-y"):
        caller = Caller(name, "0" * 8 + "-0000-4000-8000-" + "0" * 12)
        assert record_of(caller.identity) == {"by": name, "request_id": caller.request}
    assert record_of("123@worker") == record_of("") == {}


@pytest.mark.asyncio(loop_scope="session")
async def test_the_log_and_the_events_say_who_asked(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ratchet.audit")
    key = api_keys.add(tmp_path / "api_keys.json", "ana", ["read", "write"], 6000)
    keyed = replace(served.settings, keys=settings(tmp_path).keys)
    async with asgi(create_app(keyed, connection(served.env))) as http:
        http.headers.update(bearer(key))
        made = await http.post("/v1/runs", json=config("audited"))
        assert made.status_code == 201, made.text
        run_id = made.json()["id"]
        await served.until(run_id, status="running")
        url, ids = f"/v1/runs/{run_id}", [made.headers["x-request-id"]]
        shelved: list[str] = []
        for verb, body in (
            ("checkpoint", {"reason": "before lunch"}),
            ("eval", {"envs": ["guess-hard"], "reason": "a jump"}),
            ("", {"metadata": {"owner": "ben"}}),
            ("cancel", {"reason": "wrong data"}),
        ):
            way = http.post if verb else http.patch
            answer = await way(f"{url}/{verb}".rstrip("/"), json=body)
            assert answer.status_code in (200, 202), answer.text
            ids.append(answer.headers["x-request-id"])
        assert (await http.get(url)).headers["x-request-id"] not in ids

        async def asked() -> list[Any]:
            found = await everything(http, run_id)
            kinds = ("run.created", "run.asked", "run.config")
            return [e for e in found if e["type"] in kinds and "by" in e["data"]]

        events = await eventually(asked, lambda found: len(found) == len(ids))
        await served.until(run_id, status="cancelled")
        for verb in ("archive", "unarchive"):
            # A run that has ended has no events any more: the log alone says who did this.
            answer = await http.post(f"{url}/{verb}")
            assert answer.status_code == 200, answer.text
            shelved.append(answer.headers["x-request-id"])
        noted = await http.put(f"{url}/note", json={"note": "wrong data"})
        shelved.append(noted.headers["x-request-id"])
    assert [event["data"]["request_id"] for event in events] == ids
    assert {event["data"]["by"] for event in events} == {"ana"}
    reasons = [event["data"].get("reason") for event in events[1:]]
    assert reasons == ["before lunch", "a jump", None, "wrong data"]
    logged = lines(caplog)
    assert [line["request"] for line in logged] == ids + shelved
    assert {(line["key"], line["run"]) for line in logged} == {("ana", run_id)}
    actions = ["create_run", "checkpoint_run", "eval_run", "change_run", "cancel_run"]
    actions += ["archive_run", "unarchive_run", "note_run"]
    assert [line["action"] for line in logged] == actions
    assert [line["status"] for line in logged] == [201, 202, 202, 200, 202, 200, 200, 200]
