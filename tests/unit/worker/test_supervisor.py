"""Services of a stack that end, stall and cannot start; the pure rules, then real processes."""

import asyncio
import configparser
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from ratchet.activities.contracts.roles import SERVERS
from ratchet.activities.contracts.services import ServiceState, read_services, services_file
from ratchet.activities.hosting.spec import LOST_AFTER_S
from ratchet.worker import stack as stacks
from ratchet.worker import supervisor
from ratchet.worker.roles import STICKY_TIMEOUT
from ratchet.worker.stack import Stack, only_supervisor, supervisor_of
from ratchet.worker.supervisor import (
    EVERY_S,
    HUNG_S,
    LONGEST_REST_S,
    LOOPS_AFTER,
    MISSES,
    PROBE_LIMIT_S,
    SILENT_S,
    STARTS_WITHIN_S,
    STARVED_S,
    STEADY_S,
    Supervisor,
    Watched,
    demand_of,
    rest_before_start,
)
from ratchet.workflows.protocol.activities import FOREVER, HEARTBEAT, TAKEN_WITHIN
from tests import ROOT

WITHIN_S = 60.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""
START_S = 5.0
"""From a worker's start until it takes work; 3 to 5 s on two busy cores."""
SERVES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"ready": true, "event_loop_lag_s": 0}')
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_first_end_is_answered_at_once_and_more_of_them_ever_more_rarely() -> None:
    rests = [rest_before_start(ends) for ends in range(1, 12)]
    assert rests[:4] == [0.0, 1.0, 2.0, 4.0] and rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S


def test_a_crash_loop_is_a_state_until_it_has_been_healthy_for_long() -> None:
    service, now = Watched(0.0), 0.0
    service.on_answer(now, 0.0, 0.0)
    for ends in range(1, LOOPS_AFTER + 1):
        assert service.state == "up"
        service.on_ended(now)
        service.on_ended(now), "found again before it is started"
        assert service.ends == ends
        assert service.state == ("down" if ends < LOOPS_AFTER else "crash-looping")
        now += LONGEST_REST_S
        service.on_started(now)
        if ends < LOOPS_AFTER:
            assert service.state == "starting"
            service.on_answer(now, 0.0, 0.0)
    service.on_answer(now, 0.0, 0.0)
    service.on_answer(now + STEADY_S - 1, 0.0, 0.0)
    assert service.state == "crash-looping", "it may end again at any moment"
    service.on_answer(now + STEADY_S, 0.0, 0.0)
    assert service.state == "up" and service.restarts == LOOPS_AFTER


def test_what_is_silent_or_hangs_is_lost() -> None:
    service = Watched(0.0)
    service.on_answer(10.0, 0.0, 0.0)
    for _ in range(MISSES - 1):
        service.on_silence()
    assert not service.is_lost(10.0 + 2 * SILENT_S, 0.0), "the supervisor may have stood still"
    service.on_silence()
    assert service.is_lost(10.0 + SILENT_S, 0.0) and not service.is_lost(9.9 + SILENT_S, 0.0)
    for _ in range(MISSES):
        service.on_answer(20.0, HUNG_S - 1, 0.0)
    assert not service.is_lost(20.0, 0.0)
    service.on_answer(21.0, HUNG_S, 0.0)
    assert service.is_lost(21.0, 0.0), "it answers, and its event loop stands still"


def test_a_machine_that_stood_still_loses_nobody() -> None:
    service = Watched(0.0)
    service.on_answer(10.0, 0.0, 0.0)
    for _ in range(MISSES - 1):
        service.on_answer(100.0, 90.0, 0.0)
        assert not service.is_lost(100.0, 0.0), "its event loop had no time to turn yet"
    service.on_answer(100.0, 0.5, 0.0)
    service.on_answer(102.0, HUNG_S, 0.0)
    assert not service.is_lost(102.0, 0.0), "it has turned meanwhile"
    starts = Watched(0.0)
    assert not starts.is_lost(1000.0, 0.0), "nobody has looked"


def test_a_successor_is_not_measured_by_its_predecessor() -> None:
    service = Watched(0.0)
    service.on_answer(10.0, 0.0, 100.0)
    service.on_ended(20.0)
    service.on_started(20.0)
    for _ in range(MISSES):
        service.on_silence()
    now = 20.0 + stacks.READY_WITHIN_S
    assert service.is_lost(now, 1.0)
    assert not service.is_lost(now, stacks.READY_WITHIN_S), "it waits for a core since its start"
    assert service.is_lost(20.0 + STARTS_WITHIN_S, STARTS_WITHIN_S), "it may compute for ever"


