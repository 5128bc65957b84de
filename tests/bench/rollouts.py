"""`make bench-rollouts`: what a rollout of the demo costs each process, and how fast a run is.

One run of CONFIG with the changes in SET (`SET="max_steps=8"` is the quick form), on a stack with
a home of its own. The warm-started policy is in its store before the run begins; POLICY names a
folder that keeps it for the next time. The last line of stdout is one JSON object: wall seconds,
also up to the first delivered rollouts, rewards (the last is a mean of LAST_STEPS), and CPU
milliseconds per rollout by role, of the whole run (`cpu_ms`) and of its steady part: from the
record of step STEADY_FROM to that of the last step, with rollouts per second. `warm_start_s` is
what making the policy took, 0 if POLICY had it. Exits with 1 if the run does not succeed.

CPU seconds are read from /proc every EVERY_S for all processes below this one: what a process did
after it was last seen is missing, and so are processes that live shorter than that.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ratchet.activities.contracts.statuses import ENDED
from ratchet.activities.storage.keys import POLICY_FILE
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.client import Ratchet
from ratchet.api.schemas.metrics import EvalRecord, MetricsRow
from ratchet.api.schemas.run import Run
from ratchet.configs.load import load
from ratchet.configs.run import RunConfig
from ratchet.worker.stack import Stack
from tests import ROOT
from tests.warm import make_policy, put_policy

EVERY_S = 0.3
STEADY_FROM = 2
LAST_STEPS = 5
CONFIG = "configs/examples/reverse_text.toml"
ROLES = {
    name: re.compile(pattern)
    for name, pattern in {
        "engine core": r"^VLLM::EngineCore",
        "engine API": r" -m vllm\.entrypoints\.",
        "env server": r" -m ratchet\.activities\.envs\.server ",
        "task loading": r" -m ratchet\.activities\.envs\.(check|dump)\b",
        "trainer": r" -m ratchet\.activities\.training\.process\b",
        "model checks": r" -m ratchet\.activities\.(training\.prepare|envs\.rendering)\b",
        "Temporal": r"/temporal server ",
        "API": r" -m ratchet\.api\b",
        "orchestrator": r" -m ratchet\.worker --roles orchestrator\b",
        "rollout worker": r" -m ratchet\.worker --roles rollout\b",
        "inference worker": r" -m ratchet\.worker --roles inference\b",
        "trainer worker": r" -m ratchet\.worker --roles trainer\b",
        "env worker": r" -m ratchet\.worker --roles env\b",
        "keepers": r"/hosting/keeper\.py ",
    }.items()
}
"""Which command lines, words joined by spaces, are of a role; all others are 'other'."""

Costs = Mapping[str, float]
"""By role."""


@dataclass(frozen=True)
class Sample:
    """CPU seconds by role up to a moment (Unix time)."""

    at: float
    cpu_s: Costs


def role_of(command: str) -> str:
    """The role of a process by its command line."""
    return next((name for name, pattern in ROLES.items() if pattern.search(command)), "other")


def by_role(processes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum over processes, each a command line and a number, for each role that there is."""
    sums: dict[str, float] = {}
    for command, value in processes:
        role = role_of(command)
        sums[role] = sums.get(role, 0.0) + value
    return sums


def at(samples: Sequence[Sample], moment: float) -> dict[str, float]:
    """CPU seconds by role at a moment, between two samples in proportion."""
    before = max((s for s in samples if s.at <= moment), key=lambda s: s.at, default=samples[0])
    after = min((s for s in samples if s.at >= moment), key=lambda s: s.at, default=samples[-1])
    share = (moment - before.at) / (after.at - before.at) if after.at > before.at else 0.0
    return {
        role: before.cpu_s.get(role, 0.0) + share * (cpu_s - before.cpu_s.get(role, 0.0))
        for role, cpu_s in after.cpu_s.items()
    }


def per_rollout(
    samples: Sequence[Sample], begin: float, end: float, rollouts: int
) -> dict[str, float]:
    """CPU milliseconds a rollout by role between two moments, the dearest first, and of 'all'."""
    first, last = at(samples, begin), at(samples, end)
    each = {role: (cpu_s - first.get(role, 0.0)) / rollouts for role, cpu_s in last.items()}
    ordered = sorted(each.items(), key=lambda item: -item[1])
    all_of_them = ("all", sum(each.values()))
    return {role: round(1000 * cost, 2) for role, cost in [*ordered, all_of_them]}


def delivered(steps: Sequence[MetricsRow], evals: Sequence[EvalRecord]) -> tuple[float, float, int]:
    """The steady part of a run: its begin and end (Unix time), and the rollouts of its batches and
    of the evals that came between.
    """
    within = [row for row in steps if row.step >= STEADY_FROM]
    first, last = within[0], within[-1]
    assert first.time and last.time and first is not last, "a run of more steps has a steady part"
    counts = [row.metrics["progress/rollouts"] or 0.0 for row in (first, last)]
    played = [(one.model_extra or {})["rollouts"] for one in evals if _between(one, first, last)]
    return first.time, last.time, int(counts[1] - counts[0]) + sum(played)


