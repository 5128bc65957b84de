"""The whole stack on one machine: Temporal, API and a worker per role, in the background.

`python -m ratchet.worker.stack up|down|status`. Invariants:

- `up` is idempotent: what runs is left alone, what is missing is started, on the ports of last
  time if they are still free.
- `down` leaves no process and no port behind, servers of runs included.
- A process is ours only if its pid and its start time are those recorded in stack.json.
- A crash of the machine, at any moment, is mended by `up`.
"""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.hosting.keeper import write_record
from ratchet.activities.hosting.reaper import sweep
from ratchet.activities.runtime.children import module_command
from ratchet.configs.home import home_folder, private_folder
from ratchet.workflows.protocol.messages import SEARCH_ATTRIBUTES

PREFERRED_PORTS = {"temporal": 7233, "temporal_ui": 8233, "api": 8080}
PORT_VARIABLES = {
    "temporal": "RATCHET_TEMPORAL_PORT",
    "temporal_ui": "RATCHET_TEMPORAL_UI_PORT",
    "api": "RATCHET_API_PORT",
}
MIN_FREE_BYTES = 2 * 1024**3
READY_WITHIN_S = 120.0
TEMPORAL = Path(sys.executable).parent / "temporal"
RETENTION = "3650d"
"""Of ended runs in the stack's own Temporal."""
GRACE_S = 20.0

# Cancellations reach activities at once only with both switches on.
DYNAMIC_CONFIG = (
    "system.enableCancelActivityWorkerCommand=true",
    "frontend.WorkerCommandsEnabled=true",
    # A server polls its one shard 20 times a second at most by default: 45 ms for every hop
    # between workflow and activity, where it needs 5.
    "history.transferProcessorMaxPollRPS=1000",
    "history.timerProcessorMaxPollRPS=1000",
    "history.visibilityProcessorMaxPollRPS=1000",
)
# SQLite's default journal limits the dev server to some 50 activities a second.
SQLITE_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")


log = logging.getLogger(__name__)


class StackError(Exception):
    """The stack cannot start; the message says what, where and how to mend it."""


@dataclass(frozen=True)
class Addresses:
    """Where the stack answers. `temporal_ui` is '' for a server that is not ours."""

    temporal: str
    temporal_ui: str
    api: str


