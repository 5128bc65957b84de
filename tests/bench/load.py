"""`make bench-load`: what watching a run costs it, and what the API needs for it.

One run trains on the whole real stack while WATCHERS (200) connections follow its events and RATE
(100) reads a second are sent, in turn of the run, the list, metrics, evals, gauges and rollouts:
for SECONDS (60) to the API, and for half of that before and after to a server that does nothing
(`traffic`), so that what the run does by itself over time is in both alike. The load comes from
the machine that trains.

Throughput is rollouts committed to the store a second, by the times of their markers; that of steps
is told besides. CPU is the API process's own over those seconds, streams included, for each
request. The last line of stdout is one JSON object. Exits with 1 unless there was no error, all
watchers heard the same number of events, the 99th percentile of the latency is below 500 ms, CPU is
at most 3 ms a request, and the run's throughput at least 0.75 of that beside the idle server.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ratchet.configs.home import home_folder
from ratchet.configs.load import load
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT
from tests.bench.stage import finish, number
from tests.bench.traffic import Load, Traffic

P99_AT_MOST_S = 0.5
CPU_AT_MOST_MS = 3.0
LEAST_RATIO = 0.75
FIRST_STEP = 4
"""The step that the run has done when the measuring begins."""
SETTLE_S = 2.0
READY_WITHIN_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
KEYS = "reward/all/mean,loss,entropy,grad_norm"


def paths(run: str) -> list[str]:
    """Ten reads, as pages and scripts send them."""
    here = f"/v1/runs/{run}"
    metrics = f"{here}/metrics?keys={KEYS}&points=400"
    rollouts = f"{here}/rollouts?kind=train&limit=32"
    reads = [here, metrics, "/v1/runs", rollouts, here]
    return [*reads, f"{here}/evals", metrics, f"{here}/gauges", here, rollouts]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass(frozen=True)
class Phase:
    """A load, and the CPU seconds that server and client used while it lasted."""

    traffic: Traffic
    server_s: float
    client_s: float


async def phase(port: int, pid: int, run: str, seconds: float) -> Phase:
    """Loads the server of process `pid`."""
    watchers, rate = int(number("WATCHERS", 200)), number("RATE", 100)
    load = Load(port, f"/v1/runs/{run}/events", paths(run), watchers=watchers, rate=rate)
    await load.open()
    await asyncio.sleep(SETTLE_S)
    server, client = cpu_s(pid), time.process_time()
    traffic = await load.send(seconds)
    done = Phase(traffic, cpu_s(pid) - server, time.process_time() - client)
    load.close()
    await asyncio.sleep(SETTLE_S)
    return done


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def between(moments: Sequence[float], spans: Sequence[tuple[float, float]]) -> float:
    """How many of the ascending `moments` are in `spans`, a second of them."""
    inside = sum(bisect_right(moments, end) - bisect_right(moments, begin) for begin, end in spans)
    return inside / sum(end - begin for begin, end in spans)


def rollouts_at(store: Path, run: str) -> list[float]:
    """When each rollout of a run was committed, ascending (Unix time)."""
    folder = store / "runs" / run / "rollouts"
    return sorted(marker.stat().st_mtime for marker in folder.rglob("*.commit"))


def steps_at(where: Addresses, run: str) -> list[float]:
    """When each step was recorded, ascending (Unix time)."""
    reply = httpx.get(f"{where.api}/v1/runs/{run}/metrics?keys=loss&limit=10000", timeout=60)
    return sorted(row["time"] for row in reply.raise_for_status().json()["data"])


def begin(where: Addresses) -> str:
    """Starts a run that outlasts the measuring, and waits until it is at work."""
    changes = ["max_steps=5000", "name=load"]
    config = load(ROOT / "configs" / "examples" / "reverse_text.toml", changes)
    reply = httpx.post(f"{where.api}/v1/runs", json=config.model_dump(mode="json"), timeout=60)
    assert reply.status_code == 201, reply.text
    run = str(reply.json()["id"])
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        state = httpx.get(f"{where.api}/v1/runs/{run}", timeout=60).json()
        if state["step"] >= FIRST_STEP:
            return run
        assert state["status"] in ("queued", "starting", "running"), state
        assert time.monotonic() < deadline, state
        time.sleep(0.5)


async def measure(stack: Stack, where: Addresses, seconds: float) -> dict[str, Any]:
    """Loads idler, API and idler in this order."""
    run = await asyncio.to_thread(begin, where)
    api = (int(where.api.rpartition(":")[2]), int(stack.record["processes"]["api"]["pid"]))
    command = [sys.executable, "-m", "tests.bench.traffic"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as idler:
        assert idler.stdout is not None
        idle = (int(idler.stdout.readline()), idler.pid)
        before = await phase(*idle, run, seconds / 2)
        print("beside the idle server:", before.traffic.errors or "no error", flush=True)
        loaded = await phase(*api, run, seconds)
        print("beside the API:", loaded.traffic.errors or "no error", flush=True)
        after = await phase(*idle, run, seconds / 2)
        idler.kill()
    times, steps = rollouts_at(stack.home / "store", run), steps_at(where, run)
    httpx.post(f"{where.api}/v1/runs/{run}/cancel", timeout=60).raise_for_status()
    spans = [(p.traffic.began, p.traffic.ended) for p in (before, loaded, after)]
    with_api, with_idler = between(times, spans[1:2]), between(times, spans[::2])
    took = loaded.traffic.latencies
    return {
        "requests": len(took),
        "errors": dict(before.traffic.errors + loaded.traffic.errors + after.traffic.errors),
        "p50_ms": round(1e3 * statistics.median(took), 1),
        "p99_ms": round(1e3 * percentile(took, 0.99), 1),
        "slowest_ms": round(1e3 * max(took), 1),
        "p50_ms_by_path": {
            path.removeprefix(f"/v1/runs/{run}") or "run": round(1e3 * statistics.median(found), 1)
            for path, found in loaded.traffic.by_path.items()
        },
        "idle_p99_ms": round(
            1e3 * percentile(before.traffic.latencies + after.traffic.latencies, 0.99), 1
        ),
        "cpu_ms_per_request": round(1e3 * loaded.server_s / len(took), 2),
        "client_ms_per_request": round(1e3 * loaded.client_s / len(took), 2),
        "events": {"least": min(loaded.traffic.events), "most": max(loaded.traffic.events)},
        "rollouts_per_s": round(with_api, 2),
        "rollouts_per_s_idle": [round(between(times, [span]), 2) for span in spans[::2]],
        "steps_per_s": round(between(steps, spans[1:2]), 3),
        "steps_per_s_idle": round(between(steps, spans[::2]), 3),
        "ratio": round(with_api / with_idler, 3),
    }


async def bench() -> tuple[dict[str, Any], bool]:
    """The result and whether every target was met."""
    stack = Stack(home_folder() / "bench-load")
    try:
        where = await asyncio.to_thread(stack.up)
        result = await measure(stack, where, number("SECONDS", 60))
    finally:
        await asyncio.to_thread(stack.down)
    good = (
        not result["errors"]
        # An event that comes as the measuring begins or ends may count for some of them only.
        and result["events"]["most"] - result["events"]["least"] <= 2
        and result["p99_ms"] < 1e3 * P99_AT_MOST_S
        and result["cpu_ms_per_request"] <= CPU_AT_MOST_MS
        and result["ratio"] >= LEAST_RATIO
    )
    return {**result, "ok": good}, good


if __name__ == "__main__":
    finish(bench())
