"""One short run on the whole real stack, with everything a user does to it on the way.

Temporal, vLLM, env servers, trainer, workers and API are real processes. In mid-run the API, the
workflow worker and the rollout worker are killed and started again, and so is every kind of server
that the run keeps; signals come from Temporal's own CLI.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from temporalio.client import Client

from activities.contracts.wire import WIRE
from activities.envs.loading import process_env
from activities.envs.probe import probe as probe_env
from activities.storage.store import ArtifactStore
from configs.load import load
from tests.e2e.rescoring import batch_samples, worst_difference
from worker.stack import GRACE_S, ROOT, Addresses, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 12
SERVERS = {
    "env": "activities.envs.server",
    "trainer": "activities.training.process",
    "engine": "EngineCore",
}
TEMPORAL = Path(sys.executable).parent / "temporal"
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of its own on free ports; what it leaves behind is checked at the end."""
    os.environ.pop("TEMPORAL_ADDRESS", None)
    made = Stack(tmp_path_factory.mktemp("home"))
    yield made
    made.down()


def belongs(process: psutil.Process, home: Path, command: str = "") -> bool:
    """Whether a process belongs to the stack under `home` and its command line has `command`."""
    try:
        ours = process.environ().get("RATCHET_HOME") == str(home)
        return ours and command in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def processes_of(home: Path, command: str = "") -> list[str]:
    """Names of processes that belong to the stack under `home`."""
    return [p.name() for p in psutil.process_iter() if belongs(p, home, command)]


def kill(stack: Stack, name: str) -> None:
    """SIGKILL to one process of the stack, with the witness that it is gone."""
    pid = stack.record["processes"][name]["pid"]
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
    assert name not in stack.running()


def kill_server(stack: Stack, command: str) -> None:
    """SIGKILL to the processes of a run's server that `command` names."""
    victims = [p for p in psutil.process_iter() if belongs(p, stack.home, command)]
    assert victims, f"no process runs {command}"
    for victim in victims:
        victim.kill()
    gone, _ = psutil.wait_procs(victims, timeout=5)
    assert len(gone) == len(victims)


def get(where: Addresses, path: str, **params: Any) -> Any:
    """A JSON answer of the API."""
    return httpx.get(f"{where.api}{path}", params=params, timeout=30).raise_for_status().json()


def wait_until(where: Addresses, run_id: str, ready: Callable[[Any], bool]) -> Any:
    """The run's state once `ready` holds; a run that ended before that is an error."""
    while not ready(run := get(where, f"/v1/runs/{run_id}")):
        assert run["status"] not in ENDED, run
        time.sleep(0.3)
    return run


def cli_signal(where: Addresses, run_id: str, name: str, *arguments: str) -> None:
    """`temporal workflow signal`, as a user types it."""
    command = [str(TEMPORAL), "workflow", "signal", "--address", where.temporal]
    subprocess.run(
        [*command, "--workflow-id", run_id, "--name", name, *arguments],
        check=True,
        capture_output=True,
        timeout=30,
    )


def launch(where: Addresses, *overrides: str) -> str:
    """Starts the demo's run with overrides; returns its id."""
    config = load(ROOT / "configs" / "reverse_text.toml", overrides)
    reply = httpx.post(f"{where.api}/v1/runs", json=config.model_dump(mode="json"), timeout=60)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


@pytest.fixture(scope="module")
def finished(stack: Stack) -> tuple[Addresses, str, Any]:
    """A run that went through the kills and signals, and how it ended."""
    where = stack.up()
    run_id = launch(where, f"max_steps={STEPS}", "eval.interval=6", "retention.weights=all")
    wait_until(where, run_id, lambda run: run["step"] >= 1)
    kill(stack, "worker-orchestrator")
    kill(stack, "api")
    assert stack.up() == where
    wait_until(where, run_id, lambda run: run["step"] >= 2)
    kill(stack, "worker-rollout")
    stack.up()
    for role, server in SERVERS.items():
        step = get(where, f"/v1/runs/{run_id}")["step"]
        kill_server(stack, server)
        wait_until(where, run_id, lambda run, role=role: run["restarts"][role] >= 1)
        wait_until(where, run_id, lambda run, step=step: run["step"] > step)
    cli_signal(where, run_id, "no_such_signal")
    cli_signal(where, run_id, "trigger_eval", "--input", '{"envs": ["reverse-text"]}')
    return where, run_id, wait_until(where, run_id, lambda run: run["status"] in ENDED)


