"""Engines, workers and Prometheus' metrics, as Temporal sees them."""

import asyncio
import json
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.envconfig import ClientConnectConfig
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.services import ServiceState, services_file
from ratchet.activities.storage import keys
from ratchet.api.app import create_app
from ratchet.api.settings import Settings
from ratchet.worker.compat import Worker
from ratchet.workflows.protocol.messages import HOST
from tests.unit.api.conftest import WITHIN_S, Served, eventually

SERVES = asyncio.Event()


@activity.defn
async def serve(failures: int) -> None:
    if activity.info().attempt <= failures:
        raise RuntimeError("exit status 1; password=hunter2")
    SERVES.set()
    await asyncio.Event().wait()


@workflow.defn(name=HOST)
class Host:
    @workflow.run
    async def run(self, failures: int) -> None:
        await workflow.execute_activity(
            serve,
            failures,
            start_to_close_timeout=timedelta(minutes=1),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=10)),
        )


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.asyncio(loop_scope="session")
async def test_engines_and_workers_are_seen(served: Served) -> None:
    run_id = (await served.start("hosted"))["id"]
    await served.until(run_id, status="running")
    queue = served.settings.queues.rollout
    worker = Worker(
        served.env.client,
        task_queue=queue,
        workflows=[Host],
        activities=[serve],
        workflow_runner=UnsandboxedWorkflowRunner(),
        identity="71@host-a",
        graceful_shutdown_timeout=timedelta(0),
    )
    async with worker:
        hosts = [
            await served.env.client.start_workflow(HOST, failures, id=name, task_queue=queue)
            for name, failures in (
                (f"{run_id}/host/engine/0", 2),
                (f"{run_id}/host/env/0", 0),
            )
        ]
        await asyncio.wait_for(SERVES.wait(), WITHIN_S)

        async def look() -> list[dict[str, Any]]:
            engines: list[dict[str, Any]] = (await served.http.get("/v1/engines")).json()["data"]
            return engines

        wanted = {"attempt": 3, "state": "up", "policy_version": 3}
        (engine,) = await eventually(
            look, lambda found: bool(found) and wanted.items() <= found[0].items()
        )
        assert engine["run_id"] == run_id and engine["index"] == 0
        assert engine["worker"] == "71@host-a"
        assert "exit status 1" in engine["last_failure"]
        assert "hunter2" not in engine["last_failure"]
        served.store.write_live(
            keys.live(run_id, "rollout-host-a-71"), {"time": time.time(), "worker_inflight": 3}
        )
        workers = (await served.http.get("/v1/workers")).json()["data"]
        rollout = next(item for item in workers if item["role"] == "rollout")
        assert rollout["id"] == "71@host-a" and rollout["queue"] == queue
        assert [gauge["worker_inflight"] for gauge in rollout["gauges"]] == [3]
        assert {item["role"] for item in workers} == {"orchestrator", "rollout"}
        answer = await served.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.text)
        assert found["ratchet_temporal_up", ()] == 1
        assert found["ratchet_run_step", (("run", run_id),)] == 3
        assert found["ratchet_engines", (("state", "up"),)] == 1
        assert found["ratchet_workers", (("role", "rollout"),)] == 1
        route = (("method", "GET"), ("route", "/v1/engines"), ("status", "200"))
        assert found["ratchet_api_requests_total", route] >= 1
        for host in hosts:
            await host.terminate()


@pytest.mark.asyncio(loop_scope="session")
async def test_services_are_as_their_supervisor_says(served: Served) -> None:
    assert (await served.http.get("/v1/services")).json()["data"] == []
    file = services_file(served.settings.home)
    known = ServiceState("worker-env", "crash-looping", "2026-01-02T00:00:00Z", 7, 4, "logs/x.log")
    try:
        file.write_text(json.dumps([asdict(known)]))
        (service,) = (await served.http.get("/v1/services")).json()["data"]
    finally:
        file.unlink()
    assert service == {"object": "service", **asdict(known)}


def test_without_temporal_the_api_still_counts_its_requests(tmp_path: Any) -> None:
    settings = Settings(store_url=f"file://{tmp_path}", queues=Queues(), min_free_bytes=1)
    app = TestClient(create_app(settings, ClientConnectConfig(target_host="127.0.0.1:1")))
    app.get("/v1/runs/some-run/stop")
    for path in ("/x/1", "/x/2"):
        app.get(path)
    found = samples(app.get("/metrics").text)
    assert found["ratchet_temporal_up", ()] == 0
    routes = {dict(labels).get("route") for name, labels in found if "requests_total" in name}
    assert "other" in routes and not any("/x/" in str(route) for route in routes)
