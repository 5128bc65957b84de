"""Keeps one server and everything it starts, and never outlives its worker or its server.

Runs as a process of its own, from this file alone (standard library, no package imports):

    python -I -S keeper.py RECORD < pipe

The worker writes one JSON line (what to start) and then holds the pipe open. Invariants:

- The server leads its own session and does not run before RECORD names it.
- When the pipe ends (the worker is gone, in whatever way), on SIGTERM, or when the server exits,
  the whole process group and every descendant is ended: SIGTERM, a grace period, SIGKILL. As a
  child subreaper the keeper inherits descendants whose parents died, so none can hide.
- RECORD is removed only when nothing is left. If the keeper itself is killed with -9, RECORD and
  the mark that every descendant carries in its environment show a sweep what to end
  (`ratchet.activities.hosting.reaper`).

On stdout it reports `{"pid": n}` once the server is started, or `{"errno": n, "error": text}` if it
cannot be, since RECORD could not be written, and `{"exit": code}` at the end; the
code is the server's exit status, or the negated signal that ended it.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

MARK = "RATCHET_HOST_MARK"
"""Environment variable that a server and all it starts inherit; its value is unique per server."""

TICK_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGCHLD,
)


def process_table() -> dict[int, tuple[int, int, str]]:
    """Every visible process: pid to (parent's pid, start time in ticks since boot, state)."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        # A process may end between the listing and the reading.
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name, in parentheses, may itself hold spaces and parentheses.
                fields = file.read().rpartition(b") ")[2].split()
            table[int(entry)] = (int(fields[1]), int(fields[19]), fields[0].decode())
    return table


def start_time(pid: int) -> int | None:
    """When the live process `pid` started, in ticks since boot; None if gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def descendants(root: int, table: dict[int, tuple[int, int, str]]) -> list[int]:
    """Processes below `root`, zombies included, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    result = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        queue += below
        result += below
    return result


def machine() -> str:
    """Identifies the pid namespace: the boot and the namespace's own id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def node() -> str:
    """Identifies this machine across boots."""
    with contextlib.suppress(OSError):
        return f"{os.uname().nodename}/{Path('/etc/machine-id').read_text().strip()}"
    return os.uname().nodename


def write_record(path: Path, record: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Replaces the record at `path`; a reader sees the old one or the new one, also after a crash
    of the machine.
    """
    part = path.with_suffix(".part")
    try:
        with part.open("w") as file:
            file.write(json.dumps(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        # On a full disk, half a record would keep it full.
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _say(message: dict[str, Any]) -> None:
    # The worker may be gone; nobody else listens.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Keeper:
    """The keeper's state: the server it started and what it still has to end."""

    def __init__(self, record: Path, order: dict[str, Any]) -> None:
        self.record = record
        self.order = order
        self.grace_s = float(order["grace_s"])
        self.parent = os.getppid()
        self.pid = 0
        self.status: int | None = None
        self.asked = False

    def start(self) -> None:
        """Starts the server, which waits until the record names it."""
        go, release = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._become_server(go, release)
        os.close(go)
        me = os.getpid()
        record = {
            **self.order["identity"],
            "machine": machine(),
            "node": node(),
            "keeper": [me, start_time(me)],
            "server": [self.pid, start_time(self.pid)],
            "mark": self.order["env"][MARK],
            "grace_s": self.grace_s,
        }
        try:
            write_record(self.record, record)
        except OSError as error:
            # The waiting server ends when it is not released.
            os.close(release)
            os.waitpid(self.pid, 0)
            _say({"errno": error.errno, "error": f"{error.strerror}: {self.record}"})
            sys.exit(1)
        os.write(release, b"g")
        os.close(release)
        _say({"pid": self.pid})

    def _become_server(self, go: int, release: int) -> None:
        try:
            os.close(release)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            # An empty read: the keeper died before it could record this process.
            if os.read(go, 1):
                os.chdir(self.order["cwd"])
                os.execvpe(self.order["argv"][0], self.order["argv"], self.order["env"])
        except OSError as error:
            os.write(2, f"cannot start {self.order['argv'][0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def ask(self) -> None:
        """Ends the watch at its next turn."""
        self.asked = True

    def reap(self) -> None:
        """Collects every child that has ended, including adopted ones."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)

    def watch(self, wakeup: int) -> None:
        """Returns when the server has exited or it is time to end it."""
        while self.status is None and not self.asked:
            ready, _, _ = select.select([0, wakeup], [], [], TICK_S)
            if wakeup in ready:
                os.read(wakeup, 4096)
            if 0 in ready:
                # A worker in a hurry sends another grace before it closes the pipe.
                data = os.read(0, 64)
                if data.strip():
                    self.grace_s = float(data.split()[-1])
                else:
                    self.asked = True
            # A forked copy of the worker could hold the pipe open; a new parent shows its death.
            self.asked = self.asked or os.getppid() != self.parent
            self.reap()

    def end(self) -> None:
        """Ends the group and all descendants; returns only when they are gone."""
        deadline = time.monotonic() + (self.grace_s if self.status is None else 0.0)
        if self.status is None and self.grace_s > 0:
            _signal_group(self.pid, signal.SIGTERM)
        while True:
            self.reap()
            left = descendants(os.getpid(), process_table())
            if not left and self.status is not None:
                break
            if self.status is not None or time.monotonic() >= deadline:
                # Once the leader is collected, its group id may be reused.
                if self.status is None:
                    _signal_group(self.pid, signal.SIGKILL)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.record.unlink(missing_ok=True)
        _say({"exit": self.status})


def main() -> None:
    """Entry point; see the module's documentation."""
    text = b""
    while b"\n" not in text:
        piece = os.read(0, 65536)
        if not piece:
            return
        text += piece
    order, _, grace = text.partition(b"\n")
    keeper = Keeper(Path(sys.argv[1]), json.loads(order))
    if grace.strip():
        keeper.grace_s = float(grace)
    wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: keeper.ask())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper.start()
    keeper.watch(wakeup)
    keeper.end()


if __name__ == "__main__":
    main()
