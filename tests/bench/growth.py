"""`make bench-growth`: whether anything grows with the number of steps.

STEPS near-instant steps of one group of two rollouts. Every SAMPLE steps it notes wall clock and
CPU per step of worker and server, their resident memory, and history events per step; each sample
is a line of the file OUT (.ratchet/bench-growth.jsonl) as soon as it is taken. With HOPS=1 it also
prints where the time of a step goes, from the histories. The last line of stdout compares the mean
of the last tenth of the samples with that of the first. Exits with 1 if one of these ratios is
above 1.25 or a history holds more than 10,000 events.
"""

import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.bench.hops import profile, table
from tests.bench.stage import Stage, finish, histories, new_world, number, stage, start, worker

MOST_GROWTH = 1.25
MOST_EVENTS = 10_000
COMPARED = (
    "wall_ms",
    "worker_cpu_ms",
    "server_cpu_ms",
    "worker_rss_mib",
    "server_rss_mib",
    "run_events",
    "dispatch_events",
)


@dataclass(frozen=True)
class Totals:
    """Counters since the start."""

    steps: int
    wall_s: float
    worker_s: float
    server_s: float
    run_events: int
    dispatch_events: int


@dataclass(frozen=True)
class Sample:
    """The stretch of steps that ends at `step`: figures per step, memory at its end."""

    step: int
    wall_ms: float
    worker_cpu_ms: float
    server_cpu_ms: float
    worker_rss_mib: float
    server_rss_mib: float
    run_events: float
    dispatch_events: float
    longest_history: int
    runs: int
    generations: int
    database_mib: float


def config(steps: int) -> dict[str, Any]:
    """One group of two rollouts a step."""
    return {
        "name": "growth",
        "max_steps": steps,
        "train": {"env": [{"id": "reverse-text"}], "batch_size": 2, "group_size": 2, "max_lag": 1},
        "checkpoint": {"interval": 100},
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)


async def _sample(theatre: Stage, run_id: str, steps: int, before: Totals) -> tuple[Sample, Totals]:
    counted = await histories(theatre.client, run_id)
    me = psutil.Process()
    now = Totals(
        steps,
        time.monotonic(),
        _cpu_s(me),
        _cpu_s(theatre.server),
        counted.run_events,
        counted.dispatch_events,
    )
    done = max(now.steps - before.steps, 1)
    sample = Sample(
        step=steps,
        wall_ms=(now.wall_s - before.wall_s) * 1e3 / done,
        worker_cpu_ms=(now.worker_s - before.worker_s) * 1e3 / done,
        server_cpu_ms=(now.server_s - before.server_s) * 1e3 / done,
        worker_rss_mib=_rss_mib(me),
        server_rss_mib=_rss_mib(theatre.server),
        run_events=(now.run_events - before.run_events) / done,
        dispatch_events=(now.dispatch_events - before.dispatch_events) / done,
        longest_history=counted.longest,
        runs=counted.runs,
        generations=counted.generations,
        database_mib=sum(p.stat().st_size for p in theatre.home.glob("temporal.db*")) / 2**20,
    )
    return sample, now


def growth_of(samples: list[Sample]) -> dict[str, float]:
    """Last tenth over first tenth of the samples, figure by figure."""
    tenth = max(len(samples) // 10, 1)

    def ratio(name: str) -> float:
        first = statistics.mean(getattr(s, name) for s in samples[:tenth])
        last = statistics.mean(getattr(s, name) for s in samples[-tenth:])
        return float(last / first)

    return {name: round(ratio(name), 3) for name in COMPARED}


async def bench() -> tuple[dict[str, Any], bool]:
    """The result and whether every target was met."""
    steps, every = int(number("STEPS", 20_000)), int(number("SAMPLE", 500))
    out = Path(os.environ.get("OUT") or ".ratchet/bench-growth.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("")
    samples: list[Sample] = []
    async with stage() as theatre:
        world = new_world(theatre.client)
        async with worker(world, at_once=64):
            handle = await start(world, config(steps))
            result = asyncio.create_task(handle.result())
            while world.steps_done == 0:
                await asyncio.sleep(0.01)
            before = Totals(
                0, time.monotonic(), _cpu_s(psutil.Process()), _cpu_s(theatre.server), 0, 0
            )
            while not result.done():
                await asyncio.wait([result], timeout=0.02)
                if world.steps_done < before.steps + every and not result.done():
                    continue
                if world.steps_done == before.steps:
                    break
                sample, before = await _sample(theatre, handle.id, world.steps_done, before)
                world.check()
                world.forget()
                samples.append(sample)
                with out.open("a") as file:
                    file.write(json.dumps(asdict(sample)) + "\n")
                print(json.dumps(asdict(sample)), flush=True)
            ended = await result
            if os.environ.get("HOPS"):
                await _show_hops(theatre, handle.id, handle.first_execution_run_id, steps)
    growth = growth_of(samples)
    longest = max(sample.longest_history for sample in samples)
    good = ended["step"] == steps and longest <= MOST_EVENTS
    good = good and max(growth.values()) <= MOST_GROWTH
    mean_ms = statistics.mean(sample.wall_ms for sample in samples)
    return {
        "steps": ended["step"],
        "growth": growth,
        "longest_history": longest,
        "ms_per_step": round(mean_ms, 2),
        "samples": len(samples),
        "first": asdict(samples[0]),
        "last": asdict(samples[-1]),
        "ok": good,
    }, good


async def _show_hops(theatre: Stage, run_id: str, first: str | None, steps: int) -> None:
    run = await profile(theatre.client, run_id, first)
    print(f"TrainingRun, first execution, {run.steps} steps; per step:")
    print(table(run, max(run.steps, 1)))
    dispatch = await profile(theatre.client, f"{run_id}/dispatch/0")
    groups = dispatch.events["run_rollouts completed"]
    print(f"Dispatch, first generation, {groups} groups; per group:")
    print(table(dispatch, max(groups, 1)))


if __name__ == "__main__":
    finish(bench())