def _between(one: EvalRecord, first: MetricsRow, last: MetricsRow) -> bool:
    return one.step is not None and first.step <= one.step < last.step


class Meter(threading.Thread):
    """Takes samples of all processes below this one until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._seen: dict[tuple[int, str], tuple[str, float]] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Takes one sample after the other."""
        while not self._stopped.is_set():
            self._look()
            self.samples.append(Sample(time.time(), by_role(self._seen.values())))
            self._stopped.wait(EVERY_S)

    def stop(self) -> None:
        """Ends it, and waits for that."""
        self._stopped.set()
        self.join()

    def _look(self) -> None:
        found: dict[int, tuple[int, str, float]] = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            # A process may end between the listing and the reading.
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()
                cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[int(entry)] = (int(fields[1]), fields[19], cpu_s)
        ours = {os.getpid()}
        while more := {pid for pid, (parent, _, _) in found.items() if parent in ours} - ours:
            ours |= more
        for pid in ours - {os.getpid()}:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                # A zombie has no command line any more; what was seen of it stays.
                if command:
                    self._seen[pid, found[pid][1]] = (command, found[pid][2])


def play(client: Ratchet, config: RunConfig) -> tuple[Run, float]:
    """One run, when it has ended, and the Unix time at which rollouts had been delivered."""
    run, first = client.runs.create(config), 0.0
    while run.status not in ENDED:
        time.sleep(0.25 if not first else 2.0)
        run = client.runs.retrieve(run.id)
        if not first and any(run.rollouts.values()):
            first = time.time()
    return run, first


@dataclass(frozen=True)
class Played:
    """A run that has ended, on the stack that `client` talks to; `temporal` is an address."""

    client: Ratchet
    temporal: str
    run: Run
    first: float
    samples: Sequence[Sample]


@contextlib.contextmanager
def played(config: RunConfig, home: Path) -> Iterator[Played]:
    """Carries one run out on a stack of its own, which is up in the block, and measures it."""
    stack, meter = Stack(home), Meter()
    try:
        where = stack.up()
        meter.start()
        with Ratchet(where.api) as client:
            run, first = play(client, config)
            meter.stop()
            yield Played(client, where.temporal, run, first, meter.samples)
    finally:
        stack.down()


def figures(
    run: Run,
    first: float,
    steps: Sequence[MetricsRow],
    evals: Sequence[EvalRecord],
    samples: Sequence[Sample],
) -> dict[str, Any]:
    """What a run that ended came to."""
    assert run.created_at and run.finished_at
    begin, end = run.created_at.timestamp(), run.finished_at.timestamp()
    rollouts = sum(run.rollouts.values())
    steady_begin, steady_end, steady = delivered(steps, evals)
    rewards = [row.metrics["reward/all/mean"] or 0.0 for row in steps]
    return {
        "steps": run.step,
        "rollouts": rollouts,
        "wall_s": round(end - begin, 1),
        "first_rollouts_s": round(first - begin, 1),
        "reward_first": round(rewards[0], 3),
        "reward_last": round(fmean(rewards[-LAST_STEPS:]), 3),
        "cpu_ms": per_rollout(samples, begin, end, rollouts),
        "steady": {
            "rollouts": steady,
            "per_s": round(steady / (steady_end - steady_begin), 1),
            "cpu_ms": per_rollout(samples, steady_begin, steady_end, steady),
        },
    }


def bench(config: RunConfig, home: Path, policy: Path) -> dict[str, Any]:
    """Carries one run out and measures it."""
    began = time.monotonic()
    if not (policy / POLICY_FILE).is_file():
        make_policy(config, policy)
    warm_start_s = time.monotonic() - began
    put_policy(ArtifactStore(f"file://{home}/store", home / "stores.json"), config, policy)
    with played(config, home) as it:
        run = it.run
        if run.status != "succeeded":
            return {"status": run.status, "error": str(run.error)}
        steps = it.client.runs.metrics(run.id, limit=10_000).data
        evals = it.client.runs.evals(run.id).data
    found = figures(run, it.first, steps, evals, it.samples)
    return {"status": run.status, "warm_start_s": round(warm_start_s, 1), **found}


def main() -> int:
    """Entry point; returns the exit status."""
    path = ROOT / os.environ.get("CONFIG", CONFIG)
    config = load(path, os.environ.get("SET", "").split())
    with tempfile.TemporaryDirectory(prefix="ratchet-rollouts-") as home:
        policy = Path(os.environ.get("POLICY") or f"{home}/policy").absolute()
        found = bench(config, Path(home), policy)
    print(json.dumps({"config": path.name, **found}))
    return 0 if found["status"] == "succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
