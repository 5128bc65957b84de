"""What a target was sent of each run: a small file per run, replaced as a whole.

Invariant: `pending` is on disk before any of it is sent, and gone from it only together with the
commit of its records, so that the numbers of records mean the same after a crash.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter


@dataclass(frozen=True)
class Record:
    """One point of the curves: the metrics of a step, or with `eval` those of an eval of it.

    `time` is Unix time in seconds, None where it is unknown; `eval` is the eval's id, else ''.
    """

    step: int
    time: float | None
    values: dict[str, float]
    eval: str = ""


@dataclass(frozen=True)
class Sent:
    """How far a run was sent: `count` records to the series `name`, and which are under way.

    `step` and `time` are those of the last step sent, -1 and None before the first. `mark` is the
    target's own note of where it stood after `count` records. `settled` describes the end of a run
    of which everything was sent, else ''.
    """

    name: str
    count: int = 0
    step: int = -1
    time: float | None = None
    evals: tuple[str, ...] = ()
    mark: Any = None
    pending: tuple[Record, ...] = ()
    settled: str = ""

    def committed(self, mark: Any) -> "Sent":
        """The state after the target took all that was pending."""
        steps = [record for record in self.pending if not record.eval]
        evals = tuple(record.eval for record in self.pending if record.eval)
        last = steps[-1] if steps else self
        return replace(
            self,
            count=self.count + len(self.pending),
            step=last.step,
            time=last.time,
            evals=self.evals + evals,
            mark=mark,
            pending=(),
        )


SENT = TypeAdapter(Sent)


class States:
    """The files of one target, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, run_id: str) -> Sent:
        """What was sent of a run; nothing, if it is not known."""
        file = self._file(run_id)
        if not file.exists():
            return Sent(run_id)
        return SENT.validate_json(file.read_bytes())

    def save(self, run_id: str, sent: Sent) -> None:
        """Replaces the file; it is on the disk when this returns."""
        file = self._file(run_id)
        part = file.with_suffix(".part")
        with part.open("w") as out:
            json.dump(asdict(sent), out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)

    def _file(self, run_id: str) -> Path:
        return self._folder / f"{quote(run_id, safe='')}.json"
