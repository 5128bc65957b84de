"""What the environment doubles saw, and how busy the permits were. Pure; times in seconds.

Everything is measured at the environment's side, inside the rollout activities, so every hop of
the control plane counts as idle time. Definitions:

- *executing*: rollouts inside an activity of the double.
- *work remains*: a rollout is due that has not begun. Eval rollouts are due from the moment the
  push of their version ended; train rollouts up to the admission limit,
  min(max_steps, version + 1 + max_lag) batches. Time in which the off-policy limit leaves nothing
  to start is not counted, nor is the end of a run, when everything has begun.
- *eval window*: from the end of the push that makes an eval due to the end of its last rollout.
- *utilization*: executing / permits, integrated over time while work remains.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Mark:
    """`count` rollouts of `kind` began or ended, or policy version `count` was reached.

    `generation` is the dispatch generation whose activity it was.
    """

    at: float
    what: Literal["begin", "end", "version"]
    count: int
    kind: str = ""
    generation: int = -1


@dataclass(frozen=True)
class Plan:
    """What a run will admit. `eval_rollouts` are those of one eval; 0 means that there is none."""

    permits: int
    batch_size: int
    max_steps: int
    max_lag: int
    eval_rollouts: int = 0
    eval_interval: int = 1

    def train_due(self, version: int) -> int:
        """Train rollouts that may have begun in all while the policy is at `version`."""
        return self.batch_size * min(self.max_steps, version + 1 + self.max_lag)

    def evals_at(self, version: int) -> int:
        """Eval rollouts that become due with `version`."""
        fires = version % self.eval_interval == 0 or version == self.max_steps
        return self.eval_rollouts if fires else 0


@dataclass(frozen=True)
class Span:
    """A stretch of time between two marks, in which nothing changed."""

    begin: float
    end: float
    executing: int
    work_remains: bool
    in_eval: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass
class Ledger:
    """Marks in order of time."""

    clock: Callable[[], float] = time.monotonic
    marks: list[Mark] = field(default_factory=list)

    def begin(self, kind: str, count: int, generation: int) -> None:
        """`count` rollouts begin."""
        self.marks.append(Mark(self.clock(), "begin", count, kind, generation))

    def end(self, kind: str, count: int, generation: int) -> None:
        """`count` rollouts ended."""
        self.marks.append(Mark(self.clock(), "end", count, kind, generation))

    def version(self, version: int) -> None:
        """The push of `version` ended."""
        self.marks.append(Mark(self.clock(), "version", version))


def spans(marks: list[Mark], plan: Plan) -> Iterator[Span]:
    """The time from the first version on, cut at every mark."""
    version, executing, eval_due = -1, 0, 0
    begun = {"train": 0, "eval": 0}
    ended = {"train": 0, "eval": 0}
    for mark, following in pairwise(marks):
        if mark.what == "version":
            version = mark.count
            eval_due += plan.evals_at(version)
        elif mark.what == "begin":
            executing += mark.count
            begun[mark.kind] += mark.count
        else:
            executing -= mark.count
            ended[mark.kind] += mark.count
        if version >= 0:
            remains = begun["eval"] < eval_due or begun["train"] < plan.train_due(version)
            in_eval = ended["eval"] < eval_due
            yield Span(mark.at, following.at, executing, remains, in_eval)


def utilization(marks: list[Mark], plan: Plan, *, in_eval: bool = False) -> float:
    """Executing / permits while work remains; with `in_eval` over eval windows only."""
    counted = [
        span for span in spans(marks, plan) if span.work_remains and (span.in_eval or not in_eval)
    ]
    busy = sum(span.seconds * min(span.executing, plan.permits) for span in counted)
    whole = sum(span.seconds * plan.permits for span in counted)
    return busy / whole if whole else 0.0


def limited_s(marks: list[Mark], plan: Plan) -> float:
    """Seconds in which nothing was due that had not begun."""
    return sum(span.seconds for span in spans(marks, plan) if not span.work_remains)


@dataclass(frozen=True)
class HandOvers:
    """Idle time around hand-overs, in seconds of all permits.

    `gap_s` is idle time from the last admission of a generation to the first of the next: the
    whole of it, refills that any rollout waits for included. `tail_excess_s` is what was idle
    beyond the run's usual share from there until the older generation's last rollout ended.
    """

    count: int
    gap_s: float
    longest_gap_s: float
    tail_excess_s: float


def hand_overs(marks: list[Mark], plan: Plan) -> HandOvers:
    """Measures every hand-over between consecutive generations."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    closed: dict[int, float] = {}
    for mark in marks:
        if mark.what == "begin":
            first.setdefault(mark.generation, mark.at)
            last[mark.generation] = mark.at
        elif mark.what == "end":
            closed[mark.generation] = mark.at
    order = sorted(first)
    gaps = [(last[g], first[h]) for g, h in pairwise(order)]
    tails = [(max(last[g], first[h]), closed[g]) for g, h in pairwise(order)]
    counted = [span for span in spans(marks, plan) if span.work_remains]
    idle_in_gaps = [_idle_s(counted, plan, *gap) for gap in gaps]
    in_tails = sum(_idle_s(counted, plan, *tail) for tail in tails)
    tail_s = sum(max(end - begin, 0.0) for begin, end in tails)
    gap_s = sum(max(end - begin, 0.0) for begin, end in gaps)
    whole_s = sum(span.seconds for span in counted)
    idle = sum(span.seconds * (1 - min(span.executing / plan.permits, 1.0)) for span in counted)
    elsewhere_s = whole_s - tail_s - gap_s
    usual = (idle - in_tails - sum(idle_in_gaps)) / elsewhere_s if elsewhere_s > 0 else 0.0
    return HandOvers(
        count=len(gaps),
        gap_s=sum(idle_in_gaps),
        longest_gap_s=max(idle_in_gaps, default=0.0),
        tail_excess_s=in_tails - usual * tail_s,
    )


def _idle_s(counted: list[Span], plan: Plan, begin: float, end: float) -> float:
    overlaps = (
        (min(span.end, end) - max(span.begin, begin), span)
        for span in counted
        if span.begin < end and span.end > begin
    )
    return sum(length * (1 - min(span.executing / plan.permits, 1.0)) for length, span in overlaps)
