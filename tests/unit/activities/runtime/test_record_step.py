"""A step record is put together from its parts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.health import Finding, HealthReport
from ratchet.activities.contracts.training import StepRecord
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.health_watch import HealthWatch
from ratchet.activities.runtime.store_activities import StoreActivities
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import CorruptArtifact


async def test_parts_are_merged_under_the_records_own_metrics(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    batch = ctx.store.put_json(keys.batch_metrics("r", 2, "a" * 64), {"a": 1.0, "b": 1.0, "c": 1.0})
    train = ctx.store.put_json(keys.train_metrics("r", 2, "b" * 64), {"b": 2.0, "c": 2.0})
    assert batch.key != keys.batch_metrics("r", 2, "c" * 64)
    run, store = ActivityEnvironment().run, StoreActivities(ctx)
    await run(store.record_step, StepRecord("r", 2, {"c": 3.0, "d": 3.0}, [batch, train]))
    await run(store.record_step, StepRecord("r", 2, {"late": 1.0}))
    await run(store.record_step, StepRecord("r", 3, {"alone": 1.0}))
    assert ctx.store.committed_keys(keys.step_records("r")) == [
        keys.step_record("r", step) for step in (2, 3)
    ]
    records = [ctx.store.get_json(ctx.store.require(keys.step_record("r", s))) for s in (2, 3)]
    assert records[0]["metrics"] == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}
    assert (records[1]["step"], records[1]["metrics"]) == (3, {"alone": 1.0})


async def test_a_record_without_one_of_its_parts_is_not_kept(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    part = ctx.store.put_json(keys.batch_metrics("r", 1, "a" * 64), {"a": 1.0})
    (tmp_path / "store" / part.path).write_text("{}")
    with pytest.raises(CorruptArtifact, match="batch-00000001"):
        await ActivityEnvironment().run(
            StoreActivities(ctx).record_step, StepRecord("r", 1, {}, [part])
        )
    assert ctx.store.committed(keys.step_record("r", 1)) is None


class Monitor:
    """A service that is pinged, and how it answers."""

    def __init__(self) -> None:
        self.url, self.pinged, self.status = "", 0, 200

    async def hear(self, request: web.Request) -> web.Response:
        self.pinged += 1
        return web.Response(status=self.status, headers={"Location": f"{self.url}/again"})


@pytest.fixture
async def monitor() -> AsyncIterator[Monitor]:
    made, app = Monitor(), web.Application()
    app.router.add_get("/{path:.*}", made.hear)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hush-hush"
    yield made
    await runner.cleanup()


async def test_a_kept_step_pings_its_monitor(
    tmp_path: Path, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    run, store = ActivityEnvironment().run, StoreActivities(ctx)
    await run(store.record_step, StepRecord("r", 1, {}))
    assert monitor.pinged == 0
    await run(store.record_step, StepRecord("r", 1, {}, heartbeat_url=monitor.url))
    monkeypatch.setenv("RATCHET_PING_KEY", f"{monitor.url}\n")
    await run(store.record_step, StepRecord("r", 2, {}, heartbeat_var="RATCHET_PING_KEY"))
    assert monitor.pinged == 2


@pytest.mark.parametrize(
    ("status", "url", "words"),
    [
        (500, "", "at 127.0.0.1 was answered with 500"),
        (302, "", "at 127.0.0.1 was answered with 302"),
        (200, "http://127.0.0.1:9/hush-hush", "failed: ConnectError"),
        (200, "gopher://hush-hush", "failed: UnsupportedProtocol"),
        (200, "http://[hush-hush", "failed: "),
        (200, " ", "RATCHET_PING_KEY is not set on this worker"),
    ],
)
async def test_a_ping_that_fails_warns_and_fails_nothing(
    tmp_path: Path,
    monitor: Monitor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    url: str,
    words: str,
) -> None:
    """The step stays recorded, nobody is led elsewhere, and the URL is not said."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    monkeypatch.setenv("RATCHET_PING_KEY", url or monitor.url)
    monitor.status = status
    record = StepRecord("r", 1, {}, heartbeat_var="RATCHET_PING_KEY")
    await ActivityEnvironment().run(StoreActivities(ctx).record_step, record)
    assert ctx.store.committed(keys.step_record("r", 1)) is not None
    (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("heartbeat_url")]
    assert line.startswith("step 1 of r: ") and words in line and "hush" not in line
    assert monitor.pinged == (0 if url else 1)


class Told:
    """A Temporal client that keeps what is signalled."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, HealthReport]] = []

    def get_workflow_handle(self, workflow_id: str) -> "Told":
        self.workflow_id = workflow_id
        return self

    async def signal(self, name: str, arg: HealthReport, **_: Any) -> None:
        self.heard.append((self.workflow_id, name, arg))


async def test_a_finding_is_signalled_once_when_it_begins(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    result, run = Told(), ActivityEnvironment().run
    store = StoreActivities(ctx, HealthWatch(ctx.store, cast(Client, result)))
    for step in range(1, 9):
        if step == 6:
            # Another process goes on, which has seen none of the steps before.
            store = StoreActivities(ctx, HealthWatch(ctx.store, cast(Client, result)))
        rate = 0.0 if step < 2 else 0.9
        await run(store.record_step, StepRecord("r+2", step, {"errors/reverse/rate": rate}))
    finding = Finding("env_failing", "60 % of the rollouts of reverse fail", "reverse")
    assert result.heard == [("r", "health_report", HealthReport(3, finding))]
