"""Ends servers whose keeper is gone, from the records that keepers leave.

A record names the machine (boot and pid namespace), the keeper and the server by pid and start
time, and the mark in the environment of everything the server started. So a reused pid is never
taken for ours, and processes that left the group or lost their parent are found all the same.
Records of other machines that share the folder are left alone.

The next sweep drops what a crash of the machine leaves behind: records of an earlier boot, and torn
records. The servers in them have ended with the machine.
"""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from ratchet.activities.hosting import keeper

KEEPER_SLACK_S = 3.0
KILL_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostRecord:
    """The contents of a record; `keeper` and `server` are (pid, start time in ticks)."""

    path: Path
    run: str
    host: str
    epoch: int
    machine: str
    keeper: tuple[int, int]
    server: tuple[int, int]
    mark: str
    grace_s: float
    node: str = ""

    @property
    def kept(self) -> bool:
        """Whether the keeper is still alive."""
        return keeper.start_time(self.keeper[0]) == self.keeper[1]


def records(home: Path) -> list[HostRecord]:
    """The records of this machine under `home`."""
    here = keeper.machine()
    return [record for _, record in _read(home) if record is not None and record.machine == here]


def _read(home: Path) -> Iterator[tuple[Path, HostRecord | None]]:
    """Every record under `home`; None for one that is damaged."""
    known = {field.name for field in fields(HostRecord)} - {"path"}
    for path in sorted((home / "hosts").glob("*.json")):
        try:
            data = path.read_bytes()
        except OSError as error:
            # The server may just have ended, and the next sweep may be able to read it.
            if not isinstance(error, FileNotFoundError):
                log.warning("the record of a server cannot be read: %s", error)
            continue
        try:
            reported = {name: value for name, value in json.loads(data).items() if name in known}
            reported |= {name: tuple(reported[name]) for name in ("keeper", "server")}
            record = HostRecord(path=path, **reported)
        except (ValueError, TypeError, KeyError, AttributeError):
            record = None
        yield path, record


def _drop_dead(home: Path) -> None:
    """Removes the records of servers that ended with the machine."""
    boot, node = keeper.machine().partition("/")[0], keeper.node()
    for path, record in list(_read(home)):
        if record is None:
            log.warning("%s is damaged, as by a crash of the machine, and is dropped", path)
        elif record.node != node or record.machine.partition("/")[0] == boot:
            continue
        # A record that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            path.unlink()


def _marked(record: HostRecord) -> list[int]:
    table = keeper.process_table()
    mark = f"{keeper.MARK}={record.mark}".encode()
    roots = []
    for pid, (_, started, _) in table.items():
        if (pid, started) == record.server:
            roots.append(pid)
            continue
        # Processes of other users cannot be read, and are not ours.
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                roots.append(pid)
    below = [pid for root in roots for pid in keeper.descendants(root, table)]
    live = {pid for pid in {*roots, *below} if table[pid][2] not in "ZX"}
    return sorted(live - {os.getpid(), record.keeper[0]})


def _end_keeper(record: HostRecord) -> None:
    pid = record.keeper[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + record.grace_s + KEEPER_SLACK_S
    while record.kept and time.monotonic() < deadline:
        time.sleep(0.05)
    if record.kept:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(record: HostRecord) -> int:
    """Ends what is left of one host, keeper included; returns how many processes it killed.

    Raises TimeoutError if a process does not go away within KILL_TIMEOUT_S of its SIGKILL.
    """
    if record.kept:
        _end_keeper(record)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := _marked(record):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{record.run} {record.host}: processes {left} cannot be killed")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.05)
    record.path.unlink(missing_ok=True)
    return len(killed)


def sweep(
    home: Path, *, run: str | None = None, host: str | None = None, everything: bool = False
) -> list[HostRecord]:
    """Ends orphans (servers without a live keeper), or all servers with `everything`.

    `run` and `host` restrict it. Returns the records that were cleared. Blocks for up to the
    servers' grace plus a few seconds; raises TimeoutError as `reap` does. Records of servers that a
    crash of the machine ended are simply dropped.
    """
    _drop_dead(home)
    cleared = []
    for record in records(home):
        if (run is not None and record.run != run) or (host is not None and record.host != host):
            continue
        if everything or not record.kept:
            reap(record)
            cleared.append(record)
    return cleared