def test_what_is_starved_of_cores_is_not_stalled() -> None:
    service = Watched(0.0)
    service.on_answer(10.0, 0.0, 100.0)
    for _ in range(MISSES):
        service.on_silence()
    now = 10.0 + SILENT_S + 1
    assert service.is_lost(now, 100.5) and not service.is_lost(now, 100.0 + SILENT_S)
    assert service.is_lost(10.0 + STARVED_S, 100.0 + STARVED_S), "it may compute for ever"
    service.on_answer(now, HUNG_S, 100.0 + HUNG_S)
    assert not service.is_lost(now, 100.0 + HUNG_S), "its event loop waits for a core"


def test_who_computes_demands_cores_and_who_is_stopped_does_not() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + WITHIN_S
        while demand_of(process.pid) < 0.2:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        before = demand_of(process.pid)
        assert before >= 0.2
        # Time passes for the others.
        mine = demand_of(os.getpid())
        while demand_of(os.getpid()) < mine + 0.1:
            assert time.monotonic() < deadline
        assert demand_of(process.pid) == before
    finally:
        process.kill()
        process.wait()


async def test_without_schedstat_who_computes_demands_cores_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    deadline, before = time.monotonic() + WITHIN_S, demand_of(os.getpid())
    while demand_of(os.getpid()) < before + 0.1:
        assert time.monotonic() < deadline


class Behind(httpx.AsyncBaseTransport):
    """A service that answers with `body`, or, without one, times out after `late_s`."""

    def __init__(self, body: object = None, late_s: float = 0.0) -> None:
        self._body, self._late_s = body, late_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._body is not None:
            return httpx.Response(200, json=self._body)
        # The whole supervisor stands still.
        time.sleep(self._late_s)
        raise httpx.ReadTimeout("no answer")


def alone(home: Path) -> Stack:
    """A stack whose only service is this process."""
    stack = Stack(home)
    stack.services["api"] = ([], {})
    born = psutil.Process(os.getpid()).create_time()
    stack.record["processes"]["api"] = {"pid": os.getpid(), "started": born}
    stack.record["ports"]["api"] = 1
    return stack


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ({"healthy": True, "roles": ["env"], "event_loop_lag_s": 0.1}, "up"),
        ({"ready": True, "event_loop_lag_s": 0.1}, "up"),
        ({"ready": False, "event_loop_lag_s": 0.1}, "starting"),
        ({"status": "ok"}, "up"),
    ],
)
async def test_workers_of_older_builds_are_adopted(
    tmp_path: Path, body: object, state: str
) -> None:
    minding = Supervisor(alone(tmp_path))
    async with httpx.AsyncClient(transport=Behind(body)) as http:
        await minding._look(http, "api")
    assert minding._watched["api"].state == state


async def test_a_supervisor_that_stood_still_has_seen_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minding = Supervisor(alone(tmp_path))
    monkeypatch.setattr(supervisor, "PROBE_LIMIT_S", 0.0)
    monkeypatch.setattr(supervisor, "LATE_S", 0.05)
    async with httpx.AsyncClient(transport=Behind(late_s=0.1)) as http:
        await minding._look(http, "api")
    assert minding._watched["api"].misses == 0
    monkeypatch.setattr(supervisor, "LATE_S", WITHIN_S)
    async with httpx.AsyncClient(transport=Behind()) as http:
        await minding._look(http, "api")
    assert minding._watched["api"].misses == 1


def test_what_never_answers_has_the_time_that_a_start_has() -> None:
    service = Watched(0.0)
    for _ in range(10):
        service.on_silence()
    assert service.state == "starting" and not service.is_lost(stacks.READY_WITHIN_S - 1, 0.0)
    assert service.is_lost(stacks.READY_WITHIN_S, 0.0)


def test_every_bound_is_fifteen_seconds_at_most_and_documented() -> None:
    tried_again = FOREVER.initial_interval.total_seconds()
    replaced = 2 * EVERY_S + START_S
    bounds = {
        "SILENT_S": max(SILENT_S, MISSES * (EVERY_S + PROBE_LIMIT_S)) + replaced,
        "HUNG_S": HUNG_S + replaced,
        "HEARTBEAT": HEARTBEAT.total_seconds() + tried_again,
        "STICKY_TIMEOUT": STICKY_TIMEOUT.total_seconds(),
        "TAKEN_WITHIN": TAKEN_WITHIN.total_seconds(),
        "LOST_AFTER_S": LOST_AFTER_S + tried_again,
    }
    docs = (ROOT / "docs" / "operations.md").read_text()
    for name, seconds in bounds.items():
        assert seconds <= 15 and f"`{name}`" in docs, name
    assert SERVERS.keys() == {"engine", "env", "trainer"}


