"""HOST_SERVER on a real Temporal service: reports, losses, and the ways a host ends."""

import asyncio
import errno
import os
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import HostInput, HostReport
from ratchet.activities.contracts.logs import LOG_BYTES
from ratchet.activities.hosting import activities as hosting
from ratchet.activities.hosting import reaper, server_lag
from ratchet.activities.hosting.activities import HostActivities
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.compat import Worker
from tests.unit.activities.hosting import servers

TEMPORAL = shutil.which("temporal") or str(Path(sys.executable).parent / "temporal")


@workflow.defn
class FakeRun:
    """Collects reports until it is asked to end."""

    def __init__(self) -> None:
        self.reports: list[HostReport] = []
        self.started: list[int] = []
        self.waits: list[str] = []
        self.over = False

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self.over)

    @workflow.signal
    def host_report(self, report: HostReport) -> None:
        # Every attempt begins with the news that it is starting its server.
        if report.state == "starting":
            if report.epoch in self.started:
                self.waits.append(report.detail)
            self.started.append(report.epoch)
        else:
            assert report.epoch in self.started
            self.reports.append(report)

    @workflow.signal
    def end(self) -> None:
        self.over = True

    @workflow.query
    def seen(self) -> list[HostReport]:
        return self.reports

    @workflow.query
    def waited_for(self) -> list[str]:
        return self.waits


@workflow.defn
class FakeHost:
    """One host activity, retried at once."""

    @workflow.run
    async def run(self, host: HostInput, heartbeat_s: float) -> None:
        await workflow.execute_activity(
            names.HOST_SERVER,
            host,
            task_queue=host.queue,
            start_to_close_timeout=timedelta(days=1),
            heartbeat_timeout=timedelta(seconds=heartbeat_s),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=50)),
        )


class Stack:
    """A worker with HOST_SERVER, one run and one host. Servers that must not be lost may be silent
    for as long as a machine without a free core makes them.
    """

    lost_after_s = servers.WITHIN_S
    heartbeat_s = servers.WITHIN_S

    def __init__(self, client: Client, home: Path, argv: Callable[[int, int], list[str]]) -> None:
        self.client = client
        self.run_id = f"run-{uuid.uuid4().hex[:8]}"
        self.tag = uuid.uuid4().hex
        self.queue = f"q-{self.run_id}"
        self.home = home
        self.argv = argv
        self.run: WorkflowHandle[FakeRun, None]
        self.host: WorkflowHandle[FakeHost, None]

    async def build(self, ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"

        async def probe() -> bool:
            async with httpx.AsyncClient(timeout=1.0) as http:
                try:
                    return (await http.get(address)).status_code == 200
                except httpx.HTTPError:
                    return False

        return ServerSpec(
            name="dummy",
            argv=self.argv(epoch, port),
            address=address,
            cwd=ctx.home,
            probe=probe,
            env={servers.TAG: self.tag},
            model=f"m-{epoch}",
            start_timeout_s=servers.WITHIN_S,
            lost_after_s=self.lost_after_s,
            lag=ctx.home / "lag.json",
        )

    def worker(self) -> Worker:
        ctx = WorkerContext(home=self.home, store_url=str(self.home), own_queue="own")
        activities = HostActivities(ctx, self.client, {"engine": self.build})
        return Worker(
            self.client,
            task_queue=self.queue,
            workflows=[FakeRun, FakeHost],
            activities=[activities.host_server],
            workflow_runner=UnsandboxedWorkflowRunner(),
            # Cancellations come with the answers to heartbeats.
            max_heartbeat_throttle_interval=timedelta(seconds=1),
        )

    async def open(self) -> None:
        self.run = await self.client.start_workflow(
            FakeRun.run, id=self.run_id, task_queue=self.queue
        )
        host = HostInput(self.run_id, "engine", 0, self.queue, epoch_base=10)
        self.host = await self.client.start_workflow(
            FakeHost.run,
            args=[host, self.heartbeat_s],
            id=f"{self.run_id}/host",
            task_queue=self.queue,
        )

    async def reports(self, count: int) -> list[HostReport]:
        async with asyncio.timeout(servers.WITHIN_S):
            while len(seen := await self.run.query(FakeRun.seen)) < count:
                await asyncio.sleep(0.1)
        return seen

    def pid(self) -> int:
        return next(p.pid for p in servers.tagged(self.tag) if "serve" in p.cmdline())


def _serve(epoch: int, port: int) -> list[str]:
    return [sys.executable, servers.ME, "serve", str(port)]


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=TEMPORAL) as env:
        yield env.client


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


