"""The event-loop lag of worker processes: for which runs it is recorded, and for how long."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys, series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker import lag as recording
from ratchet.worker.compat import Worker
from ratchet.worker.lag import LagRecorder
from ratchet.worker.roles import BUILDERS
from ratchet.workflows.protocol.messages import PREFLIGHT, TRAINING_RUN

SAMPLE_S = 0.2
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SAMPLE_S", SAMPLE_S)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


def samples(store: ArtifactStore, run: str) -> list[dict[str, Any]]:
    return series.page(store, run, 0.0, 10_000)[0]


def roles(store: ArtifactStore, run: str) -> list[str]:
    return sorted({series.role_of(sample["source"]) for sample in samples(store, run)})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def recorded(recorder: LagRecorder) -> AsyncIterator[None]:
    """The time in which a recorder works, which must not end by itself."""
    task = asyncio.create_task(recorder.run())
    yield
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def sampled_again(recorder: LagRecorder, store: ArtifactStore, times: int) -> None:
    """Waits until another run has got `times` more samples."""
    probe = uuid.uuid4().hex
    with recorder.working("env", probe):
        await until(lambda: len(samples(store, probe)) >= times)


async def test_a_run_is_sampled_while_it_is_worked_for_and_once_more(store: ArtifactStore) -> None:
    recorder = LagRecorder(store)
    async with recorded(recorder):
        with recorder.working("trainer", "r"), recorder.working("trainer", "r"):
            await until(lambda: len(samples(store, "r")) >= 3)
        await sampled_again(recorder, store, 2)
        found = samples(store, "r")
        await sampled_again(recorder, store, 3)
        assert samples(store, "r") == found, "it has ended"
    (source,) = {sample.pop("source") for sample in found}
    assert source.startswith("trainer-")
    for sample in found:
        assert set(sample) == {"time", "event_loop_lag", "usage"}
        assert abs(sample["time"] - time.time()) < 99
        assert sample["usage"]["cpu_cores"] >= 0 and sample["usage"]["memory_bytes"] > 0
        lag = sample["event_loop_lag"]
        assert 0 <= lag["min"] <= lag["median"] <= lag["p90"] <= lag["p99"] <= lag["max"] < 60
        assert lag["min"] <= lag["mean"] <= lag["max"] and lag["n"] >= 1


async def test_work_shorter_than_an_interval_is_not_missed(store: ArtifactStore) -> None:
    recorder = LagRecorder(store)
    async with recorded(recorder):
        with recorder.working("orchestrator", "r"):
            pass
        await until(lambda: len(samples(store, "r")) == 1)


async def test_roles_of_a_process_have_a_series_each_and_attempts_share_it(
    store: ArtifactStore,
) -> None:
    recorder = LagRecorder(store)
    async with recorded(recorder):
        with recorder.working("env", "r"), recorder.working("inference", "r+2"):
            await until(lambda: roles(store, "r") == ["env", "inference"])
        with recorder.working("env", "r+2"):
            await sampled_again(recorder, store, 2)
    assert len({sample["source"] for sample in samples(store, "r")}) == 2
    assert len(store.live_keys(keys.series_folder("r"), ".jsonl")) == 2, "a chunk for each"


async def test_a_run_that_comes_back_late_begins_another_chunk(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "KEPT_S", 3 * SAMPLE_S)
    recorder = LagRecorder(store)
    async with recorded(recorder):
        for _ in range(2):
            with recorder.working("env", "r"):
                pass
            await sampled_again(recorder, store, 6)
    assert len(store.live_keys(keys.series_folder("r"), ".jsonl")) == 2
    assert len(samples(store, "r")) == 2


async def test_a_store_that_is_away_harms_nobody_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").write_text("no folder")
    store = ArtifactStore(f"file://{tmp_path / 'store'}")
    lines, refused = store.write_lines, []

    def write_lines(*given: Any) -> None:
        try:
            lines(*given)
        except OSError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(store, "write_lines", write_lines)
    recorder = LagRecorder(store)
    async with recorded(recorder):
        with recorder.working("trainer", "r"):
            await until(lambda: len(refused) >= 2)
            (tmp_path / "store").unlink()
            back = time.time()
            await until(lambda: bool(samples(store, "r")))
    assert samples(store, "r")[0]["time"] < back


async def test_a_store_that_hangs_holds_up_nothing(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, hangs = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    lines = store.write_lines

    def hang(*given: Any) -> None:
        loop.call_soon_threadsafe(hangs.set)
        asyncio.run_coroutine_threadsafe(freed.wait(), loop).result(WITHIN_S)
        lines(*given)

    monkeypatch.setattr(store, "write_lines", hang)
    recorder = LagRecorder(store)
    async with recorded(recorder):
        with recorder.working("trainer", "r"):
            await asyncio.wait_for(hangs.wait(), WITHIN_S)
            assert samples(store, "r") == []
        freed.set()
        await until(lambda: len(samples(store, "r")) >= 1)


# -- in workers -----------------------------------------------------------------------------


@dataclass
class Room:
    """An activity that lasts until it is let go."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    free: asyncio.Event = field(default_factory=asyncio.Event)

    @activity.defn(name="wait")
    async def wait(self) -> None:
        self.begun.set()
        await self.free.wait()


