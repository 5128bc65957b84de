"""Reading an engine's load, and reporting it. `metrics.txt` is what vLLM 0.32 on a CPU answered
while 40 requests filled a KV cache of 12 blocks, less its histograms' buckets.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import EngineLoad, HostInput, HostReport
from ratchet.activities.hosting.activities import HostActivities
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference import load
from ratchet.activities.inference.load import executing_share, parse_load, report_load
from ratchet.activities.runtime.context import WorkerContext
from ratchet.worker.compat import Worker

WITHIN_S = 60.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""
METRICS = (Path(__file__).parent / "metrics.txt").read_text()
IDLE = "\n".join(
    line.rpartition(" ")[0] + " 0.0"
    if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage"))
    else line
    for line in METRICS.splitlines()
)
BUSY_LOAD = EngineLoad(
    index=0,
    epoch=1,
    kv_usage=0.9091,
    running=5,
    waiting=30,
    preemptions=5,
    kv_tokens=1536,
    max_model_len=256,
)
IDLE_LOAD = replace(BUSY_LOAD, kv_usage=0.0, running=0, waiting=0)


@pytest.mark.parametrize(("text", "share"), [(METRICS, 5 / 35), (IDLE, 1.0), ("", 1.0)])
async def test_requests_that_wait_do_not_execute(text: str, share: float) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=text if request.url.path == "/metrics" else "{}")

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://e:1", transport=transport) as client:
        assert await executing_share(client) == pytest.approx(share)


def _parse(text: str) -> EngineLoad:
    return parse_load(text, index=0, epoch=1, max_model_len=256)


# -- parsing --------------------------------------------------------------------------------


def test_a_real_answer_is_read() -> None:
    assert _parse(METRICS) == BUSY_LOAD
    assert _parse(IDLE) == IDLE_LOAD


def test_cores_of_one_engine_count_together() -> None:
    """Usage is the fullest core's, requests add up, and each core repeats the cache's size."""
    second = [line for line in METRICS.splitlines() if 'engine="0"' in line]
    second = [line.replace('engine="0"', 'engine="1"') for line in second]
    usage = 'vllm:kv_cache_usage_perc{engine="1",model_name="policy-engine-test-0-e1"} '
    second = [usage + "0.25" if line.startswith(usage) else line for line in second]
    both = _parse(METRICS + "\n".join(second) + "\n")
    assert both == replace(BUSY_LOAD, running=10, waiting=60, preemptions=10)


@pytest.mark.parametrize(
    "name",
    [
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_preemptions",
        "vllm:cache_config_info",
    ],
)
def test_an_answer_that_lacks_something_is_refused(name: str) -> None:
    rest = "\n".join(line for line in METRICS.splitlines() if f"{name}" not in line)
    with pytest.raises(ValueError, match=rf"does not report {name}.*--disable-log-stats"):
        _parse(rest + "\n")


# -- reporting ------------------------------------------------------------------------------


@dataclass
class Engine:
    """Answers as an engine does, in a thread of its own; `text` None means HTTP 503."""

    text: str | None = METRICS
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def serve(self) -> ThreadingHTTPServer:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.asked.append(self.path)
                models = json.dumps({"data": [{"max_model_len": 256}]})
                text = models if self.path == "/v1/models" else engine.text
                self.send_response(200 if text is not None else 503)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(load, "POLL_S", 0.02)
    engine = Engine()
    server = engine.serve()
    yield engine
    server.shutdown()
    server.server_close()


async def _after_polls(engine: Engine, count: int) -> None:
    """Returns once the engine was asked for its metrics `count` more times, and one was handled."""
    wanted = engine.asked.count("/metrics") + count + 1
    async with asyncio.timeout(WITHIN_S):
        while engine.asked.count("/metrics") < wanted:
            await asyncio.sleep(0.005)


async def test_idle_engine_is_reported_once_and_a_busy_one_at_every_poll(engine: Engine) -> None:
    seen: list[EngineLoad] = []

    async def send(load: EngineLoad) -> None:
        seen.append(load)

    engine.text = IDLE
    task = asyncio.create_task(report_load(engine.url, 0, 1, send))
    await _after_polls(engine, 5)
    assert seen == [IDLE_LOAD]
    engine.text = METRICS
    await _after_polls(engine, 4)
    assert len(seen) >= 4 and seen[-1] == BUSY_LOAD
    engine.text = IDLE
    await _after_polls(engine, 5)
    assert seen[-2:] == [BUSY_LOAD, IDLE_LOAD]
    assert engine.asked.count("/v1/models") == 1
    task.cancel()


async def test_engine_without_an_answer_is_passed_over(engine: Engine) -> None:
    seen: list[EngineLoad] = []

    async def send(load: EngineLoad) -> None:
        seen.append(load)

    engine.text = None
    task = asyncio.create_task(report_load(engine.url, 0, 1, send))
    await _after_polls(engine, 3)
    assert seen == []
    engine.text = METRICS
    await _after_polls(engine, 2)
    assert BUSY_LOAD in seen
    engine.text = "# no metrics at all\n"
    with pytest.raises(ValueError, match="does not report"):
        await asyncio.wait_for(task, WITHIN_S)


# -- from the host to the run ---------------------------------------------------------------


@workflow.defn(name="LoadedRun")
class LoadedRun:
    """Collects loads and reports until it is terminated."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.loads: list[EngineLoad] = []

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal
    def host_report(self, report: HostReport) -> None:
        self.order.append(report.state)

    @workflow.signal
    def engine_load(self, load: EngineLoad) -> None:
        self.order.append("load")
        self.loads.append(load)

    @workflow.query
    def seen(self) -> tuple[list[str], list[EngineLoad]]:
        return self.order, self.loads