class Stack:
    """The processes recorded under one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.file = home / "stack.json"
        self.record = _recorded(self.file)

    # -- up ---------------------------------------------------------------------------------

    def up(self) -> Addresses:
        """Starts what is missing and waits until all of it answers."""
        private_folder(self.home)
        free = shutil.disk_usage(self.home).free
        if free < MIN_FREE_BYTES:
            raise StackError(
                f"{self.home} has {free / 2**20:.0f} MiB left on its disk: free at least 2 GiB, or "
                "set RATCHET_HOME to a folder on another disk"
            )
        (self.home / "logs").mkdir(exist_ok=True)
        env = {**os.environ, "RATCHET_HOME": str(self.home)}
        external = os.environ.get("TEMPORAL_ADDRESS")
        if not external:
            self._port("temporal_ui", "temporal")
            port = self._port("temporal", "temporal")
            env["TEMPORAL_ADDRESS"] = f"127.0.0.1:{port}"
            env["RATCHET_TEMPORAL_UI"] = f"http://127.0.0.1:{self.record['ports']['temporal_ui']}"
            self._start("temporal", self._temporal_command(), env)
            self._wait("temporal", lambda: answers(port))
            self._keep_ended_runs(port)
        api = self._port("api", "api")
        self._start("api", module_command("ratchet.api", "--port", str(api)), env)
        for role in WORKER_ROLES:
            health = self._port(f"worker-{role}", f"worker-{role}")
            command = module_command("ratchet.worker", "--roles", role)
            self._start(f"worker-{role}", command, {**env, "RATCHET_HEALTH_PORT": str(health)})
        self._wait("api", lambda: _healthy(api))
        for role in WORKER_ROLES:
            health = self.record["ports"][f"worker-{role}"]
            self._wait(f"worker-{role}", lambda health=health: _healthy(health))  # type: ignore[misc]
        return self.addresses()

    def addresses(self) -> Addresses:
        """Where the recorded stack answers."""
        ports = self.record["ports"]
        external = os.environ.get("TEMPORAL_ADDRESS", "")
        return Addresses(
            temporal=external or f"127.0.0.1:{ports['temporal']}",
            temporal_ui="" if external else f"http://127.0.0.1:{ports['temporal_ui']}",
            api=f"http://127.0.0.1:{ports['api']}",
        )

    def _keep_ended_runs(self, port: int) -> None:
        """Has Temporal keep ended runs: a dev server would forget them after a day."""
        command = [str(TEMPORAL), "operator", "namespace", "update", "--namespace", "default"]
        command += ["--address", f"127.0.0.1:{port}", "--retention", RETENTION]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise StackError(f"temporal cannot be told to keep ended runs: {done.stderr.strip()}")

    def _temporal_command(self) -> list[str]:
        ports = self.record["ports"]
        options = [
            ("--log-level", "error"),
            ("--db-filename", self.home / "temporal.db"),
            ("--port", ports["temporal"]),
            ("--ui-port", ports["temporal_ui"]),
            *(("--sqlite-pragma", pragma) for pragma in SQLITE_PRAGMAS),
            *(("--dynamic-config-value", setting) for setting in DYNAMIC_CONFIG),
            *(("--search-attribute", f"{n}={kind}") for n, kind in SEARCH_ATTRIBUTES.items()),
        ]
        words = [str(word) for option in options for word in option]
        return [str(TEMPORAL), "server", "start-dev", *words]

    def _port(self, name: str, process: str) -> int:
        """The port `name` has or gets: of last time, preferred, or any that is free."""
        ports: dict[str, int] = self.record["ports"]
        if self._alive(process) is not None and name in ports:
            return ports[name]
        variable = PORT_VARIABLES.get(name, "")
        if wanted := os.environ.get(variable):
            if not wanted.isdigit() or not _free(int(wanted)):
                raise StackError(
                    f"{variable}={wanted}: the port is in use or no port; stop what listens there "
                    "(`make down` stops our own), or choose another"
                )
            ports[name] = int(wanted)
            return ports[name]
        taken = {port for other, port in ports.items() if other != name}
        wishes = (port for port in (ports.get(name), PREFERRED_PORTS.get(name)) if port)
        usable = (port for port in wishes if port not in taken and _free(port))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports[name] = next(usable, probe.getsockname()[1])
        return ports[name]

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        if self._alive(name) is not None:
            return
        log = self.home / "logs" / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started = psutil.Process(process.pid).create_time()
        self.record["processes"][name] = {"pid": process.pid, "started": started}
        self._save()

    def _wait(self, name: str, ready: Any) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        log = self.home / "logs" / f"{name}.log"
        while not ready():
            dead = self._alive(name) is None
            if dead or time.monotonic() > deadline:
                tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-8:])
                what = "ended" if dead else f"did not answer within {READY_WITHIN_S:.0f} s"
                raise StackError(f"{name} {what}; the end of {log}:\n{tail}")
            time.sleep(0.1)

    # -- down -------------------------------------------------------------------------------

    def down(self) -> None:
        """Stops workers, then the API, then Temporal; reaps every server of every run."""
        names = [f"worker-{role}" for role in WORKER_ROLES]
        self._stop(names)
        sweep(self.home, everything=True)
        self._stop(["api"])
        self._stop(["temporal"])
        self.record["processes"] = {}
        if self.home.exists():
            self._save()

    def _stop(self, names: list[str]) -> None:
        processes = [p for p in (self._alive(name) for name in names) if p is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        _, stubborn = psutil.wait_procs(processes, timeout=GRACE_S)
        for process in stubborn:
            process.kill()
        psutil.wait_procs(stubborn, timeout=GRACE_S)

    # -- records ----------------------------------------------------------------------------

    def running(self) -> list[str]:
        """Names of the recorded processes that are alive."""
        return [name for name in self.record["processes"] if self._alive(name) is not None]

    def _alive(self, name: str) -> psutil.Process | None:
        recorded = self.record["processes"].get(name)
        if recorded is None or not psutil.pid_exists(recorded["pid"]):
            return None
        try:
            process = psutil.Process(recorded["pid"])
            ours = abs(process.create_time() - recorded["started"]) < 1.0
            return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def _save(self) -> None:
        write_record(self.file, self.record)


def _recorded(file: Path) -> dict[str, dict[str, Any]]:
    """What stack.json says. One that is damaged says nothing: only a crash of the machine tears it,
    and what it named has ended with the machine.
    """
    empty: dict[str, dict[str, Any]] = {"ports": {}, "processes": {}}
    if not file.exists():
        return empty
    try:
        reported = json.loads(file.read_bytes())
        return {part: dict(reported[part]) for part in empty}
    except (ValueError, TypeError, KeyError):
        log.warning("%s is damaged, as by a crash of the machine, and counts as empty", file)
        return empty


def answers(port: int) -> bool:
    """Whether anything listens at a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free(port: int) -> bool:
    if answers(port):
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _healthy(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}/healthz"
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    stack = Stack(home_folder())
    if arguments == ["up"]:
        try:
            where = stack.up()
        except StackError as error:
            print(f"up: {error}", file=sys.stderr)
            return 1
        print(f"API          {where.api}  (docs: {where.api}/docs)")
        print(f"Temporal     {where.temporal}  UI: {where.temporal_ui or 'yours'}")
        print(f"dashboard    {where.api}/dashboard/")
        print(f"state, logs  {stack.home}")
        print('this shell   eval "$(make env)"  puts ratchet and temporal on its PATH')
        return 0
    if arguments == ["down"]:
        stack.down()
        return 0
    if arguments == ["status"]:
        print("\n".join(stack.running()) or "nothing runs")
        return 0
    print("usage: python -m ratchet.worker.stack up|down|status", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
