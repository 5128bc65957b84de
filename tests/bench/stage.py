"""What every bench needs: a dev server on a file, one worker for all roles, and quick doubles.

The server, the wire and the workflows are real; the server is started as `ratchet.worker.stack`
starts it. All roles share one task queue, so a worker may start what it scheduled without asking.
"""

import asyncio
import hashlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from temporalio import activity
from temporalio.client import Client, WorkflowHandle

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.rollouts import RunRolloutsInput, RunRolloutsResult
from ratchet.activities.contracts.training import (
    SyncInput,
    SyncResult,
    TrainStepInput,
    TrainStepResult,
)
from ratchet.activities.contracts.wire import WIRE
from ratchet.configs.load import validate
from ratchet.worker.compat import Worker
from ratchet.worker.memory import limit_arenas
from ratchet.worker.roles import STICKY_TIMEOUT
from ratchet.worker.sandbox import SANDBOX
from ratchet.worker.temporal_server import server_command
from ratchet.workflows.dispatch import Dispatch
from ratchet.workflows.host import Host
from ratchet.workflows.preflight import Preflight
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.training_run import TrainingRun
from tests.bench.ledger import Ledger
from tests.workflow.world import World

BEAT_EVERY_S = 4.0
ANSWERS_WITHIN_S = 60.0


@dataclass
class BenchWorld(World):
    """Marks every rollout's begin and end; `draw(group, index)` is its duration in seconds."""

    draw: Callable[[str, int], float] = lambda group, index: 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    steps_done: int = 0

    async def _run_group(self, arg: RunRolloutsInput) -> RunRolloutsResult:
        work, indexes = arg.work, arg.indexes
        owner = activity.info().workflow_id or ""
        generation = int(owner.rpartition("/")[2])
        seconds = max(self.draw(work.group, index) for index in indexes)
        self.ledger.begin(work.kind, len(indexes), generation)
        while seconds > BEAT_EVERY_S:
            await asyncio.sleep(BEAT_EVERY_S)
            activity.heartbeat()
            seconds -= BEAT_EVERY_S
        if seconds > 0:
            await asyncio.sleep(seconds)
        self.ledger.end(work.kind, len(indexes), generation)
        for index in indexes:
            self.rolled_out[f"{work.group}/{index}"] += 1
        count = len(indexes)
        return RunRolloutsResult(work.group, count, 0, count * 4, self._finalized_too(arg))

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, arg: TrainStepInput) -> TrainStepResult:
        if self.train_s > 0:
            await asyncio.sleep(self.train_s)
        result = await super().train_step(arg)
        self.steps_done = arg.step
        return result

    @activity.defn(name=names.SYNC_WEIGHTS)
    async def sync_weights(self, arg: SyncInput) -> SyncResult:
        if self.sync_s > 0:
            await asyncio.sleep(self.sync_s)
        result = await super().sync_weights(arg)
        self.ledger.version(arg.version)
        return result

    def check(self) -> None:
        """Asserts that nothing since the last `forget` was lost, repeated or out of order."""
        first = self.trained[0] if self.trained else 1
        assert self.trained == list(range(first, first + len(self.trained))) and not self.replayed
        assert max(self.rolled_out.values(), default=1) == 1
        shipped = [group for groups in self.batches.values() for group in groups]
        assert len(shipped) == len(set(shipped))

    def forget(self) -> None:
        """Drops what was remembered, so that the doubles do not grow with the run."""
        for memory in (self.trained, self.recorded, self.evals, self.pushes, self.order):
            memory.clear()
        for counts in (self.rolled_out, self.examples, self.batches, self.metrics):
            counts.clear()
        for by_step in (self.shipped, self.needed, self.revisions, self.example_of):
            by_step.clear()
        self.started.clear()
        self.pinged.clear()
        self.finalized_alone.clear()
        self.checkpoints.clear()
        self.saved = {run: {max(states): states[max(states)]} for run, states in self.saved.items()}
        self.ledger.marks.clear()


