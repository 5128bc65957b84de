"""The whole stack on one machine: Temporal, API and a worker per role, in the background.

`python -m ratchet.worker.stack up|down|status`; `up` leaves a supervisor behind
(`ratchet.worker.supervisor`), and `status` (`ratchet.worker.status`) ends with 1 if a process is
not up. Invariants:

- `up` is idempotent: running services are left alone, missing ones are started, on their previous
  ports if those are still free.
- While a supervisor lives, only it starts services. It is identified by its lock, which it holds
  from the moment it is started, so that `down` ends it first.
- `down` leaves no process and no port behind, servers of runs included.
- A process is ours only if its pid and its start time match those in stack.json.
- `up` recovers from a crash of the machine at any moment.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import httpx
import psutil

from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.contracts.services import ServiceState, read_services, services_file
from ratchet.activities.hosting.keeper import write_record
from ratchet.activities.hosting.reaper import sweep
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.machine import ONE_MACHINE
from ratchet.configs.home import STACK_FILE, home_folder, private_folder
from ratchet.worker.status import Process, observed, reported, table
from ratchet.worker.temporal_server import analyze, keep_ended_runs, server_command

PREFERRED_PORTS = {"temporal": 7233, "temporal_ui": 8233, "api": 8080}
PORT_VARIABLES = {
    "temporal": "RATCHET_TEMPORAL_PORT",
    "temporal_ui": "RATCHET_TEMPORAL_UI_PORT",
    "api": "RATCHET_API_PORT",
}
MIN_FREE_BYTES = 2 * 1024**3
READY_WITHIN_S = 120.0
GRACE_S = 20.0
LOCK = "supervisor.lock"
LOCK_VARIABLE = "RATCHET_SUPERVISOR_LOCK"
"""The descriptor of the lock, in a supervisor that `make up` started."""
SUPERVISOR_ENDS_WITHIN_S = 90.0
"""A supervisor stops the whole stack first."""


log = logging.getLogger(__name__)


class StackError(Exception):
    """The stack cannot start; the message says what, where and how to fix it."""


@dataclass(frozen=True)
class Addresses:
    """Where the stack answers. `temporal_ui` is '' for a server that is not ours, and so is
    `temporal` if TEMPORAL_ADDRESS does not name it either.
    """

    temporal: str
    temporal_ui: str
    api: str


class Stack:
    """The processes recorded under one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.file = home / STACK_FILE
        self.record = _recorded(self.file)
        self.services: dict[str, tuple[list[str], dict[str, str]]] = {}
        """Command and environment of each planned service; Temporal is the first."""

    # -- up ---------------------------------------------------------------------------------

    def up(self) -> Addresses:
        """Starts what is missing, or leaves that to its supervisor, and waits until everything
        answers.
        """
        with self._holding_off(fcntl.LOCK_EX):
            self.record = _recorded(self.file)
        if supervisor_of(self.home) not in (None, os.getpid()):
            return self._until_kept()
        self.plan()
        if "temporal" in self.services:
            self.revive("temporal")
            self._wait("temporal", partial(self._answers, "temporal"))
            self.keep_ended_runs()
        for name in self.services:
            self.revive(name)
        for name in self.services:
            self._wait(name, partial(self._answers, name))
        return self.addresses()

    def plan(self) -> None:
        """Decides how each service is started, and on which port. Raises StackError if a port or
        the disk cannot be used.
        """
        private_folder(self.home)
        free = shutil.disk_usage(self.home).free
        if free < MIN_FREE_BYTES:
            raise StackError(
                f"{self.home} has {free / 2**20:.0f} MiB left on its disk: free at least 2 GiB, or "
                "set RATCHET_HOME to a folder on another disk"
            )
        (self.home / "logs").mkdir(exist_ok=True)
        env = {**os.environ, "RATCHET_HOME": str(self.home), ONE_MACHINE: "1"}
        external = os.environ.get("TEMPORAL_ADDRESS")
        if not external:
            self._port("temporal_ui", "temporal")
            port = self._port("temporal", "temporal")
            env["TEMPORAL_ADDRESS"] = f"127.0.0.1:{port}"
            env["RATCHET_TEMPORAL_UI"] = f"http://127.0.0.1:{self.record['ports']['temporal_ui']}"
            self.services["temporal"] = (self._temporal_command(), env)
        api = self._port("api", "api")
        self.services["api"] = (module_command("ratchet.api", "--port", str(api)), env)
        for role in WORKER_ROLES:
            name = f"worker-{role}"
            health = self._port(name, name)
            command = module_command("ratchet.worker", "--roles", role)
            self.services[name] = (command, {**env, "RATCHET_HEALTH_PORT": str(health)})

    def _until_kept(self) -> Addresses:
        """Waits until everything that a supervisor keeps answers."""
        expected = {"api", *(f"worker-{role}" for role in WORKER_ROLES)}
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            self.record = _recorded(self.file)
            # Only the supervisor knows whether Temporal is among them; it starts Temporal first.
            known = set(self.record["processes"])
            silent = [
                name
                for name in sorted(expected | known)
                if name not in known or not self._answers(name)
            ]
            if not silent:
                return self.addresses()
            if time.monotonic() > deadline:
                raise StackError(
                    f"{', '.join(silent)} did not answer within {READY_WITHIN_S:.0f} s; "
                    f"`make status` shows their state, and {self.home}/logs says why"
                )
            time.sleep(0.2)

    def _answers(self, name: str) -> bool:
        port = self.record["ports"][name]
        return answers(port) if name == "temporal" else _healthy(port)

    def health_url(self, name: str) -> str:
        """A service's health address; Temporal's Web UI belongs to its server's process."""
        port = self.record["ports"]["temporal_ui" if name == "temporal" else name]
        return f"http://127.0.0.1:{port}/healthz"

    def has_own_temporal(self) -> bool:
        """Whether the recorded stack has its own Temporal; if it is down, judging by its ports."""
        processes = self.record["processes"]
        return "temporal" in (processes or self.record["ports"])

    def addresses(self) -> Addresses:
        """Where the recorded stack answers."""
        ports = self.record["ports"]
        external = os.environ.get("TEMPORAL_ADDRESS", "")
        ours = not external and self.has_own_temporal()
        return Addresses(
            temporal=f"127.0.0.1:{ports['temporal']}" if ours else external,
            temporal_ui=f"http://127.0.0.1:{ports['temporal_ui']}" if ours else "",
            api=f"http://127.0.0.1:{ports['api']}",
        )

    def keep_ended_runs(self) -> None:
        """Makes Temporal keep ended runs: a dev server would forget them after a day. Raises
        StackError.
        """
        if problem := keep_ended_runs(self.record["ports"]["temporal"]):
            raise StackError(f"temporal cannot be set to keep ended runs: {problem}")

    @property
    def _database(self) -> Path:
        return self.home / "temporal.db"

    def _temporal_command(self) -> list[str]:
        ports = self.record["ports"]
        return server_command(self._database, ports["temporal"], ports["temporal_ui"])

    def _port(self, name: str, process: str) -> int:
        """The port of `name`: its previous one, its preferred one, or any free one."""
        ports: dict[str, int] = self.record["ports"]
        if self.alive(process) is not None and name in ports:
            return ports[name]
        variable = PORT_VARIABLES.get(name, "")
        if wanted := os.environ.get(variable):
            if not wanted.isdigit() or not _free(int(wanted)):
                raise StackError(
                    f"{variable}={wanted}: the port is in use or invalid; stop what listens there "
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
        self.services[name] = (command, env)
        if self.alive(name) is not None:
            return
        if name.startswith("worker-"):
            # Since it was planned, a connection may have taken the port of its health check.
            env = {**env, "RATCHET_HEALTH_PORT": str(self._port(name, name))}
        if name == "temporal":
            self._analyze()
        process = self._spawn(name, command, env)
        started = psutil.Process(process.pid).create_time()
        self.record["processes"][name] = {"pid": process.pid, "started": started}
        self._save()

    def _analyze(self) -> None:
        try:
            analyze(self._database)
        except sqlite3.Error as error:
            # A full disk may pass, and of a damaged file the server says more.
            log.warning("%s was not analyzed, lists of runs may be slow: %s", self._database, error)

    def _spawn(
        self, name: str, command: list[str], env: dict[str, str], files: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        with (self.home / "logs" / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=files,
            )

    def supervise(self) -> None:
        """Leaves a supervisor behind that keeps what `up` started, unless there is one. It holds
        the lock that identifies it from its very start.
        """
        if supervisor_of(self.home) is not None:
            return
        with (self.home / LOCK).open("a+") as lock:
            if not _taken(lock):
                return
            lock.truncate(0)
            env = {**os.environ, "RATCHET_HOME": str(self.home), LOCK_VARIABLE: str(lock.fileno())}
            command = module_command("ratchet.worker.supervisor")
            services_file(self.home).unlink(missing_ok=True)
            process = self._spawn("supervisor", command, env, (lock.fileno(),))
            _say_who(lock, process.pid)
        deadline = time.monotonic() + READY_WITHIN_S
        while not services_file(self.home).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StackError(f"no supervisor; the end of {self._tail('supervisor')}")
            time.sleep(0.05)

    def dead(self) -> list[str]:
        """Names of services that were started and have ended."""
        return [name for name in self.services if self.alive(name) is None]

    def revive(self, name: str) -> None:
        """Starts a service as planned, unless it runs. Raises OSError."""
        self._start(name, *self.services[name])

    def _listens(self, name: str) -> bool:
        """Whether it is this service that listens on its port, and not another stack's."""
        process, port = self.alive(name), self.record["ports"][name]
        try:
            found = process.net_connections("tcp") if process is not None else ()
        except psutil.NoSuchProcess:
            return False
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline, again = time.monotonic() + READY_WITHIN_S, True
        while not (self._listens(name) and ready()):
            dead = self.alive(name) is None
            own = ("temporal", "temporal_ui") if name == "temporal" else (name,)
            if dead and again and not all(_free(self.record["ports"][one]) for one in own):
                # Somebody took the port since it was planned, such as a stack that starts, too.
                again = False
                self.plan()
                self.revive(name)
                continue
            if dead or time.monotonic() > deadline:
                what = "ended" if dead else f"did not answer within {READY_WITHIN_S:.0f} s"
                raise StackError(f"{name} {what}; the end of {self._tail(name)}")
            time.sleep(0.1)

    def _tail(self, name: str) -> str:
        log = self.home / "logs" / f"{name}.log"
        return f"{log}:\n{''.join(log.read_text(errors='replace').splitlines(keepends=True)[-8:])}"

    # -- down -------------------------------------------------------------------------------

    def down(self) -> None:
        """Stops the supervisor, workers, then the API, then Temporal; reaps every server of every
        run.
        """
        if not self.home.exists():
            return
        with self._holding_off(fcntl.LOCK_SH):
            self._stop_supervisor()
            names = [f"worker-{role}" for role in WORKER_ROLES]
            self._stop(names)
            sweep(self.home, everything=True)
            self._stop(["api"])
            self._stop(["temporal"])
            self.record["processes"] = {}
            self._save()

    @contextlib.contextmanager
    def _holding_off(self, kind: int) -> Iterator[None]:
        """Keeps an `up` from adopting what a `down` is about to stop: `up` takes the lock for
        itself for a moment, `down` shares it, since a supervisor that is stopped stops the stack.
        """
        with (private_folder(self.home) / "stopping.lock").open("a") as lock:
            fcntl.flock(lock, kind)
            yield

    def _stop_supervisor(self) -> None:
        """Ends a supervisor that is not this process; what it started is recorded."""
        deadline = time.monotonic() + SUPERVISOR_ENDS_WITHIN_S
        number, ending = signal.SIGTERM, set[psutil.Process]()
        while (pid := supervisor_of(self.home)) not in (None, os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor = psutil.Process(pid)
                supervisor.send_signal(number)
                ending.add(supervisor)
            if time.monotonic() > deadline:
                number = signal.SIGKILL
            time.sleep(0.2)
            self.record = _recorded(self.file)
        # Its lock is released before it ends.
        psutil.wait_procs(ending, timeout=GRACE_S)

    def _stop(self, names: list[str]) -> None:
        processes = [p for p in (self.alive(name) for name in names) if p is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        _, stubborn = psutil.wait_procs(processes, timeout=GRACE_S)
        for process in stubborn:
            process.kill()
        psutil.wait_procs(stubborn, timeout=GRACE_S)

    # -- records ----------------------------------------------------------------------------

    def running(self) -> list[str]:
        """Names of the recorded processes that are alive."""
        return [name for name in self.record["processes"] if self.alive(name) is not None]

    def processes(self) -> list[Process]:
        """All processes that belong to the stack and how they are; none if it was stopped or never
        started.
        """
        supervised = supervisor_of(self.home) is not None
        states = {s.name: s for s in (read_services(self.home) if supervised else None) or ()}
        recorded = self.record["processes"]
        if not states and not recorded:
            return []
        temporal = ["temporal"] if self.has_own_temporal() else []
        expected = [*temporal, "api", *(f"worker-{role}" for role in WORKER_ROLES)]
        names = list(dict.fromkeys([*(states or expected), *recorded]))
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(lambda name: self._process(name, states.get(name)), names))

    def _process(self, name: str, state: ServiceState | None) -> Process:
        process, port = self.alive(name), self.record["ports"].get(name)
        pid = None if process is None else process.pid
        started = self.record["processes"].get(name, {}).get("started")
        if state is not None:
            return reported(state, pid, port, started)
        answers = pid is not None and port is not None and self._answers(name)
        return observed(name, pid, port, started, answers)

    def alive(self, name: str) -> psutil.Process | None:
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
        # Two that take the stack down at once would rename each other's part.
        folder = os.open(self.home, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            write_record(self.file, self.record)
        finally:
            os.close(folder)


def _recorded(file: Path) -> dict[str, dict[str, Any]]:
    """The contents of stack.json. A damaged one counts as empty: only a crash of the machine tears
    it, and the processes in it have ended with the machine.
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


@contextlib.contextmanager
def only_supervisor(home: Path) -> Iterator[None]:
    """Makes this process the supervisor of a home folder; raises StackError if it has one. The
    lock is released when the context is left, which is before the process ends, or by the kernel,
    however the process ends. A supervisor that `Stack.supervise` started inherits the lock.
    """
    if given := os.environ.pop(LOCK_VARIABLE, None):
        os.set_inheritable(int(given), False)
    with open(int(given), "a+") if given else (private_folder(home) / LOCK).open("a+") as file:
        if not _taken(file):
            raise StackError(f"{home} already has a supervisor; `make down` stops it")
        _say_who(file, os.getpid())
        yield


def _taken(file: IO[str]) -> bool:
    """Takes the supervisor's lock, unless another process holds it."""
    deadline = time.monotonic() + 1.0
    # Checking for a supervisor holds the lock for a moment, too.
    while not _locked(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _say_who(file: IO[str], pid: int) -> None:
    file.truncate(0)
    file.write(str(pid))
    file.flush()


def supervisor_of(home: Path) -> int | None:
    """The process that supervises a home folder; None if there is none."""
    if not (home / LOCK).exists():
        return None
    with (home / LOCK).open() as file:
        while not _locked(file, fcntl.LOCK_SH):
            file.seek(0)
            if pid := file.read():
                return int(pid)
            # It holds the lock and is about to write its pid.
            time.sleep(0.01)
    return None


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


class Ended(KeyboardInterrupt):
    """A signal asks this process to end, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def end_in_order() -> None:
    """Makes the first SIGTERM or SIGHUP raise Ended; further signals during cleanup, as from
    `timeout` and `make` together, are ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    stack = Stack(home_folder())
    if arguments == ["up"]:
        try:
            where = stack.up()
            stack.supervise()
        except StackError as error:
            print(f"up: {error}", file=sys.stderr)
            return 1
        print(f"API          {where.api}  (docs: {where.api}/docs)")
        print(f"Temporal     {where.temporal or 'yours'}  UI: {where.temporal_ui or 'yours'}")
        print(f"dashboard    {where.api}/dashboard/")
        print(f"state, logs  {stack.home}")
        home = f"RATCHET_HOME={stack.home} " if os.environ.get("RATCHET_HOME") else ""
        print(f'this shell   eval "$({home}make env)"  puts ratchet and temporal on its PATH')
        return 0
    if arguments == ["down"]:
        stack.down()
        return 0
    if arguments in (["status"], ["status", "--json"]):
        processes = stack.processes()
        if "--json" in arguments:
            print(json.dumps([process.document for process in processes]))
        else:
            print(table(processes))
        if processes and supervisor_of(stack.home) is None:
            print("no supervisor: what ends is not restarted; run `make up`", file=sys.stderr)
        return 0 if all(process.is_up for process in processes) else 1
    print("usage: python -m ratchet.worker.stack up|down|status [--json]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