async def test_up_down_and_up_again_until_the_run_ends(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "RUN_CHECK_EVERY_S", 0.5)
    monkeypatch.setattr(server_lag, "LOOKS_EVERY_S", 0.05)
    (tmp_path / "lag.json").write_text('{"time": 1.5, "event_loop_lag": {"max": 0.25}}')
    stack = Stack(client, tmp_path, _serve)
    async with stack.worker():
        await stack.open()
        (up,) = await stack.reports(1)
        async with asyncio.timeout(servers.WITHIN_S):
            while not (kept := series.page(ArtifactStore(str(tmp_path)), stack.run_id, 0.0, 9)[0]):
                await asyncio.sleep(0.1)
        assert [sample["time"] for sample in kept] == [1.5], "what the server measures of itself"
        assert (up.state, up.epoch, up.model, up.queue) == ("up", 11, "m-11", "own")
        log = tmp_path / "logs" / f"{stack.run_id}-engine-0.log"
        os.truncate(log, LOG_BYTES + 1)
        async with asyncio.timeout(servers.WITHIN_S):
            while log.stat().st_size > LOG_BYTES:
                await asyncio.sleep(0.1)
        os.kill(stack.pid(), signal.SIGKILL)
        _, down, again = await stack.reports(3)
        assert (down.state, down.epoch) == ("down", 11)
        assert down.detail.startswith("killed by SIGKILL")
        assert (again.state, again.epoch) == ("up", 12)
        assert again.address != up.address
        await stack.run.signal(FakeRun.end)
        await stack.host.result()
    assert servers.tagged(stack.tag) == []


async def test_a_killed_keeper_is_back_with_another_server_within_ten_seconds(
    client: Client, tmp_path: Path
) -> None:
    stack = Stack(client, tmp_path, _serve)
    async with stack.worker():
        await stack.open()
        await stack.reports(1)
        (before,) = reaper.records(tmp_path)
        os.kill(before.keeper[0], signal.SIGKILL)
        began = time.monotonic()
        _, down, again = await stack.reports(3)
        assert time.monotonic() - began < 10
        assert (down.state, again.state, again.epoch) == ("down", "up", 12)
        (after,) = reaper.records(tmp_path)
        assert after.kept and after.keeper != before.keeper
        await stack.run.terminate()
    assert servers.tagged(stack.tag) == []


async def test_frozen_server_is_lost(client: Client, tmp_path: Path) -> None:
    stack = Stack(client, tmp_path, _serve)
    stack.lost_after_s = 5.0
    async with stack.worker():
        await stack.open()
        await stack.reports(1)
        os.kill(stack.pid(), signal.SIGSTOP)
        _, down, again = await stack.reports(3)
        assert down.detail.startswith("did not answer its health check")
        assert again.epoch == 12
        await stack.host.cancel()
        with pytest.raises(WorkflowFailureError):
            await stack.host.result()
        assert await asyncio.to_thread(servers.gone, stack.tag)
        await stack.run.terminate()


async def test_failed_start_carries_the_log(client: Client, tmp_path: Path) -> None:
    def argv(epoch: int, port: int) -> list[str]:
        if epoch == 11:
            return [sys.executable, "-c", "raise SystemExit('no memory ' + 2000 * 'x' + ' end')"]
        return _serve(epoch, port)

    stack = Stack(client, tmp_path, argv)
    async with stack.worker():
        await stack.open()
        down, up = await stack.reports(2)
        assert (down.state, down.epoch) == ("down", 11)
        assert down.detail.startswith("exit code 1") and down.detail.endswith("x end")
        assert len(down.detail) <= 1500
        assert (up.state, up.epoch) == ("up", 12)
        await stack.run.terminate()
    # The worker's shutdown ended the activity, and that the server.
    assert servers.tagged(stack.tag) == []


async def test_a_report_carries_no_secret_into_a_history(client: Client, tmp_path: Path) -> None:
    def argv(epoch: int, port: int) -> list[str]:
        # What is kept of the log begins right behind the name of the secret.
        says = f"OPENAI_API_KEY=hunter2 {'-' * 1192}"
        return [sys.executable, "-c", f"raise SystemExit({says!r})"]

    stack = Stack(client, tmp_path, argv)
    async with stack.worker():
        await stack.open()
        down = (await stack.reports(1))[0]
        assert "hidden] ---" in down.detail
        async with asyncio.timeout(servers.WITHIN_S):
            # What a failed attempt left with Temporal is known once the next has begun.
            while (
                not (await stack.host.describe())
                .raw_description.pending_activities[0]
                .HasField("last_failure")
            ):
                await asyncio.sleep(0.05)
        pending = (await stack.host.describe()).raw_description.SerializeToString()
        history = await stack.run.fetch_history()
        assert b"hidden] ---" in pending and b"hunter2" not in pending
        assert b"hunter2" not in b"".join(e.SerializeToString() for e in history.events)
        await stack.run.terminate()