def test_the_systemd_unit_of_the_docs_starts_a_supervisor() -> None:
    docs = (ROOT / "docs" / "operations.md").read_text()
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(docs.split("```ini\n")[1].split("```")[0])
    service = unit["Service"]
    assert service["ExecStart"].endswith(f"-m {supervisor.__name__}")
    # It ends with 0 if it was asked to end, which must not restart it.
    assert service["Restart"] == "on-failure" and service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > stacks.SUPERVISOR_ENDS_WITHIN_S


# -- processes ------------------------------------------------------------------------------


def planned(home: Path, **commands: str) -> Stack:
    """A stack whose services are little Python programs, which get their port."""
    (home / "logs").mkdir(parents=True, exist_ok=True)
    stack = Stack(home)
    for name, code in commands.items():
        port = stack._port(name, name)
        command = [sys.executable, "-I", "-S", "-c", code, str(port)]
        stack.services[name] = (command, dict(os.environ))
    return stack


@pytest_asyncio.fixture
async def minded(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of an API that serves and a worker that cannot start, and a supervisor of it."""
    stack = planned(tmp_path, api=SERVES, broken="raise SystemExit('no such queue')")
    minding = asyncio.create_task(Supervisor(stack).run())
    yield stack
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)
    for name in ("api", "broken"):
        if process := stack.alive(name):
            process.kill()


async def state_of(stack: Stack, name: str, holds: Callable[[ServiceState], bool]) -> ServiceState:
    """The state of a service once it `holds`."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            known = {state.name: state for state in read_services(stack.home) or ()}
            if name in known and holds(known[name]):
                return known[name]
            await asyncio.sleep(0.05)


async def test_a_killed_service_is_back(minded: Stack) -> None:
    first = await state_of(minded, "api", lambda state: state.state == "up")
    assert first.restarts == 0, "what it starts first has not ended"
    process = minded.alive("api")
    assert process is not None
    process.kill()
    await state_of(minded, "api", lambda state: state.restarts == 1 and state.state == "up")
    again = minded.alive("api")
    assert again is not None and again.pid != process.pid
    assert Stack(minded.home).record == minded.record, "another command finds it"


async def test_a_stalled_service_is_replaced(minded: Stack) -> None:
    await state_of(minded, "api", lambda state: state.state == "up")
    process = minded.alive("api")
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    await state_of(minded, "api", lambda state: state.restarts == 1 and state.state == "up")
    assert not psutil.pid_exists(process.pid) or minded.alive("api") != process


async def test_workers_wait_for_the_temporal_of_their_stack(tmp_path: Path) -> None:
    stack = planned(tmp_path, temporal=SERVES, api=SERVES, **{"worker-env": SERVES})
    minding = Supervisor(stack)
    try:
        for name in stack.services:
            minding._revive(name, minding._watched[name])
        assert stack.running() == ["temporal", "api"], "a worker would end at once"
        assert minding._watched["worker-env"].ends == 0
        minding._watched["temporal"].on_answer(time.monotonic(), 0.0, 0.0)
        minding._revive("worker-env", minding._watched["worker-env"])
        assert "worker-env" in stack.running()
    finally:
        stack.down()
        for name in stack.services:
            if process := stack.alive(name):
                process.kill()


async def test_a_signal_between_start_and_record_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = planned(tmp_path, api=SERVES)
    monkeypatch.setattr(stack, "plan", lambda: None)
    spawn, spawned = stack._spawn, []

    def cut(*args: Any) -> "subprocess.Popen[bytes]":
        spawned.append(spawn(*args))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        return spawned[-1]

    monkeypatch.setattr(stack, "_spawn", cut)
    try:
        async with asyncio.timeout(WITHIN_S):
            await supervisor.mind(stack)
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
        ended = [process.poll() for process in spawned]
        for process in spawned:
            process.kill()
            process.wait()
    assert len(ended) == 1 and ended[0] is not None and stack.running() == []
    assert not services_file(tmp_path).exists()


def test_a_refused_port_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("RATCHET_API_PORT", str(port))
        assert supervisor.main() == 1
    assert f"RATCHET_API_PORT={port}: the port is in use" in capsys.readouterr().err
    assert Stack(tmp_path).record["processes"] == {}


IMPORTS = "import time; time.sleep(600)"
"""It has not come to its lock."""
MINDS = """
import os, sys, time
from pathlib import Path
from ratchet.activities.contracts.services import services_file
from ratchet.worker.stack import only_supervisor
with only_supervisor(Path(os.environ["RATCHET_HOME"])):
    services_file(Path(os.environ["RATCHET_HOME"])).write_text("[]")
    time.sleep(600)
"""
LINGERS = f"""
import atexit, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
atexit.register(time.sleep, 1)
{MINDS}"""
"""It lets its lock go a second before it ends."""


@pytest.mark.parametrize("code", [IMPORTS, MINDS, LINGERS], ids=["imports", "minds", "lingers"])
def test_down_ends_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "logs").mkdir()
    stack = Stack(tmp_path)
    command = [sys.executable, "-P", "-c", code]
    monkeypatch.setattr(stacks, "module_command", lambda module: command)
    if code == IMPORTS:
        monkeypatch.setattr(stacks, "READY_WITHIN_S", 0.0)
        with pytest.raises(stacks.StackError, match="no supervisor"):
            stack.supervise()
    else:
        stack.supervise()
    pid = supervisor_of(tmp_path)
    assert pid is not None
    # A process that has not begun its program yet has no command line.
    while not (line := psutil.Process(pid).cmdline()):
        time.sleep(0.01)
    assert line == command
    stack.supervise(), "which leaves the first one alone"
    assert supervisor_of(tmp_path) == pid
    Stack(tmp_path).down()
    assert supervisor_of(tmp_path) is None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_crash_loop_is_reported(
    minded: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = await state_of(minded, "broken", lambda state: state.state == "crash-looping")
    assert seen.ends == LOOPS_AFTER and seen.log == "logs/broken.log"
    assert "no such queue" in (minded.home / seen.log).read_text()
    await state_of(minded, "api", lambda state: state.state == "up")
    monkeypatch.setenv("RATCHET_HOME", str(minded.home))
    # The test's supervisor holds no lock.
    monkeypatch.setattr(stacks, "supervisor_of", lambda home: os.getpid())
    assert stacks.main(["status"]) == 1
    said = capsys.readouterr()
    heads, api, broken = (line.split() for line in said.out.splitlines())
    process, port = minded.alive("api"), str(minded.record["ports"]["api"])
    assert process is not None and heads == ["service", "state", "pid", "port", "since"]
    assert api[:4] == ["api", "running", str(process.pid), port] and api[4].endswith("Z")
    assert broken[:3] == ["broken", "crash-loop", "-"] and broken[4].startswith("20")
    assert " ".join(broken[5:]) == "ended 3 times in a row; see logs/broken.log"
    assert said.err == ""


def test_states_that_nobody_renews_say_nothing(tmp_path: Path) -> None:
    file = services_file(tmp_path)
    assert read_services(tmp_path) is None
    state = {"name": "api", "state": "up", "since": "2026-01-01", "restarts": 0, "ends": 0}
    file.write_text(json.dumps([{**state, "log": "logs/api.log"}]))
    assert [service.name for service in read_services(tmp_path) or ()] == ["api"]
    os.utime(file, (time.time() - 60, time.time() - 60))
    assert read_services(tmp_path) is None


def test_a_home_has_one_supervisor_and_none_once_it_is_killed(tmp_path: Path) -> None:
    assert supervisor_of(tmp_path) is None
    code = (
        "import sys, time; from pathlib import Path; from ratchet.worker.stack import *\n"
        "with only_supervisor(Path(sys.argv[1])):\n    print('has it', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"has it\n"
    assert supervisor_of(tmp_path) == holder.pid
    with (
        pytest.raises(stacks.StackError, match="already has a supervisor"),
        only_supervisor(tmp_path),
    ):
        pass
    holder.kill()
    holder.wait()
    assert supervisor_of(tmp_path) is None
    with only_supervisor(tmp_path):
        assert supervisor_of(tmp_path) == os.getpid()


def test_a_second_signal_does_not_cut_the_cleaning_up_short(tmp_path: Path) -> None:
    code = (
        "import signal, time; from ratchet.worker.stack import Ended, end_in_order\n"
        "end_in_order()\n"
        "try:\n    print('up', flush=True); time.sleep(600)\n"
        "except Ended as error:\n    print('cleaning', flush=True); input(); print(error.status)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    assert process.communicate("\n", timeout=WITHIN_S)[0] == "143\n"