async def _wait(queue: str) -> None:
    await workflow.execute_activity(
        "wait", task_queue=queue, start_to_close_timeout=timedelta(seconds=WITHIN_S)
    )


@workflow.defn(name=TRAINING_RUN)
class OfARun:
    @workflow.run
    async def run(self, queue: str) -> None:
        await _wait(queue)


@workflow.defn(name=PREFLIGHT)
class OfNone:
    @workflow.run
    async def run(self, queue: str) -> None:
        await _wait(queue)


@pytest.mark.asyncio(loop_scope="session")
async def test_only_what_belongs_to_a_run_is_recorded(
    temporal: Client, store: ArtifactStore
) -> None:
    """An attempt's own workflow, those below it, and the check of a config before it begins."""
    run, room = f"lag-{uuid.uuid4().hex[:8]}", Room()
    recorder = LagRecorder(store)
    worker = Worker(
        temporal,
        task_queue=run,
        workflows=[OfARun, OfNone],
        activities=[room.wait],
        interceptors=recorder.interceptors("trainer"),
        workflow_runner=UnsandboxedWorkflowRunner(),
    )

    async def carried_out(kind: str, id: str) -> None:
        room.begun.clear(), room.free.clear()
        handle = await temporal.start_workflow(kind, run, id=id, task_queue=run)
        await asyncio.wait_for(room.begun.wait(), WITHIN_S)
        await sampled_again(recorder, store, 2)
        room.free.set()
        await handle.result()
        await sampled_again(recorder, store, 2)

    async with recorded(recorder), worker:
        await carried_out(PREFLIGHT, f"{run}/preflight")
        assert samples(store, run) == []
        await carried_out(TRAINING_RUN, run)
        assert roles(store, run) == ["trainer"]
        known = len(samples(store, run))
        await carried_out(TRAINING_RUN, f"{run}+2/host/trainer/0")
        assert len(samples(store, run)) > known and roles(store, run) == ["trainer"]


@pytest.mark.asyncio(loop_scope="session")
async def test_workers_of_all_roles_watch_but_those_of_rollouts(
    temporal: Client, tmp_path: Path, store: ArtifactStore
) -> None:
    recorder = LagRecorder(store)
    assert recorder.interceptors("rollout") == []
    for role in set(WORKER_ROLES) - {"rollout"}:
        ctx = WorkerContext(home=tmp_path, store_url=store.url, own_queue=f"lag-own-{role}")
        watching = recorder.interceptors(role)
        for worker in BUILDERS[role](temporal, ctx, Queues.prefixed("lag"), watching):
            assert watching
            assert set(watching) <= set(worker.config()["interceptors"])


async def test_usage_that_cannot_be_read_ends_no_recording(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = LagRecorder(store)
    take, failed = recorder._usage.take, []

    def fail_once() -> dict[str, Any]:
        if not failed:
            failed.append(True)
            raise PermissionError("/proc/7/statm")
        return take()

    monkeypatch.setattr(recorder._usage, "take", fail_once)
    async with recorded(recorder):
        with recorder.working("trainer", "r"):
            await until(lambda: len(samples(store, "r")) >= 1)
    assert failed
