"""Keys that come, go and expire while the API runs, and what it remembers of their requests."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.__main__ import settings_for
from ratchet.api.app import create_app
from ratchet.api.client.cli_keys import keys as command
from ratchet.api.http import idempotency
from ratchet.api.http.idempotency import Once
from ratchet.api.http.keyring import Keyring
from ratchet.api.http.security import Guard
from ratchet.api.schemas import keys as api_keys
from ratchet.api.schemas.problems import ApiProblem
from tests.unit.api.http.test_security import AWAY, bearer, settings
from tests.unit.api.routes.test_create import problem

BOTH = ["read", "write"]
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "api_keys.json"


def test_keys_come_and_go_without_a_restart(file: Path) -> None:
    first = api_keys.add(file, "first", BOTH, 6000)
    app = TestClient(create_app(settings(file.parent), AWAY))

    def status(key: str) -> int:
        return app.get("/v1/nope", headers=bearer(key)).status_code

    assert status(first) == 404
    second = api_keys.add(file, "second", BOTH, 6000)
    assert status(second) == 404
    api_keys.revoke(file, "first")
    assert (status(first), status(second)) == (401, 404)
    again = api_keys.add(file, "first", BOTH, 6000)
    assert (status(first), status(again)) == (401, 404)
    # Once there were keys, having none lets nobody in, also after a restart.
    for name in ("first", "second"):
        api_keys.revoke(file, name)
    assert status(again) == 401
    restarted = settings(file.parent)
    assert restarted.guarded and restarted.custom_code == ()
    assert TestClient(create_app(restarted, AWAY)).get("/v1/nope").status_code == 401
    file.unlink()
    assert status(again) == 401
    file.write_text("{")
    problem(app.get("/v1/nope", headers=bearer(again)), 503, "keys-unreadable")


def test_a_key_ends_when_it_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOON]
    monkeypatch.setattr(api_keys, "datetime", SimpleNamespace(now=lambda _: now[0]))
    text = api_keys.add(file, "ci", BOTH, 6000, NOON + timedelta(hours=1))
    keyring = Keyring((), file)
    key = keyring.bearer(f"Bearer {text}")
    assert key and keyring.holds(key)
    now[0] += timedelta(hours=1)
    assert keyring.bearer(f"Bearer {text}") is None and not keyring.holds(key)


def test_the_command_lists_and_revokes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(file.parent))
    run = CliRunner()
    made = run.invoke(command, ["new", "ana", "--expires", "30d", "--read-only"])
    assert made.exit_code == 0, made.output
    assert run.invoke(command, ["new", "ben"]).exit_code == 0
    listed = run.invoke(command, ["list"]).stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["ana", "ben"]
    scopes, _, end, state = listed[0].split("\t")[1:]
    assert (scopes, state) == ("read", "valid")
    left = datetime.fromisoformat(end) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    assert listed[1].split("\t")[3] == "-"
    revoked = run.invoke(command, ["revoke", "ana"])
    assert revoked.exit_code == 0 and revoked.stdout == "revoked key ana\n"
    assert len(run.invoke(command, ["list"]).stdout.splitlines()) == 1
    for refused in (["revoke", "ana"], ["new", "x", "--expires", "soon"], ["new", "ben"]):
        answer = run.invoke(command, refused)
        assert answer.exit_code == 1 and answer.stderr.count("\n") == 1, refused
    assert settings_for("0.0.0.0").guarded


@pytest.mark.asyncio
async def test_a_stream_ends_with_its_key(file: Path) -> None:
    text = api_keys.add(file, "ci", BOTH, 6000)
    news: asyncio.Queue[bytes] = asyncio.Queue()
    sent: list[Message] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            piece = await news.get()
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/v1/runs/r/events",
        "headers": [(b"authorization", f"Bearer {text}".encode())],
    }
    guard = Guard(stream, keyring=Keyring((), file), hosts=())

    async def receive() -> Message:
        raise AssertionError

    serving = asyncio.create_task(guard(scope, receive, send))
    news.put_nowait(b"one")
    while len(sent) < 2:
        await asyncio.sleep(0)
    api_keys.revoke(file, "ci")
    news.put_nowait(b"two")
    await asyncio.wait_for(serving, 10)
    assert [m.get("body") for m in sent[1:]] == [b"one", b""] and not sent[-1]["more_body"]


# -- idempotency records ------------------------------------------------------------------------


def request(key: Any = None) -> Any:
    return SimpleNamespace(
        headers={"Idempotency-Key": "k"},
        method="POST",
        url=SimpleNamespace(path="/v1/runs", query=""),
        state=SimpleNamespace(key=key),
    )


def test_a_key_of_the_same_name_inherits_nothing(file: Path) -> None:
    scopes = []
    for _ in range(2):
        text = api_keys.add(file, "ci", BOTH, 6000)
        key = Keyring((), file).bearer(f"Bearer {text}")
        once = Once.of(request(key), b"body")
        assert once
        scopes.append(once.key)
        api_keys.revoke(file, "ci")
    assert scopes[0] != scopes[1]


def test_records_end_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOON]
    monkeypatch.setattr(idempotency, "_now", lambda: now[0])
    store = ArtifactStore(f"file://{tmp_path}")
    once, other = Once.of(request(), b"a"), Once.of(request(), b"b")
    assert once and other
    assert once.claim(store, "first") == "first" and once.reply(store) is None
    once.keep(store, "first", {"id": "first"})
    for hours in (0, 12, 12, 11):
        now[0] += timedelta(hours=hours)
        idempotency.forget_old(store)
        reply = once.reply(store)
        assert reply and reply["run"] == {"id": "first"}
        with pytest.raises(ApiProblem):
            other.reply(store)
    now[0] += timedelta(hours=13)
    assert once.reply(store) is None
    assert other.claim(store, "second") == "second"
    # What an older build left has no day, and is looked for by none.
    store.put_json("idempotency/ab/abcdef.claim.json", {}, attempt="api")
    idempotency.forget_old(store)
    assert store.folders("idempotency") == ["2026-05-06"]
    other.keep(store, "second", {})


def test_one_claim_holds_when_the_day_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    midnight = datetime(2026, 5, 5, tzinfo=UTC)
    store = ArtifactStore(f"file://{tmp_path}")
    once = Once.of(request(), b"a")
    assert once
    before, after = midnight - timedelta(milliseconds=1), midnight
    clock = [after]
    monkeypatch.setattr(idempotency, "_now", lambda: clock[0])
    put = store.put_json

    def late(key: str, value: Any, **given: Any) -> Any:
        # Another API, whose clock is past midnight, claims between this one's look and its claim.
        monkeypatch.setattr(store, "put_json", put)
        clock[0] = after
        assert once.claim(store, "theirs") == "theirs"
        clock[0] = before
        return put(key, value, **given)

    clock[0] = before
    monkeypatch.setattr(store, "put_json", late)
    assert once.claim(store, "mine") == "theirs"
    assert once.claim(store, "again") == "theirs"
