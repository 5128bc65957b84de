"""`make bench-waiting`: thousands of rollouts that wait, in one environment.

A step of ROLLOUTS, all in flight at once, each of which waits for SECONDS in its environment's own
code, on a stack with a home of its own. The last line of stdout is one JSON object: the most
rollouts that executed at once, wall seconds, what broke (activities that timed out, attempts
beyond the first, restarts of servers, rollouts that failed), CPU milliseconds per rollout by role,
and the most that event loops lagged, in seconds. Exits with 1 if the run does not succeed, if
anything broke, or if fewer than ROLLOUTS executed at once.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from temporalio.client import Client

from ratchet.activities.contracts import names
from ratchet.configs.load import validate
from tests.bench.rollouts import per_rollout, played
from tests.chaos import history

GROUP = 16
ENV = """
import asyncio

from ratchet.activities.envs.shipped.reverse_text import ReverseTextTask, ReverseTextTaskset
import verifiers.v1 as vf


class WaitingTask(ReverseTextTask):
    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        await asyncio.sleep({seconds})
        return min(1.0, len(trace.last_reply) / 16)


class WaitingTaskset(ReverseTextTaskset):
    def load(self):
        for task in super().load():
            yield WaitingTask(task.data, self.config.task)


__all__ = ["WaitingTaskset"]
"""


def config_of(rollouts: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One step of so many rollouts of an environment that is written into `folder`."""
    (folder / "waiting_text.py").write_text(ENV.format(seconds=seconds))
    sampling = {"temperature": 1.0, "max_tokens": 4}
    env = {"id": "waiting-text", "path": str(folder), "timeout_s": 20 * seconds}
    return {
        "max_steps": 1,
        "train": {
            "env": [env],
            "batch_size": rollouts,
            "group_size": GROUP,
            "sampling": sampling,
        },
        "trainer": {"seq_len": 64},
        "dispatch": {"max_inflight_rollouts": rollouts},
    }


def lags(samples: list[Any]) -> dict[str, float]:
    """The most that event loops lagged, by role; env servers are a role of their own."""
    most: dict[str, float] = {}
    for sample in samples:
        if sample.event_loop_lag is not None:
            server = sample.source.startswith("env-server-")
            role = "env server" if server else sample.role
            most[role] = round(max(most.get(role, 0.0), sample.event_loop_lag.max), 3)
    return most


async def recorded(address: str, run_id: str) -> history.Evidence:
    """What Temporal recorded of the run."""
    return await history.read(await Client.connect(address), run_id)


def broken(evidence: history.Evidence) -> dict[str, int]:
    """Whatever should not have happened, by what it is; a lost server is a retry of its host."""
    played = [one.result for one in evidence.of(names.RUN_ROLLOUTS) if one.result]
    return {
        "timed_out": sum(one.outcome == "timed_out" for one in evidence.activities),
        "retried": sum(one.attempt > 1 for one in evidence.activities),
        "failed_rollouts": sum(result["errored"] for result in played),
    }


def bench(rollouts: int, seconds: float, home: Path) -> dict[str, Any]:
    """Carries the run out and judges what was recorded of it."""
    config = validate(config_of(rollouts, seconds, home))
    with played(config, home) as it:
        run = it.run
        samples = list(it.client.runs.gauges(run.id, role="all"))
        evidence = asyncio.run(recorded(it.temporal, run.id))
    assert run.created_at and run.finished_at, "it has ended"
    begin, end = run.created_at.timestamp(), run.finished_at.timestamp()
    return {
        "status": run.status,
        "rollouts": rollouts,
        "waits_s": seconds,
        "most_at_once": max(getattr(one, "worker_inflight", 0) for one in samples),
        "wall_s": round(end - begin, 1),
        "first_rollouts_s": round(it.first - begin, 1),
        "broken": broken(evidence),
        "lag_s": lags(samples),
        "cpu_ms": per_rollout(it.samples, begin, end, rollouts),
    }


def main() -> int:
    """Entry point; returns the exit status."""
    rollouts = int(os.environ.get("ROLLOUTS", "4000"))
    seconds = float(os.environ.get("SECONDS", "60"))
    if rollouts % GROUP:
        print(f"ROLLOUTS: {rollouts} is no multiple of {GROUP}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ratchet-waiting-") as home:
        found = bench(rollouts, seconds, Path(home))
    print(json.dumps(found))
    well = found["status"] == "succeeded" and not any(found["broken"].values())
    return 0 if well and found["most_at_once"] == rollouts else 1


if __name__ == "__main__":
    sys.exit(main())
