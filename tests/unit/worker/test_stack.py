"""stack.json after a crash of the machine, and what `make status` makes of it."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest

from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.contracts.services import services_file
from ratchet.worker import stack as stacks
from ratchet.worker.stack import Addresses, Stack

LOCKS = Path("/proc/locks")
"""The kernel's list of file locks and of those who wait for one."""


def _saved(home: Path) -> Stack:
    stack = Stack(home)
    started = psutil.Process(os.getpid()).create_time()
    stack.record["ports"] = {"temporal": 7233, "api": 8080}
    stack.record["processes"] = {"api": {"pid": os.getpid(), "started": started}}
    stack._save()
    return stack


def test_a_record_is_read_back(tmp_path: Path) -> None:
    stack = _saved(tmp_path)
    again = Stack(tmp_path)
    assert again.record == stack.record and again.running() == ["api"]
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]


@pytest.mark.parametrize("kept", [0, 1, 40, None])
def test_a_torn_record_counts_as_empty_and_is_replaced(tmp_path: Path, kept: int | None) -> None:
    file = _saved(tmp_path).file
    data = file.read_bytes()
    # A file whose length reached the disk and whose content did not reads as zeros.
    file.write_bytes(bytes(len(data)) if kept is None else data[:kept])
    stack = Stack(tmp_path)
    assert stack.record == {"ports": {}, "processes": {}} and stack.running() == []
    port = stack._port("api", "api")
    stack.down()
    assert json.loads(file.read_text()) == {"ports": {"api": port}, "processes": {}}


@pytest.mark.parametrize("data", ["[]", "3", "null", "{}", '{"ports": {}}', '{"ports": 1}'])
def test_what_is_no_record_counts_as_empty(tmp_path: Path, data: str) -> None:
    (tmp_path / "stack.json").write_text(data)
    assert Stack(tmp_path).record == {"ports": {}, "processes": {}}


def test_the_record_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def spy(handle: int) -> None:
        fsync(handle)
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, stack.file.exists()))

    stack = Stack(tmp_path)
    monkeypatch.setattr(os, "fsync", spy)
    stack._save()
    assert synced == [("stack.part", False)]


def test_several_may_save_at_once(tmp_path: Path) -> None:
    def save(_: int) -> None:
        for _ in range(25):
            Stack(tmp_path)._save()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(save, range(8))) == [None] * 8
    assert json.loads((tmp_path / "stack.json").read_text()) == {"ports": {}, "processes": {}}


@pytest.mark.parametrize("own", [False, True])
def test_up_waits_for_what_is_recorded_whatever_the_shell_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A stack with a Temporal of the user's own, from a shell that does not name it."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    asked = []
    monkeypatch.setattr(Stack, "_answers", lambda self, name: asked.append(name) or True)
    monkeypatch.setattr(stacks, "supervisor_of", lambda home: 1)
    monkeypatch.setattr(stacks, "READY_WITHIN_S", 0.0)
    stack = _saved(tmp_path)
    names = ["api", *(f"worker-{role}" for role in WORKER_ROLES), *(["temporal"] if own else [])]
    stack.record["ports"] = {"temporal": 7233, "temporal_ui": 8233, "api": 8080}
    stack.record["processes"] = {name: {"pid": 1, "started": 1.0} for name in names}
    stack._save()
    ours = ("127.0.0.1:7233", "http://127.0.0.1:8233") if own else ("", "")
    assert Stack(tmp_path).up() == Addresses(*ours, "http://127.0.0.1:8080")
    assert sorted(asked) == sorted(names)


def test_a_worker_whose_port_was_taken_meanwhile_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    def spawn(self: Stack, name: str, command: list[str], env: dict[str, str]) -> object:
        given.append(env)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(Stack, "_spawn", spawn)
    (tmp_path / "logs").mkdir()
    stack = Stack(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        stack.record["ports"] = {"worker-env": taken}
        stack._start("worker-env", ["worker"], {"RATCHET_HEALTH_PORT": str(taken)})
    port = stack.record["ports"]["worker-env"]
    assert port != taken and given[0]["RATCHET_HEALTH_PORT"] == str(port)
    assert Stack(tmp_path).record["ports"]["worker-env"] == port


def test_a_port_that_another_stack_took_meanwhile_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that one answers, as another stack's API does."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "healthz").touch()
    serve = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "-d", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        taken = probe.getsockname()[1]
    planned = [taken]

    def plan(self: Stack) -> None:
        port = planned.pop() if planned else self._port("api", "api")
        self.record["ports"]["api"] = port
        self.services["api"] = ([*serve, str(port)], {**os.environ})

    monkeypatch.setattr(Stack, "plan", plan)
    stack = Stack(tmp_path)
    with subprocess.Popen([*serve, str(taken)], stderr=subprocess.DEVNULL) as other:
        try:
            while not stacks._healthy(taken):
                time.sleep(0.05)
            stack.plan()
            stack.revive("api")
            stack._wait("api", partial(stack._answers, "api"))
            assert stack.record["ports"]["api"] != taken and stack._listens("api")
        finally:
            stack._stop(["api"])
            other.kill()


def test_up_does_not_adopt_what_a_down_is_about_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = _saved(tmp_path)
    found: list[list[str]] = []
    monkeypatch.setattr(Stack, "plan", lambda self: found.append(self.running()))
    monkeypatch.setattr(Stack, "addresses", lambda self: None)
    up = Thread(target=Stack(tmp_path).up)
    with stack._holding_off(fcntl.LOCK_SH):
        up.start()
        deadline = time.monotonic() + 60
        while not re.search(rf"-> FLOCK +ADVISORY +WRITE +{os.getpid()} ", LOCKS.read_text()):
            assert time.monotonic() < deadline, "it waits for the lock"
            time.sleep(0.01)
        stack.record["processes"] = {}
        stack._save()
    up.join()
    assert found == [[]]


SEVEN = ["temporal", "api", *(f"worker-{role}" for role in WORKER_ROLES)]
REPORT = {"since": "2026-01-01T12:00:00.25+00:00", "restarts": 0, "ends": 0}


def _whole(home: Path, monkeypatch: pytest.MonkeyPatch, gone: str = "") -> None:
    """The record of a whole stack, all of it this process; `gone` has ended."""
    monkeypatch.setenv("RATCHET_HOME", str(home))
    stack = Stack(home)
    started = psutil.Process(os.getpid()).create_time()
    stack.record["ports"] = {name: 9000 + k for k, name in enumerate(SEVEN)}
    stack.record["processes"] = {
        name: {"pid": os.getpid(), "started": started - 60 * (name == gone)} for name in SEVEN
    }
    stack._save()


def _status(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[str]], str]:
    """Exit status, cells by service, and standard error of `make status`."""
    ended = stacks.main(["status"])
    printed = capsys.readouterr()
    _, *rows = (line.split() for line in printed.out.splitlines())
    return ended, {row[0]: row[1:] for row in rows}, printed.err