def test_kills_of_every_kind_do_not_stop_a_run_that_learns(
    finished: tuple[Addresses, str, Any],
) -> None:
    where, run_id, run = finished
    assert run["status"] == "succeeded" and run["policy_version"] == run["step"] == STEPS
    steps = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    rewards = [step["metrics"]["reward/all/mean"] for step in steps]
    assert rewards[0] < 0.35
    assert rewards[-1] > rewards[0] + 0.15, rewards
    evals = get(where, f"/v1/runs/{run_id}/evals")["data"]
    asked = [record["step"] for record in evals]
    assert asked[0] == 0 and asked[-1] == STEPS and len(asked) == 4, "three due and one by signal"
    assert evals[-1]["versions"] == [STEPS, STEPS]
    assert evals[-1]["reward_mean"] > evals[0]["reward_mean"]


def test_every_sampled_token_rescored_agrees_with_the_engine(
    stack: Stack, finished: tuple[Addresses, str, Any]
) -> None:
    _, run_id, _ = finished
    store = ArtifactStore(f"file://{stack.home}/store")
    samples = batch_samples(store, run_id, STEPS)
    versions = {v for sample in samples for v in sample.versions if v >= 0}
    assert len(versions) >= STEPS // 2, "the kills leave some versions without a token"
    worst, checked = worst_difference(store, run_id, samples, seq_len=64)
    assert checked == sum(sum(sample.loss_mask) for sample in samples) > 3000
    assert worst <= 1e-4, f"{worst} over {checked} tokens"


def test_temporal_ui_shows_the_run_and_its_groups(finished: tuple[Addresses, str, Any]) -> None:
    where, run_id, _ = finished

    async def look() -> tuple[dict[str, Any], set[str]]:
        client = await Client.connect(where.temporal, data_converter=WIRE)
        described = await client.get_workflow_handle(run_id).describe()
        attributes = {key.name: value for key, value in described.typed_search_attributes}
        summaries = set()
        async for event in client.get_workflow_handle(
            f"{run_id}/dispatch/0"
        ).fetch_history_events():
            if event.user_metadata.summary.data:
                summaries.add(json.loads(event.user_metadata.summary.data))
        return attributes, summaries

    attributes, summaries = asyncio.run(look())
    assert attributes["RatchetStatus"] == "succeeded" and attributes["RatchetStep"] == STEPS
    assert attributes["RatchetPolicyVersion"] == STEPS and attributes["RatchetReward"] > 0.3
    assert "train group 0 · reverse-text · v0" in summaries


@pytest.fixture
def env_server(stack: Stack) -> Iterator[str]:
    """An env server that is not the run's own; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    config = json.dumps({"id": "reverse-text", "args": {}, "timeout_s": 60})
    command = [sys.executable, "-m", "activities.envs.server", "--address", address]
    process = subprocess.Popen(
        [*command, "--config", config],
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


def test_stop_by_cli_ends_a_run_on_a_foreign_env_server_with_a_checkpoint(
    stack: Stack, env_server: str
) -> None:
    where = stack.up()
    run_id = launch(
        where,
        "max_steps=500",
        "eval.env=[]",
        "train.batch_size=32",
        f"train.env.0.address={env_server}",
    )
    wait_until(where, run_id, lambda run: run["step"] >= 1)
    mine = processes_of(stack.home, "activities.envs.server")
    assert not mine, "an env server was started although one was given by address"
    cli_signal(where, run_id, "stop", "--input", '"seen enough"')
    run = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    assert run["status"] == "succeeded" and run["end_reason"].endswith("seen enough")
    assert run["checkpoint"]["step"] == run["step"] < 500


def test_what_only_workers_can_see_is_refused_before_anything_starts(stack: Stack) -> None:
    where = stack.up()
    before = len(get(where, "/v1/runs")["data"])
    config = {
        "max_steps": 1,
        "model": {"name": "/no/such/model"},
        "train": {"env": [{"id": "reverse-txt"}]},
    }
    reply = httpx.post(f"{where.api}/v1/runs", json=config, timeout=60)
    assert reply.status_code == 422, reply.text
    messages = {error["pointer"]: error["message"] for error in reply.json()["errors"]}
    assert set(messages) == {"/model/name", "/train/env/0/id"}
    assert "reverse-text" in messages["/train/env/0/id"]
    assert len(get(where, "/v1/runs")["data"]) == before


def test_down_leaves_no_process_and_no_port(stack: Stack) -> None:
    where = stack.up()
    assert processes_of(stack.home)
    stack.down()
    assert not processes_of(stack.home) and not stack.running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{where.api}/healthz", timeout=2)


def test_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "worker.demo", "configs/reverse_text.toml"],
        cwd=ROOT,
        env={**os.environ, "RATCHET_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("hosts/*")):
        assert demo.poll() is None and time.monotonic() < deadline, "no server ever started"
        time.sleep(0.2)
    demo.send_signal(signal.SIGINT)
    # Workers, API and Temporal are stopped one after the other, each within GRACE_S.
    printed, _ = demo.communicate(timeout=4 * GRACE_S)
    assert demo.returncode == 130 and printed == ""
    assert not processes_of(tmp_path)
