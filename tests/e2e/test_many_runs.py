"""A hundred thousand runs in a real Temporal: lists stay quick, and the API's memory stays flat.

The runs are started on a queue that nobody polls, with a second to live, so that Temporal ends them
by itself. The API is a process of its own, as users start it.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from ratchet.activities.contracts.wire import WIRE
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.services.ended import MARGIN
from ratchet.api.services.run_list import cursor_of
from ratchet.api.store.run_index import row_of
from ratchet.workflows.protocol.messages import MEMO_KEY, TRAINING_RUN
from tests.unit.api.conftest import temporal_binary

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.timeout(3000),
]

RUNS = int(os.environ.get("RUNS", "100000"))
AT_ONCE = 100
DAYS = 3
PAGES = 1000
QUICK_S = 0.1
# The dev server's own bounds are for a laptop's load, not for a hundred thousand ends at once.
UNBOUND = [
    word
    for service in ("frontend", "history", "matching", "worker")
    for word in ("--dynamic-config-value", f"{service}.persistenceMaxQPS=100000")
]
CALM = 0.05
"""Cores that a Temporal server takes at most once it is done with what the ends left it to do."""
WITHIN_S = 1200.0


def created(i: int) -> datetime:
    """When run `i` was created: spread evenly over the DAYS before yesterday."""
    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    at = end - timedelta(days=DAYS) + timedelta(days=DAYS) * i / RUNS
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


async def start(client: Client, i: int) -> None:
    """Starts a run that ends by itself."""
    memo = {
        "name": "many",
        "created_at": created(i).isoformat(timespec="milliseconds"),
        "metadata": {"owner": "ben" if i % 5000 == 77 else "ana"},
        "max_steps": 100,
        "envs": ["reverse-text"],
        "model": "ratchet/tiny",
        "status": "running",
    }
    await client.start_workflow(
        TRAINING_RUN,
        id=f"many-{i:06d}",
        task_queue="nobody-polls",
        memo={MEMO_KEY: memo},
        execution_timeout=timedelta(seconds=1),
    )


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits until `holds()`; bounded."""
    end = time.monotonic() + WITHIN_S
    while not await holds():
        assert time.monotonic() < end, f"never came to pass: {what}"
        await asyncio.sleep(1)