async def test_builder_error_reaches_the_host(client: Client, tmp_path: Path) -> None:
    def argv(epoch: int, port: int) -> list[str]:
        raise ApplicationError("no such model", type=names.BAD_INPUT, non_retryable=True)

    stack = Stack(client, tmp_path, argv)
    async with stack.worker():
        await stack.open()
        with pytest.raises(WorkflowFailureError) as error:
            await stack.host.result()
        assert isinstance(error.value.cause, ActivityError)
        assert "no such model" in str(error.value.cause.cause)
        await stack.run.terminate()


async def test_leftovers_of_the_host_are_reaped_first(client: Client, tmp_path: Path) -> None:
    from ratchet.activities.hosting.process import ServerProcess

    stack = Stack(client, tmp_path, _serve)
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path), own_queue="own")
    spec = await stack.build(ctx, HostInput(stack.run_id, "engine", 0, ""), 3)
    left = ServerProcess(spec, home=tmp_path, run=stack.run_id, host="engine/0", epoch=3)
    await left.start()
    async with stack.worker():
        await stack.open()
        await stack.reports(1)
        await asyncio.wait_for(left.exited.wait(), servers.WITHIN_S)
        assert len([p for p in servers.tagged(stack.tag) if "serve" in p.cmdline()]) == 1
        await stack.run.terminate()


async def test_heartbeats_reach_the_service(client: Client, tmp_path: Path) -> None:
    """The host outlives its heartbeat timeout."""
    stack = Stack(client, tmp_path, _serve)
    stack.heartbeat_s = 8.0
    async with stack.worker():
        await stack.open()
        await stack.reports(1)
        async with asyncio.timeout(servers.WITHIN_S):
            while True:
                (work,) = (await stack.host.describe()).raw_description.pending_activities
                began, heard = work.last_started_time, work.last_heartbeat_time
                assert work.attempt == 1
                if heard.ToNanoseconds() - began.ToNanoseconds() > 1e9 * stack.heartbeat_s:
                    break
                await asyncio.sleep(0.1)
        assert len(await stack.run.query(FakeRun.seen)) == 1
        await stack.run.terminate()


async def _waits(stack: Stack, tries: Callable[[], int]) -> None:
    """Until a wait was reported to the run, and some tries more; no other wait is reported."""
    async with asyncio.timeout(servers.WITHIN_S):
        while not await stack.run.query(FakeRun.waited_for):
            await asyncio.sleep(0.05)
        enough = tries() + 5
        while tries() < enough:
            await asyncio.sleep(0.05)
    (reported,) = await stack.run.query(FakeRun.waited_for)
    assert "No space left on device" in reported and "free some space there" in reported
    assert await stack.run.query(FakeRun.seen) == []


async def _comes_up_in_its_first_epoch(stack: Stack) -> None:
    (up,) = await stack.reports(1)
    assert (up.state, up.epoch) == ("up", 11)
    assert (await stack.run.query(FakeRun.waited_for))[1:] == [""], "it waits no longer"
    await stack.run.terminate()


async def test_full_disk_under_a_builder_is_waited_out_and_reported_once(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "DISK_RETRIED_S", 0.1)
    tried, full = 0, True

    def argv(epoch: int, port: int) -> list[str]:
        nonlocal tried
        tried += 1
        if full:
            # As of a folder with a name of its own: the reason is another every time.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/scratch/{tried}")
        return _serve(epoch, port)

    stack = Stack(client, tmp_path, argv)
    async with stack.worker():
        await stack.open()
        await _waits(stack, lambda: tried)
        full = False
        await _comes_up_in_its_first_epoch(stack)


async def test_full_disk_under_the_log_is_waited_out(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "DISK_RETRIED_S", 0.1)
    tried = 0

    def argv(epoch: int, port: int) -> list[str]:
        nonlocal tried
        tried += 1
        return _serve(epoch, port)

    stack = Stack(client, tmp_path, argv)
    log = tmp_path / "logs" / f"{stack.run_id}-engine-0.log"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    async with stack.worker():
        await stack.open()
        await _waits(stack, lambda: tried)
        log.unlink()
        await _comes_up_in_its_first_epoch(stack)


async def test_host_that_waits_for_a_disk_ends_with_its_run(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "DISK_RETRIED_S", 0.1)
    monkeypatch.setattr(hosting, "RUN_CHECK_EVERY_S", 0.5)

    def argv(epoch: int, port: int) -> list[str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch")

    stack = Stack(client, tmp_path, argv)
    async with stack.worker():
        await stack.open()
        async with asyncio.timeout(servers.WITHIN_S):
            while not await stack.run.query(FakeRun.waited_for):
                await asyncio.sleep(0.05)
            await stack.run.signal(FakeRun.end)
            await stack.host.result()
