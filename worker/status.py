"""What `make status` says of each process of a local stack. Pure.

Invariants:

- `running` means that it answered: to its supervisor, or just now. Every other state is one of its
  own, and `is_up` is false.
- A process that has ended is DEAD unless a supervisor reports that it will be started again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ratchet.activities.contracts.services import ServiceState

ProcessState = Literal["running", "starting", "restarting", "crash-loop", "silent", "DEAD"]
REPORTED: dict[str, ProcessState] = {
    "up": "running",
    "starting": "starting",
    "down": "restarting",
    "crash-looping": "crash-loop",
}
HEADS = ("service", "state", "pid", "port", "since")


@dataclass(frozen=True)
class Process:
    """One process: its state `since` when (ISO 8601; '' is unknown), and a `note` if it has ended.
    `pid` is None while it does not run.
    """

    name: str
    state: ProcessState
    pid: int | None
    port: int | None
    since: str
    note: str = ""

    @property
    def is_up(self) -> bool:
        """Whether it runs and answers."""
        return self.state == "running"

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        return {**asdict(self), "is_up": self.is_up}


def reported(
    state: ServiceState, pid: int | None, port: int | None, started: float | None
) -> Process:
    """A process whose supervisor reports its state; one that is up runs since `started`, a Unix
    time, which may be before its supervisor first saw it.
    """
    what = REPORTED[state.state]
    if pid is None and what in ("running", "starting"):
        what = "restarting"
    ended = f"ended {state.ends} times in a row" if state.ends > 1 else "ended"
    before = " before" if what == "running" else ""
    note = f"{ended}{before}; see {state.log}" if state.ends else ""
    runs = what == "running" and started is not None
    return Process(
        state.name, what, pid, port, _seconds(_iso(started) if runs else state.since), note
    )


def observed(
    name: str, pid: int | None, port: int | None, started: float | None, answers: bool
) -> Process:
    """A process that no supervisor reports; `started` is a Unix time."""
    if pid is None:
        return Process(name, "DEAD", None, port, "", f"ended; see logs/{name}.log")
    since = _iso(started)
    if answers:
        return Process(name, "running", pid, port, _seconds(since))
    return Process(name, "silent", pid, port, _seconds(since), "it does not answer")


def table(processes: Sequence[Process]) -> str:
    """The processes in columns, one to a line."""
    if not processes:
        return "nothing is running"
    rows = [HEADS] + [
        (one.name, one.state, str(one.pid or "-"), str(one.port or "-"), one.since or "-", one.note)
        for one in processes
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADS))]
    padded = [[*(cell.ljust(w) for cell, w in zip(row, widths, strict=False))] for row in rows]
    notes = [row[len(HEADS) :] for row in rows]
    return "\n".join(
        "  ".join([*cells, *note]).rstrip() for cells, note in zip(padded, notes, strict=True)
    )


def _iso(time: float | None) -> str:
    """A Unix time as ISO 8601; '' for None."""
    return "" if time is None else datetime.fromtimestamp(time, UTC).isoformat()


def _seconds(since: str) -> str:
    """A time without its fraction of a second."""
    if not since:
        return ""
    return datetime.fromisoformat(since).strftime("%Y-%m-%dT%H:%M:%SZ")