@contextmanager
def serving(env: dict[str, str], log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of an API."""
    with log.open("w") as out:
        command = [sys.executable, "-m", "ratchet.api", "--port", "0"]
        api = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=out)
        try:
            end = time.monotonic() + 60
            while "http://" not in log.read_text():
                assert api.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            address = "http://" + log.read_text().partition("http://")[2].split()[0].rstrip("/")
            yield address, psutil.Process(api.pid)
        finally:
            api.terminate()
            api.wait(60)


class Stalls:
    """How long `/healthz` took at most, asked by a thread of its own."""

    def __init__(self, address: str) -> None:
        self.worst, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(address,))

    def __enter__(self) -> "Stalls":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self, address: str) -> None:
        with httpx.Client(base_url=address, timeout=60) as http:
            http.get("/healthz")
            while not self._over.wait(0.02):
                began = time.perf_counter()
                assert http.get("/healthz").status_code == 200
                self.worst = max(self.worst, time.perf_counter() - began)


async def test_pages_of_100000_runs_of_a_real_temporal(tmp_path: Path) -> None:
    home = tmp_path / "home"
    store = ArtifactStore(f"file://{home}/store")
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        data_converter=WIRE,
        dev_server_extra_args=UNBOUND,
    ) as temporal:
        client, waiting = temporal.client, asyncio.Semaphore(AT_ONCE)

        async def begin(i: int) -> None:
            async with waiting:
                await start(client, i)

        began = time.monotonic()
        for first in range(0, RUNS, 10_000):
            await asyncio.gather(*map(begin, range(first, min(RUNS, first + 10_000))))
        print(f"{RUNS} runs started in {time.monotonic() - began:.0f} s")

        async def listed() -> bool:
            query = f"WorkflowType = '{TRAINING_RUN}' AND CloseTime IS NOT NULL"
            return (await client.count_workflows(query)).count == RUNS

        (server,) = [p for p in psutil.Process().children() if "start-dev" in p.cmdline()]

        async def calm() -> bool:
            used = await asyncio.to_thread(server.cpu_percent, 5.0)
            return used < 100 * CALM

        await until("every run has ended and is listed", listed)
        await until("Temporal is calm", calm)
        env = {
            "RATCHET_HOME": str(home),
            "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        }
        began = time.monotonic()
        command = [sys.executable, "-m", "ratchet.api", "--rebuild-index"]
        subprocess.run(command, env={**os.environ, **env}, check=True)
        print(f"the index was rebuilt in {time.monotonic() - began:.0f} s")
        # Runs that began within MARGIN are looked at again and again; these count as older.
        for key in (keys.RUN_INDEX, keys.ENDED_UNTIL):
            store.write_live(key, {"until": (datetime.now(UTC) + MARGIN).isoformat()})
        middle, end = (cursor_of(row_of(f"many-{i:06d}", created(i))) for i in (RUNS // 2, 150))
        reads = {
            "newest": "limit=100",
            "middle": f"limit=100&after={middle}",
            "oldest": f"limit=100&after={end}",
            "failed": f"limit=100&status=failed&after={middle}",
            "succeeded": "limit=100&status=succeeded",
            "running": "limit=100&status=running",
            "of one owner": f"limit=100&metadata[owner]=ben&after={middle}",
        }
        with (
            serving(env, tmp_path / "api.log") as (address, api),
            Stalls(address) as stalls,
            httpx.Client(base_url=address, timeout=60) as http,
        ):

            def walk() -> float:
                """Reads the list from its first page to its last; returns the slowest page."""
                seen, worst, after = 0, 0.0, ""
                while after is not None:
                    began = time.perf_counter()
                    reply = http.get(f"/v1/runs?limit=100{after and '&after='}{after}")
                    assert reply.status_code == 200, reply.text
                    page = reply.json()
                    worst = max(worst, time.perf_counter() - began if after else 0.0)
                    seen, after = seen + len(page["data"]), page["next_after"]
                assert seen == RUNS
                return worst

            # The first fills what is kept, such as the sizes of runs.
            walked = [walk()]
            once = api.memory_info().rss
            walked.append(walk())
            twice = api.memory_info().rss
            print(
                f"walks: slowest page {max(walked) * 1e3:.0f} ms, {once >> 20}, {twice >> 20} MiB"
            )
            sizes: dict[str, int] = {}
            took: dict[str, list[float]] = {name: [] for name in reads}
            for i in range(PAGES + len(reads)):
                name = list(reads)[i % len(reads)]
                began = time.perf_counter()
                reply = http.get(f"/v1/runs?{reads[name]}")
                took[name].append(time.perf_counter() - began)
                assert reply.status_code == 200, reply.text
                sizes[name] = len(reply.json()["data"])
                if i == PAGES // 2:
                    half = api.memory_info().rss
            full = api.memory_info().rss
    for name, times in took.items():
        # The first of all opens connections and catches up with Temporal.
        ordered = sorted(times[1:])
        median, worst = ordered[len(ordered) // 2] * 1e3, ordered[-1] * 1e3
        print(f"{name}: median {median:.0f} ms, worst {worst:.0f} ms")
        assert ordered[-1] < QUICK_S, name
    print(f"worst /healthz {stalls.worst * 1e3:.0f} ms; {half >> 20} MiB, then {full >> 20} MiB")
    assert sizes["newest"] == sizes["middle"] == sizes["oldest"] == sizes["failed"] == 100
    assert sizes["running"] == sizes["succeeded"] == 0
    assert stalls.worst < QUICK_S
    assert full < half * 1.02 and twice < once * 1.05
