"""One short run on the whole real stack, through kills and signals, and what is left of it.

Temporal, vLLM, env servers, trainer, workers and API are real processes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from docs.step_metrics import undescribed
from ratchet.activities.contracts.wire import WIRE
from ratchet.worker.stack import GRACE_S, Stack
from tests import ROOT
from tests.e2e.driving import get, processes_of
from tests.e2e.rescoring import batch_samples, worst_difference
from tests.e2e.trained import STEPS, Trained

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.stack]


def test_kills_of_every_kind_do_not_stop_a_run_that_learns(trained: Trained) -> None:
    where, run_id, run = trained.where, trained.id, trained.said
    assert run["status"] == "succeeded" and run["policy_version"] == run["step"] == STEPS
    steps = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    rewards = [step["metrics"]["reward/all/mean"] for step in steps]
    assert not undescribed(steps[-1]["metrics"])
    assert rewards[0] < 0.35
    assert rewards[-1] > rewards[0] + 0.15, rewards
    evals = get(where, f"/v1/runs/{run_id}/evals")["data"]
    asked = [record["step"] for record in evals]
    assert asked[0] == 0 and asked[-1] == STEPS and len(asked) == 4, "three due and one by signal"
    assert evals[-1]["versions"] == [STEPS, STEPS]
    assert evals[-1]["reward_mean"] > evals[0]["reward_mean"]


def test_every_sampled_token_rescored_agrees_with_the_engine(
    trained: Trained,
) -> None:
    store, run_id = trained.store, trained.id
    samples = batch_samples(store, run_id, STEPS)
    versions = {v for sample in samples for v in sample.versions if v >= 0}
    assert len(versions) >= STEPS // 2, "the kills leave some versions without a token"
    worst, checked = worst_difference(store, run_id, samples, seq_len=64)
    assert checked == sum(sum(sample.loss_mask) for sample in samples) > 3000
    assert worst <= 1e-4, f"{worst} over {checked} tokens"


def test_temporal_ui_shows_the_run_and_its_groups(trained: Trained) -> None:
    where, run_id = trained.where, trained.id

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


def test_ended_runs_are_kept_for_years(trained: Trained) -> None:
    where = trained.where

    async def retention() -> float:
        client = await Client.connect(where.temporal)
        request = DescribeNamespaceRequest(namespace="default")
        result = await client.workflow_service.describe_namespace(request, retry=True)
        return result.config.workflow_execution_retention_ttl.seconds / 86_400

    assert asyncio.run(retention()) == 3650


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


@pytest.mark.nightly
def test_interrupted_demo_leaves_nothing(stack: Stack, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "ratchet.worker.demo", "configs/examples/reverse_text.toml"],
        cwd=ROOT,
        # With the store of before the demo finds its policy there.
        env={
            **os.environ,
            "RATCHET_HOME": str(tmp_path),
            "RATCHET_STORE": f"file://{stack.home}/store",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs tests in a shell's background passes on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
