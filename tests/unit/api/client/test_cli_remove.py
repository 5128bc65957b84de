"""`ratchet runs delete` and `archive`, `ratchet open`, and what holds of every command."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet import __version__
from ratchet.api.client.cli import app
from tests import ROOT
from tests.unit.api.client.support import on_server, serving
from tests.unit.api.client.test_cli import begun, ended, ratchet
from tests.unit.api.conftest import Served, eventually
from tests.unit.api.routes.test_control import ended as ended_run

RUNNER = CliRunner()


@on_server
async def test_runs_are_archived_and_deleted(served: Served) -> None:
    first, second = [await ended_run(served) for _ in range(2)]
    async with serving(served) as address:
        done = await ratchet(address, "runs", "archive", first, second)
        assert done.status == 0 and f"{first} is archived" in done.out
        listed = await ratchet(address, "runs", "list", "--archived", "--json")
        assert {first, second} <= {run["id"] for run in listed.json["data"]}
        shown = await ratchet(address, "runs", "show", first)
        assert re.search(r"^archived +yes", shown.out, re.MULTILINE)
        assert re.search(r"^disk +[0-9.]+ MiB", shown.out, re.MULTILINE)
        undone = await ratchet(address, "runs", "archive", "--undo", first)
        assert f"{first} is in the list again" in undone.out

        unasked = await ratchet(address, "runs", "delete", first)
        assert unasked.status == 2 and "--yes" in unasked.err
        assert (await ratchet(address, "runs", "show", first)).status == 0
        gone = await ratchet(address, "runs", "delete", "--yes", first, second)
        assert gone.status == 0 and f"{second} is deleted, " in gone.out and "MiB" in gone.out
        again = await ratchet(address, "runs", "delete", "-y", first, "--json")
        assert again.status == 0 and json.loads(again.out)["freed"] == 0
        unknown = await ratchet(address, "runs", "delete", "-y", "nope-1a2b3c", "--json")
        assert unknown.status == 1 and json.loads(unknown.err)["type"].endswith("unknown-run")
        goes = (await served.start("goes"))["id"]
        refused = await ratchet(address, "runs", "delete", "--yes", goes)
        assert refused.status == 1 and "stop or cancel it first" in refused.err


@on_server
async def test_a_run_has_a_note(served: Served) -> None:
    run_id = await ended_run(served)
    async with serving(served) as address:
        done = await ratchet(address, "runs", "note", run_id, "wrong data,\nsee \u202eother")
        assert done.status == 0 and f"{run_id} is cancelled; noted" in done.out
        shown = await ratchet(address, "runs", "show", run_id)
        # What could control a terminal is cut out.
        assert re.search(r"^note +wrong data, *\n +see \ufffdother", shown.out, re.MULTILINE)
        refused = await ratchet(address, "runs", "note", run_id, "a\x1b[2J")
        assert refused.status == 1 and "U+001B at position 1 is not allowed" in refused.err
        gone = await ratchet(address, "runs", "note", run_id, "", "--json")
        assert gone.json["note"] == ""
        assert "\nnote" not in (await ratchet(address, "runs", "show", run_id)).out


@on_server
async def test_a_terminal_is_asked_before_anything_is_deleted(served: Served) -> None:
    run_id = await ended_run(served)
    async with serving(served) as address:
        for word, status in (("n\n", 1), ("y\n", 0)):
            ours, theirs = os.openpty()
            os.write(ours, word.encode())
            process = await begun(address, "runs", "delete", run_id, stdin=theirs)
            done = await ended(process)
            os.close(ours)
            os.close(theirs)
            assert done.status == status, done.err
            assert run_id in done.err and "for good?" in done.err
            # Another API hides what this one deleted within two seconds.
            await eventually(
                lambda: served.http.get(f"/v1/runs/{run_id}"),
                lambda answer: answer.status_code == (200 if status else 404),  # noqa: B023
            )


@on_server
async def test_open_leads_a_browser_to_the_page(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    run_id = (await served.start("opened"))["id"]
    async with serving(served) as address:
        for words, path in ((["open", run_id], f"#/runs/{run_id}"), (["open"], "")):
            done = await ended(await begun(address, *words))
            assert done.status == 0, done.err
            assert done.out == f"{address}/dashboard/{path}\n"
        lines = await eventually(_read(seen), lambda lines: len(lines) == 2)
        assert lines == [f"{address}/dashboard/#/runs/{run_id}", f"{address}/dashboard/"]
        unknown = await ratchet(address, "open", "nope")
        assert unknown.status == 1 and "`ratchet runs list`" in unknown.err
        monkeypatch.setenv("BROWSER", str(tmp_path / "none"))
        bare = await ended(await begun(address, "open", run_id, "--json"))
        assert bare.json == {"url": f"{address}/dashboard/#/runs/{run_id}", "opened": False}


def _read(file: Path):  # type: ignore[no-untyped-def]
    async def look() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    return look


@on_server
async def test_json_may_stand_anywhere(served: Served, tmp_path: Path) -> None:
    run_id = (await served.start("anywhere"))["id"]
    async with serving(served) as address:
        for words in (
            ["--json", "runs", "show", run_id],
            ["runs", "--json", "show", run_id],
            ["runs", "show", "--json", run_id],
            ["runs", "show", run_id, "--json"],
            ["--json", "runs", "--json", "show", run_id, "--json"],
        ):
            assert (await ratchet(address, *words)).json["id"] == run_id
        refused = await ratchet(address, "--json", "runs", "show", "nope")
        assert json.loads(refused.err)["status"] == 404
        changed = await ratchet(address, "--json", "runs", "set", run_id, "--", "metadata.a=b")
        assert changed.json["metadata"]["a"] == "b"


def test_keys_are_json_too(tmp_path: Path) -> None:
    env = {"RATCHET_HOME": str(tmp_path)}
    made = json.loads(RUNNER.invoke(app, ["--json", "keys", "new", "ana"], env=env).stdout)
    assert made["name"] == "ana" and made["key"].startswith("rk_") and made["restart"] is True
    (listed,) = json.loads(RUNNER.invoke(app, ["keys", "list", "--json"], env=env).stdout)["data"]
    assert listed["name"] == "ana" and listed["expired"] is False and "sha256" not in listed
    taken = RUNNER.invoke(app, ["keys", "--json", "revoke", "ana"], env=env)
    assert json.loads(taken.stdout) == {"name": "ana", "revoked": True}
    wrong = RUNNER.invoke(app, ["--json", "keys", "revoke", "ana"], env=env)
    assert wrong.exit_code == 1 and "ana" in json.loads(wrong.stderr)["detail"]


def test_the_version_is_said() -> None:
    for words in (["--version"], ["--json", "--version"]):
        done = RUNNER.invoke(app, words)
        assert done.exit_code == 0 and done.stdout == f"ratchet {__version__}\n"


@on_server
async def test_a_shell_completes_commands_options_and_runs(served: Served) -> None:
    run_id = (await served.start("completed"))["id"]
    async with serving(served) as address:

        async def completed(words: str) -> list[str]:
            env = {
                "RATCHET_API": address,
                "_RATCHET_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split(" ")) - 1),
            }
            command = [sys.executable, "-m", "ratchet.api.client"]
            done = await asyncio.to_thread(
                subprocess.run,
                command,
                env={**os.environ, **env},
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        assert await completed("ratchet runs sh") == ["show"]
        assert run_id in await completed("ratchet runs show comp")
        assert "--follow" in await completed("ratchet runs events --fo")
    # Nothing is said, and nothing waited for, where no API answers.
    assert await completed("ratchet runs show comp") == []
    env = {**os.environ, "_RATCHET_COMPLETE": "source_bash"}
    command = [sys.executable, "-m", "ratchet.api.client"]
    script = await asyncio.to_thread(
        subprocess.run, command, env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert script.returncode == 0 and "_RATCHET_COMPLETE" in script.stdout