def draw_of(seed: int, median_s: float, sigma: float) -> Callable[[str, int], float]:
    """Lognormal durations as a pure function of (seed, group, index), by inverting a uniform."""
    normal = statistics.NormalDist()

    def draw(group: str, index: int) -> float:
        digest = hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return median_s * math.exp(sigma * normal.inv_cdf(uniform))

    return draw


@dataclass(frozen=True)
class Stage:
    """A running server and a client of it."""

    client: Client
    server: psutil.Process
    home: Path


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """A dev server on a database of its own, below RATCHET_HOME if set; gone at the end."""
    parent = os.environ.get("RATCHET_HOME")
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = server_command(home / "temporal.db", port)
    with (home / "temporal.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        client = await _connect(f"127.0.0.1:{port}")
        yield Stage(client, psutil.Process(server.pid), home)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(home)


async def _connect(address: str) -> Client:
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        while True:
            try:
                return await Client.connect(address, data_converter=WIRE)
            except RuntimeError:
                await asyncio.sleep(0.2)


def new_world(client: Client, **fields: Any) -> BenchWorld:
    """A world whose roles share one task queue of its own."""
    queue = f"bench-{uuid.uuid4().hex[:8]}"
    return BenchWorld(client, Queues(*[queue] * 5), **fields)


def worker(world: BenchWorld, at_once: int) -> Worker:
    """One worker for all roles; `at_once` rollout activities may run beside the others."""
    return Worker(
        world.client,
        task_queue=world.queues.orchestrator,
        workflows=[TrainingRun, Dispatch, Host, Preflight],
        activities=world.activities(),
        workflow_runner=SANDBOX,
        max_concurrent_workflow_tasks=8,
        max_concurrent_activities=at_once + 64,
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
    )


async def start(world: BenchWorld, data: dict[str, Any]) -> WorkflowHandle[Any, Any]:
    """Starts a run of config `data`."""
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    config = validate(data).model_dump(mode="json")
    return await world.client.start_workflow(
        "TrainingRun",
        RunInput(run_id, config, world.queues, created_at="2026-01-01T00:00:00Z"),
        id=run_id,
        task_queue=world.queues.orchestrator,
    )


@dataclass(frozen=True)
class Histories:
    """Event counts of a run's executions, by workflow type; the open ones are included."""

    runs: int
    generations: int
    run_events: int
    dispatch_events: int
    longest: int


async def histories(client: Client, run_id: str) -> Histories:
    """Counts the events of all executions of a run and of its dispatch generations."""
    lengths: dict[str, list[int]] = {"TrainingRun": [], "Dispatch": []}
    query = f"WorkflowId = '{run_id}' OR WorkflowId STARTS_WITH '{run_id}/dispatch/'"
    async for found in client.list_workflows(query):
        length = found.history_length
        if found.close_time is None:
            # Visibility learns an execution's length only when it closes.
            handle = client.get_workflow_handle(found.id, run_id=found.run_id)
            length = (await handle.describe()).history_length
        lengths[found.workflow_type].append(length)
    return Histories(
        runs=len(lengths["TrainingRun"]),
        generations=len(lengths["Dispatch"]),
        run_events=sum(lengths["TrainingRun"]),
        dispatch_events=sum(lengths["Dispatch"]),
        longest=max(lengths["TrainingRun"] + lengths["Dispatch"], default=0),
    )


def number(name: str, default: float) -> float:
    """A number from the environment; raises ValueError naming the variable."""
    text = os.environ.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: must be a number, e.g. {name}={default:g}") from None


def finish(work: Coroutine[Any, Any, tuple[dict[str, Any], bool]]) -> None:
    """Runs a bench in a process that is set up as a worker's is, prints its result as the last
    line, and ends with 1 if a target was missed.
    """
    limit_arenas()
    result, good = asyncio.run(work)
    print(json.dumps(result))
    sys.stdout.flush()
    # The SDK's native runtime can crash while the interpreter is torn down (sdk-python #300).
    os._exit(0 if good else 1)
