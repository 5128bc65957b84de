"""Finds the processes of one stack by role, and says what state the kernel sees them in.

Workers, API and Temporal are those that the stack recorded; servers of runs are found by the
records of their keepers, so that nothing of another stack is ever touched.
"""

from pathlib import Path
from typing import Literal, cast, get_args

import psutil

from ratchet.activities.hosting import keeper, reaper
from ratchet.worker.stack import Stack

Service = Literal[
    "api",
    "orchestrator-worker",
    "rollout-worker",
    "trainer-worker",
    "inference-worker",
    "env-worker",
    "temporal",
]
"""Kept alive by a process supervisor."""
Server = Literal["trainer-process", "engine-api", "engine-core", "env-server"]
"""Kept alive by the run's own hosts."""
Role = Service | Server

SERVICES: tuple[Service, ...] = get_args(Service)
SERVERS: tuple[Server, ...] = get_args(Server)
HOST_ROLE = {
    "trainer-process": "trainer",
    "engine-api": "engine",
    "engine-core": "engine",
    "env-server": "env",
}
"""The role of the host that keeps a kind of server."""
OWNER: dict[Server, Service] = {
    "trainer-process": "trainer-worker",
    "engine-api": "inference-worker",
    "engine-core": "inference-worker",
    "env-server": "env-worker",
}


def recorded_name(role: Role) -> str:
    """The name of a service in stack.json."""
    return role if role in ("api", "temporal") else f"worker-{role.removesuffix('-worker')}"


def find(stack: Stack, role: Role, *, up: bool = False) -> psutil.Process | None:
    """The live process of `role`, a server only once its host says it is `up`, if that is wanted;
    None if there is none at the moment.
    """
    if role in SERVICES:
        return stack.alive(recorded_name(role))
    for record in reaper.records(stack.home):
        wanted = record.kept and record.host.startswith(HOST_ROLE[role])
        if wanted and (not up or said_up(stack, cast(Server, role), record)):
            pid = record.server[0]
            if role != "engine-core":
                return _process(pid, record.server[1])
            for below in keeper.descendants(pid, keeper.process_table()):
                if "EngineCore" in command_of(below):
                    return _process(below, None)
    return None


def said_up(stack: Stack, role: Server, record: reaper.HostRecord) -> bool:
    """Whether the host of a server has found it healthy, by its worker's log."""
    log = stack.home / "logs" / f"{recorded_name(OWNER[role])}.log"
    line = f"{record.run} {record.host} (epoch {record.epoch}) is up"
    return log.exists() and line in log.read_text(errors="replace")


def _process(pid: int, started: int | None) -> psutil.Process | None:
    now = keeper.start_time(pid)
    if now is None or (started is not None and now != started):
        return None
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def command_of(pid: int) -> str:
    """The command line of a process, '' if it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace")


def kernel_state(pid: int) -> str:
    """The state letter of /proc/<pid>/stat: 'T' is stopped, 'Z' a zombie; '' if it is gone."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return data.rpartition(b") ")[2].split()[0].decode()


def gone(pid: int, created: float) -> bool:
    """Whether the process that had `pid` and was created then has ended."""
    try:
        process = psutil.Process(pid)
        return process.create_time() != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def of_home(home: Path) -> list[str]:
    """What runs for the stack under `home`, servers included: 'pid command' each."""
    found = []
    mark = f"RATCHET_HOME={home}".encode()
    for pid in psutil.pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # A zombie has an empty environment, so it is never counted.
        if mark in variables:
            found.append(f"{pid} {command_of(pid)[:120]}")
    return found
