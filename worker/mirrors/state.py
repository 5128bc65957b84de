"""What was sent to a target about each run: a small file for its curves and one for its gauges,
each replaced as a whole.

Invariant: `pending` is on disk before any of it is sent, and removed only together with the commit
of its records, so that the numbers of records mean the same after a crash.

Files of earlier builds lack later fields, whose defaults mean the same: no samples, no gauges.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from ratchet.activities.storage import files

LATE_S = 300.0
"""Gauges of a worker are sent if they become readable this long after later ones of others."""


@dataclass(frozen=True)
class Sample:
    """A rollout of an eval, as a row of a table: the example's index, the messages, the reward."""

    example: int
    prompt: str
    reply: str
    reward: float | None


COLUMNS = ("step", "example", "prompt", "reply", "reward")


@dataclass(frozen=True)
class Record:
    """One point of the curves: the metrics of a step, or with `eval` those of an eval of it, or
    with `source` the gauges of a worker at a moment, whose `step` is in whole Unix seconds.

    `time` is Unix time in seconds, None where it is unknown; `eval` is the eval's id, '<n>/<env>',
    and `source` the worker's, else ''. `samples` are of an eval.
    """

    step: int
    time: float | None
    values: dict[str, float]
    eval: str = ""
    source: str = ""
    samples: tuple[Sample, ...] = ()

    @property
    def table(self) -> str:
        """The name of the table of samples."""
        return f"eval/{self.eval.partition('/')[2]}/samples"

    @property
    def rows(self) -> list[list[Any]]:
        """The table of samples, by `COLUMNS`."""
        return [
            [self.step, each.example, each.prompt, each.reply, each.reward] for each in self.samples
        ]


@dataclass(frozen=True)
class Sent:
    """How far a run was sent: `count` records to the series `name`, and those that are pending.

    `step` and `time` are those of the last step sent, -1 and None before the first. `gauges` has
    the time of the last gauges sent of each worker, except for those older by LATE_S than the
    latest. `mark` is the target's own note of its state after `count` records. `settled` describes
    the end of a run that was sent completely, else ''.
    """

    name: str
    count: int = 0
    step: int = -1
    time: float | None = None
    evals: tuple[str, ...] = ()
    mark: Any = None
    pending: tuple[Record, ...] = ()
    settled: str = ""
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def gauges_since(self) -> float:
        """The Unix time after which there may be unsent gauges."""
        return max(max(self.gauges.values(), default=0.0) - LATE_S, 0.0)

    def committed(self, mark: Any) -> "Sent":
        """The state after the target took all pending records."""
        steps = [record for record in self.pending if not (record.eval or record.source)]
        evals = tuple(record.eval for record in self.pending if record.eval)
        last = steps[-1] if steps else self
        gauges = {r.source: r.time for r in self.pending if r.source and r.time is not None}
        after = replace(
            self,
            count=self.count + len(self.pending),
            step=last.step,
            time=last.time,
            evals=self.evals + evals,
            mark=mark,
            pending=(),
            gauges={**self.gauges, **gauges},
        )
        recent = {name: at for name, at in after.gauges.items() if at > after.gauges_since}
        return replace(after, gauges=recent)


SENT = TypeAdapter(Sent)


class States:
    """The files of one target, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, first: str) -> Sent:
        """What was sent of a run, or of its gauges; empty if unknown. `first` is the run's first
        series.
        """
        file = self._file(first)
        if not file.exists():
            return Sent(first)
        return SENT.validate_json(file.read_bytes())

    def save(self, first: str, sent: Sent) -> None:
        """Replaces the file; it is on the disk when this returns."""
        files.replace(self._file(first), [json.dumps(asdict(sent)).encode()], sync=True)

    def _file(self, first: str) -> Path:
        return self._folder / f"{quote(first, safe='')}.json"