@workflow.defn(name="LoadHost")
class LoadHost:
    """One host activity."""

    @workflow.run
    async def run(self, host: HostInput) -> None:
        await workflow.execute_activity(
            names.HOST_SERVER,
            host,
            task_queue=host.queue,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=30),
        )


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    temporal = str(Path(sys.executable).parent / "temporal")
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=temporal) as env:
        yield env.client


async def _build(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """A server whose files are an engine's answers; `host.name` is its folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"

    async def probe() -> bool:
        async with httpx.AsyncClient(timeout=1.0) as http:
            try:
                return (await http.get(f"{address}/v1/models")).status_code == 200
            except httpx.HTTPError:
                return False

    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    return ServerSpec(
        name="engine",
        argv=[*argv, "--directory", host.name],
        address=address,
        cwd=ctx.home,
        probe=probe,
        report_load=partial(report_load, address, host.index, epoch) if host.report_load else None,
    )


def _answers(folder: Path, metrics: str) -> Path:
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "models").write_text(json.dumps({"data": [{"max_model_len": 256}]}))
    (folder / "metrics").write_text(metrics)
    return folder


@dataclass
class Hosted:
    """A run, and the host of an engine that answers with fixed metrics."""

    run: WorkflowHandle[LoadedRun, None]
    host: WorkflowHandle[LoadHost, None]

    async def seen(self, count: int) -> tuple[list[str], list[EngineLoad]]:
        """What reached the run, once that is `count` signals."""
        async with asyncio.timeout(WITHIN_S):
            while len((seen := await self.run.query(LoadedRun.seen))[0]) < count:
                await asyncio.sleep(0.1)
        return seen


@contextlib.asynccontextmanager
async def _hosted(
    client: Client, home: Path, metrics: str, *, report_load: bool
) -> AsyncIterator[Hosted]:
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    ctx = WorkerContext(home=home, store_url=str(home), own_queue="own")
    folder = _answers(home / "answers", metrics)
    host = HostInput(run_id, "engine", 0, run_id, name=str(folder), report_load=report_load)
    async with Worker(
        client,
        task_queue=run_id,
        workflows=[LoadedRun, LoadHost],
        activities=[HostActivities(ctx, client, {"engine": _build}).host_server],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        run = await client.start_workflow(LoadedRun.run, id=run_id, task_queue=run_id)
        yield Hosted(
            run,
            await client.start_workflow(LoadHost.run, host, id=f"{run_id}/host", task_queue=run_id),
        )
        await run.terminate()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "POLL_S", 0.2)


@pytest.mark.asyncio(loop_scope="module")
async def test_run_hears_of_the_load_after_the_engine_is_up(
    client: Client, tmp_path: Path, often: None
) -> None:
    async with _hosted(client, tmp_path, METRICS, report_load=True) as hosted:
        order, loads = await hosted.seen(4)
        assert order[:4] == ["starting", "up", "load", "load"]
        assert loads[0] == replace(BUSY_LOAD, run_id=hosted.run.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_run_that_does_not_ask_hears_of_no_load(
    client: Client, tmp_path: Path, often: None
) -> None:
    for name in ("quiet", "told"):
        (tmp_path / name).mkdir()
    async with _hosted(client, tmp_path / "quiet", METRICS, report_load=False) as hosted:
        await hosted.seen(2)
        # Meanwhile another run hears of it often.
        async with _hosted(client, tmp_path / "told", METRICS, report_load=True) as told:
            await told.seen(2 + 4)
        assert await hosted.seen(2) == (["starting", "up"], [])


@pytest.mark.asyncio(loop_scope="module")
async def test_engine_without_metrics_ends_its_host(
    client: Client, tmp_path: Path, often: None
) -> None:
    async with _hosted(client, tmp_path, "# nothing\n", report_load=True) as hosted:
        with pytest.raises(WorkflowFailureError) as failed:
            await hosted.host.result()
        assert isinstance(failed.value.cause, ActivityError)
        cause = failed.value.cause.cause
        assert isinstance(cause, ApplicationError) and cause.type == names.BAD_INPUT
        assert "remove --disable-log-stats" in str(cause)
