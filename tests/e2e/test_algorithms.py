"""Two algorithms in one run on the whole real stack, one with a teacher and a foreign env server.

The teacher is a second vLLM beside the run's own, served as `make teacher` serves it. The run has
no end of its own: it is stopped from Temporal's CLI.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from ratchet.activities.envs.loading import process_env
from ratchet.activities.envs.probe import probe as probe_env
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker import teacher
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT
from tests.e2e.driving import ENDED, cli_signal, get, launch, processes_of, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.stack]

STEPS = 3
SERVER = "ratchet.activities.envs.server"


@dataclass(frozen=True)
class Place:
    """A stack that is up, and a teacher's address and process."""

    stack: Stack
    where: Addresses
    base_url: str
    teacher_pid: int


@pytest.fixture(scope="module")
def place(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("teacher")
    port = teacher.free_port("127.0.0.1")
    with ThreadPoolExecutor() as beside:
        where = beside.submit(stack.up)
        with teacher.running(home, lambda text: None, port) as server:
            assert teacher.answers(port)
            yield Place(stack, where.result(), teacher.base_url(port), server.pid)
    assert not teacher.answers(port)


@pytest.fixture(scope="module")
def env_server(stack: Stack) -> Iterator[str]:
    """An env server that is not the run's own; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = ["env-server", "--id", "reverse-text", "--bind", address]
    process = subprocess.Popen(
        [sys.executable, "-m", "ratchet.api.client", *command],
        cwd=ROOT,
        env={**os.environ, **process_env(None, stack.home)},
    )
    deadline = time.monotonic() + 60
    while asyncio.run(probe_env(address, 1.0)) != "up":
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.3)
    yield address
    process.kill()
    process.wait()


@dataclass(frozen=True)
class Run:
    """How the run ended, and what was seen while it ran: the ids of envs that it has servers for,
    and the cores that its engine and the teacher's are bound to.
    """

    last: dict[str, Any]
    metrics: list[dict[str, Any]]
    env_servers: list[str]
    bound: list[set[int]]


def bound_cores(engine: psutil.Process) -> set[int]:
    """Cores to which some thread of an engine's processes is bound; those of free ones are none."""
    free = os.sched_getaffinity(0)
    threads = [t for p in [engine, *engine.children(recursive=True)] for t in p.threads()]
    allowed = [os.sched_getaffinity(thread.id) for thread in threads]
    return {core for cores in allowed if len(cores) < len(free) for core in cores}


@pytest.fixture(scope="module")
def run(place: Place, env_server: str) -> Run:
    """The run, stopped after some steps."""
    run_id = launch(
        place.where,
        "mixed",
        "max_steps=500",
        "eval.env=[]",
        "retention.batches=all",
        # The policy of the demo, which other tests need, too.
        "model.warm_start_env=reverse-text",
        f"train.env.1.algo.teacher.base_url={place.base_url}",
        f"train.env.1.address={env_server}",
    )
    wait_until(place.where, run_id, lambda run: run["step"] >= 1)
    commands = [process.cmdline() for process in processes_of(place.stack.home, SERVER)]
    files = {Path(line[line.index("--config") + 1]) for line in commands if "--config" in line}
    servers = [json.loads(file.read_text())["id"] for file in files]
    (engine,) = processes_of(place.stack.home, "vllm.entrypoints")
    bound = [bound_cores(engine), bound_cores(psutil.Process(place.teacher_pid))]
    wait_until(place.where, run_id, lambda run: run["step"] >= STEPS)
    cli_signal(place.where, run_id, "stop", "--input", '"seen enough"')
    last = wait_until(place.where, run_id, lambda run: run["status"] in ENDED)
    return Run(last, get(place.where, f"/v1/runs/{run_id}/metrics")["data"], servers, bound)


def test_stop_by_cli_ends_a_run_on_a_foreign_env_server_with_a_checkpoint(run: Run) -> None:
    last = run.last
    assert last["status"] == "succeeded" and last["end_reason"].endswith("seen enough")
    assert last["checkpoint"]["step"] == last["policy_version"] == last["step"] < 500
    assert run.env_servers == ["reverse-retry"], "only what has no address has one of the run's own"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core for all")
def test_engines_side_by_side_are_not_bound_to_the_same_core(run: Run) -> None:
    engine, other = run.bound
    assert not engine & other


def member_tokens(rows: list[dict[str, Any]], stream: str) -> int:
    """Tokens with a weight other than 0; of an absent stream, none."""
    return sum(weight != 0 for row in rows for weight in row[stream] or ())


def test_two_algorithms_share_a_batch(place: Place, run: Run, tmp_path: Path) -> None:
    steps, run_id = run.last["step"], run.last["id"]
    store = ArtifactStore(f"file://{place.stack.home}/store")
    mixed = 0
    for step in range(1, steps + 1):
        file = tmp_path / f"{step}.parquet"
        file.write_bytes(store.get(store.require(keys.batch(run_id, step))))
        rows = pq.read_table(file).to_pylist()
        by_env = {
            env: [row for row in rows if row["env"] == env]
            for env in ("reverse-retry", "reverse-text")
        }
        assert sum(map(len, by_env.values())) == len(rows)
        for row in by_env["reverse-retry"]:
            assert row["advantages"] is not None and any(row["advantages"])
            assert row["rl_weights"] is row["ref_kl_weights"] is row["ref_logprobs"] is None
        for row in by_env["reverse-text"]:
            assert row["advantages"] is None and not any(row["rl_weights"])
            assert [w != 0 for w in row["ref_kl_weights"]] == row["loss_mask"]
            pairs = list(zip(row["ref_logprobs"], row["loss_mask"], strict=True))
            assert not any(score for score, sampled in pairs if not sampled)
            assert any(score < 0.0 for score, sampled in pairs if sampled)
        if not all(by_env.values()):
            # What is in a batch is a matter of what is done first.
            continue
        metrics = run.metrics[step - 1]["metrics"]
        sampled = sum(sum(row["loss_mask"]) for row in by_env["reverse-retry"])
        assert metrics["tokens_rl"] == sampled > 0
        assert metrics["tokens_ref_kl"] == member_tokens(rows, "ref_kl_weights") > 0
        assert metrics["loss_ref_kl"] > 0.0, "the policy is behind its teacher"
        assert metrics["loss"] == pytest.approx(metrics["loss_rl"] + metrics["loss_ref_kl"])
        assert metrics["zero_advantage/reverse-text"] == 0.0
        mixed += 1
    assert mixed, "some batch holds samples of both"