def test_status_lists_all_processes_of_a_stack_that_nobody_supervises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stack, "_answers", lambda self, name: name != "api")
    _whole(tmp_path, monkeypatch, gone="worker-env")
    ended, rows, warned = _status(capsys)
    assert ended == 1 and list(rows) == SEVEN and "no supervisor" in warned
    started = datetime.fromtimestamp(psutil.Process(os.getpid()).create_time(), UTC)
    since = f"{started:%Y-%m-%dT%H:%M:%SZ}"
    assert rows["temporal"] == ["running", str(os.getpid()), "9000", since]
    assert rows["api"][:4] == ["silent", str(os.getpid()), "9001", since]
    assert " ".join(rows["api"][4:]) == "it does not answer"
    dead = ["DEAD", "-", "9006", "-", "ended;", "see", "logs/worker-env.log"]
    assert rows["worker-env"] == dead


def test_status_ends_with_0_only_if_all_are_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stack, "_answers", lambda self, name: True)
    _whole(tmp_path, monkeypatch)
    assert _status(capsys)[0] == 0
    assert stacks.main(["status", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["port"], one["is_up"]) for one in listed] == [
        (name, 9000 + k, True) for k, name in enumerate(SEVEN)
    ]
    stack = Stack(tmp_path)
    del stack.record["processes"]["worker-rollout"]
    stack._save()
    ended, rows, _ = _status(capsys)
    assert ended == 1 and rows["worker-rollout"][0] == "DEAD", "`up` was ended before its start"


def test_status_says_what_the_supervisor_is_doing_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _whole(tmp_path, monkeypatch, gone="worker-env")
    monkeypatch.setattr(stacks, "supervisor_of", lambda home: 42)
    states: dict[str, tuple[str, int]] = {name: ("up", 0) for name in SEVEN}
    states |= {"api": ("starting", 0), "worker-trainer": ("crash-looping", 4)}
    states |= {"worker-rollout": ("down", 1), "temporal": ("up", 1)}
    services_file(tmp_path).write_text(
        json.dumps(
            [
                {**REPORT, "name": name, "state": state, "ends": ends, "log": f"logs/{name}.log"}
                for name, (state, ends) in states.items()
            ]
        )
    )
    ended, rows, _ = _status(capsys)
    assert ended == 1 and list(rows) == SEVEN
    assert rows["temporal"][0] == "running"
    assert " ".join(rows["temporal"][4:]) == "ended before; see logs/temporal.log"
    assert {name: row[0] for name, row in rows.items()} == {
        **dict.fromkeys(SEVEN, "running"),
        "api": "starting",
        "worker-trainer": "crash-loop",
        "worker-rollout": "restarting",
        "worker-env": "restarting",
    }
    assert rows["worker-env"][3] == "2026-01-01T12:00:00Z"
    started = datetime.fromtimestamp(psutil.Process(os.getpid()).create_time(), UTC)
    assert rows["temporal"][3] == f"{started:%Y-%m-%dT%H:%M:%SZ}", "also if it was adopted"
    assert " ".join(rows["worker-trainer"][4:]) == (
        "ended 4 times in a row; see logs/worker-trainer.log"
    )


def test_what_a_dead_supervisor_reported_last_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stack, "_answers", lambda self, name: True)
    _whole(tmp_path, monkeypatch, gone="worker-env")
    states = [{**REPORT, "name": name, "state": "down", "log": "l"} for name in SEVEN]
    services_file(tmp_path).write_text(json.dumps(states))
    ended, rows, warned = _status(capsys)
    assert ended == 1 and "no supervisor" in warned
    assert rows["worker-env"][0] == "DEAD" and rows["api"][0] == "running"
