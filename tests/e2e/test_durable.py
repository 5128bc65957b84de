"""One run on the whole real stack through everything that its users may ask of it.

It is checkpointed, changed, paused, resumed, cancelled, resumed under its id and forked; its
trainer is killed on the way. In the end its recorded batches are trained once more, undisturbed,
and must give the same bits.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT
from tests.e2e.driving import ENDED, get, kill_server, launch, processes_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

TRAINER = "ratchet.activities.training.process"
STEPS = 12
FORKED_TO = 11


def ask(where: Addresses, run_id: str, verb: str, body: Any = None) -> Any:
    """Asks a run for something."""
    url = f"{where.api}/v1/runs/{run_id}/{verb}"
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()


def until_status(where: Addresses, run_id: str, status: str) -> Any:
    """The run once it has a status, ended ones among them."""
    deadline = time.monotonic() + 120
    while (run := get(where, f"/v1/runs/{run_id}"))["status"] != status:
        assert time.monotonic() < deadline, run
        time.sleep(0.3)
    return run


def replay(stack: Stack, run_id: str) -> Any:
    """What the replay tool says of a run, from version 0 to its last step."""
    store = f"file://{stack.home}/store"
    command = [sys.executable, "-m", "ratchet.activities.training.replay", run_id, "--store", store]
    done = subprocess.run(
        [*command, "--from", "0"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def lived(stack: Stack) -> tuple[Addresses, str, str]:
    """A run with two attempts, and a fork of it."""
    where = stack.up()
    small = ["train.batch_size=32", "train.group_size=4", "eval.env=[]"]
    kept = ["retention.weights=all", "retention.batches=all", "checkpoint.interval=100"]
    run_id = launch(where, "reverse_text", "max_steps=500", *small, *kept)
    wait_until(where, run_id, lambda run: run["step"] >= 2)
    ask(where, run_id, "checkpoint")
    first = wait_until(where, run_id, lambda run: run["checkpoint"])["checkpoint"]["step"]
    kill_server(stack, TRAINER)
    wait_until(where, run_id, lambda run: run["step"] > first + 1 and run["restarts"]["trainer"])
    patch = {"trainer": {"optim": {"lr": 4e-4}}, "max_steps": STEPS, "metadata": {"owner": "ana"}}
    url = f"{where.api}/v1/runs/{run_id}"
    httpx.patch(url, json=patch, timeout=60).raise_for_status()
    wait_until(where, run_id, lambda run: run["config_revision"] == 1)
    ask(where, run_id, "pause", {"mode": "cancel", "reason": "the machine is needed"})
    paused = until_status(where, run_id, "paused")
    assert not processes_of(stack.home, TRAINER) and not processes_of(stack.home, "EngineCore")
    ask(where, run_id, "resume")
    wait_until(where, run_id, lambda run: run["step"] > paused["step"])
    ask(where, run_id, "cancel")
    until_status(where, run_id, "cancelled")
    ask(where, run_id, "resume")
    wait_until(where, run_id, lambda run: run["status"] == "running")
    body = {"config": {"max_steps": FORKED_TO, "trainer": {"optim": {"lr": 1e-4}}}}
    reply = httpx.post(f"{url}/fork", json={"step": paused["step"], **body}, timeout=60)
    assert reply.status_code == 201, reply.text
    fork_id = str(reply.json()["id"])
    for name in (run_id, fork_id):
        assert wait_until(where, name, lambda run: run["status"] in ENDED)["status"] == "succeeded"
    return where, run_id, fork_id


def test_curves_go_on_over_pause_attempts_and_fork(lived: tuple[Addresses, str, str]) -> None:
    where, run_id, fork_id = lived
    run, fork = (get(where, f"/v1/runs/{name}") for name in (run_id, fork_id))
    assert run["step"] == run["policy_version"] == STEPS and run["metadata"]["owner"] == "ana"
    assert fork["step"] == FORKED_TO
    for name, steps in ((run_id, STEPS), (fork_id, FORKED_TO)):
        records = get(where, f"/v1/runs/{name}/metrics")["data"]
        assert [record["step"] for record in records] == list(range(1, steps + 1))
    rates = {r["step"]: r["metrics"]["lr"] for r in records}
    assert rates[FORKED_TO] < rates[1] / 4, "the fork has a learning rate of its own"


def test_every_example_trains_once_over_all_attempts(
    stack: Stack, lived: tuple[Addresses, str, str]
) -> None:
    _, run_id, _ = lived
    store = ArtifactStore(f"file://{stack.home}/store")
    second = attempt_id(run_id, 2)
    origin = store.get_json(store.require(keys.lineage(second)))
    groups: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        owner = run_id if step <= origin["step"] else second
        samples = decode_batch(store.get(store.require(keys.batch(owner, step))))
        for group in {sample.group for sample in samples}:
            groups[group.split(".")[0]] += 1
    assert set(groups.values()) == {1} and len(groups) <= STEPS * 8
    counters = sorted(int(group.removeprefix("train/")) for group in groups)
    # Groups without a contrast in their rewards have no sample to train on.
    assert counters[-1] < STEPS * 8 + 16


def test_replay_of_the_recorded_batches_gives_the_same_bits(
    stack: Stack, lived: tuple[Addresses, str, str]
) -> None:
    _, run_id, fork_id = lived
    for name, steps in ((run_id, STEPS), (fork_id, FORKED_TO)):
        result = replay(stack, name)
        assert result["equal"] is True and result["to"] == steps, result
        assert len(result["compared"]) >= steps
