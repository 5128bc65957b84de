"""`python -m ratchet.api` as a process: its start, its end, and a kill in the middle of a run."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from temporalio.testing import WorkflowEnvironment

from tests import ROOT
from tests.unit.api.conftest import config, temporal_binary
from tests.workflow.running import WITHIN_S

pytestmark = pytest.mark.timeout(600)


def environment(home: Path, address: str) -> dict[str, str]:
    return {
        **os.environ,
        "RATCHET_HOME": str(home),
        "RATCHET_QUEUE_PREFIX": "api-process",
        "RATCHET_PREFLIGHT_TIMEOUT_S": "0.5",
        "TEMPORAL_ADDRESS": address,
        "TEMPORAL_NAMESPACE": "default",
    }


@contextmanager
def serving(env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, read from its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ratchet.api", "--port", "0"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the first line names the address"
        yield process, found.group()
    finally:
        process.kill()
        process.wait(WITHIN_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary()
    ) as env:
        yield env.client.service_client.config.target_host


@pytest.mark.alone
@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_api_comes_back_and_knows_its_runs(address: str, tmp_path: Path) -> None:
    env = environment(tmp_path, address)
    began = time.monotonic()
    with serving(env) as (_, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        first = time.monotonic() - began
        made = httpx.post(f"{url}/v1/runs", json=config("survivor"), timeout=30)
        assert made.status_code == 201
        run = made.json()
        assert run["status"] == "queued"
    began = time.monotonic()
    with serving(env) as (process, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert time.monotonic() - began < 1.0 + 2 * first, "it starts as quickly as without runs"
        assert httpx.get(f"{url}/readyz", timeout=10).status_code == 200
        again = httpx.get(f"{url}{made.headers['location']}", timeout=10).json()
        for seen in (again, run):
            seen["waiting_for"].pop("message")  # it tells the seconds
        assert again == run
        assert httpx.post(f"{url}/v1/runs/{run['id']}/stop", timeout=10).status_code == 202
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0


async def heard(
    url: str, run_id: str, last: str | None, count: int, begun: asyncio.Event | None = None
) -> list[str]:
    """Ids of the next events of a stream; the first of them sets `begun`."""
    ids: list[str] = []
    headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    async with (
        httpx.AsyncClient(timeout=WITHIN_S) as http,
        http.stream("GET", f"{url}/v1/runs/{run_id}/events", headers=headers) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
                if begun is not None:
                    begun.set()
            if len(ids) == count:
                break
    return ids


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_of_events_survives_a_killed_api(address: str, tmp_path: Path) -> None:
    env = environment(tmp_path, address)
    async with httpx.AsyncClient(timeout=WITHIN_S) as http:
        with serving(env) as (_, url):
            made = await http.post(f"{url}/v1/runs", json=config("heard"))
            run_id = made.json()["id"]
            first = await heard(url, run_id, None, 3)
            # No worker carries the run out, so what is asked of it is all that happens.
            for number in range(4):
                await http.post(f"{url}/v1/runs/{run_id}/eval", json={})
                if number == 1:
                    first += await heard(url, run_id, first[-1], 1)
        with serving(env) as (process, url):
            await http.post(f"{url}/v1/runs/{run_id}/checkpoint")
            rest = await heard(url, run_id, first[-1], 4)
            listed = (await http.get(f"{url}/v1/runs/{run_id}/events")).json()["data"]
            # An open stream does not keep the API from ending.
            begun = asyncio.Event()
            watching = asyncio.create_task(heard(url, run_id, None, 99, begun))
            await asyncio.wait_for(begun.wait(), WITHIN_S)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, WITHIN_S) == 0
            with contextlib.suppress(httpx.TransportError):
                await asyncio.wait_for(watching, WITHIN_S)
    assert [event["id"] for event in listed] == first + rest
    assert len(set(first + rest)) == 8
    assert [event["type"] for event in listed] == [
        *("run.created", "run.status", "run.waiting"),
        *["run.asked"] * 5,
    ]


def test_a_public_address_without_keys_is_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.api", "--port", "0", "--host", "0.0.0.0"],
        cwd=ROOT,
        env=environment(tmp_path, "127.0.0.1:1"),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "ratchet keys new" in done.stderr


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "ratchet.api", "--port", str(port)],
            cwd=ROOT,
            env=environment(tmp_path, "127.0.0.1:1"),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr and "--port" in done.stderr


def test_a_bad_setting_is_one_clear_line(tmp_path: Path) -> None:
    env = {**environment(tmp_path, "127.0.0.1:1"), "RATCHET_PREFLIGHT_TIMEOUT_S": "soon"}
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.api", "--port", "0"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "RATCHET_PREFLIGHT_TIMEOUT_S" in done.stderr
