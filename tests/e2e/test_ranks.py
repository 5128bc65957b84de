"""Runs of the demo's config whose trainer is two ranks, on the whole real stack."""

import json
from collections import Counter

import psutil
import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.server import LAUNCHER, PROCESS
from ratchet.worker.stack import Stack
from tests.e2e.driving import ENDED, get, launch, processes_of, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900), pytest.mark.stack]

SMALL = ("trainer.ranks=2", "eval.env=[]", "checkpoint.interval=1", "retention.batches=all")


def ranks_of(stack: Stack) -> dict[int, psutil.Process]:
    """The processes of the trainer, by rank."""
    found = [p for p in processes_of(stack.home, PROCESS) if LAUNCHER not in p.cmdline()]
    return {int(process.environ()["RANK"]): process for process in found}


def require_whole(stack: Stack, run_id: str, steps: int) -> None:
    """Each step was trained once, by two ranks, on examples of its own."""
    store = ArtifactStore(f"file://{stack.home}/store")
    trained: Counter[str] = Counter()
    for step in range(1, steps + 1):
        samples = decode_batch(store.get(store.require(keys.batch(run_id, step))))
        trained.update({sample.group.partition(".")[0] for sample in samples})
    assert set(trained.values()) == {1}, "every example trains once"
    checkpoint = store.require(keys.checkpoint(run_id, steps))
    state = json.loads(store.read_file(checkpoint, keys.TRAINER_FILE))
    assert (state["step"], state["ranks"]) == (steps, 2)


def test_two_ranks_train_a_run(stack: Stack) -> None:
    where = stack.up()
    run_id = launch(where, "reverse_text", "max_steps=3", "train.max_lag=0", *SMALL)
    wait_until(where, run_id, lambda run: run["step"] >= 1)
    assert ranks_of(stack).keys() == {0, 1}
    run = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    assert (run["status"], run["policy_version"]) == ("succeeded", 3), run
    assert run["restarts"]["trainer"] == 0
    records = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [record["step"] for record in records] == [1, 2, 3]
    # All rollouts are of the version that trains on them.
    assert all(record["metrics"]["mismatch_kl"] < 1e-4 for record in records)
    require_whole(stack, run_id, 3)


def test_a_run_goes_on_after_one_of_its_ranks_was_killed(stack: Stack) -> None:
    where = stack.up()
    run_id = launch(where, "reverse_text", "max_steps=5", *SMALL)
    wait_until(where, run_id, lambda run: run["step"] >= 2)
    ranks = ranks_of(stack)
    ranks[1].kill()
    gone, _ = psutil.wait_procs(list(ranks.values()), timeout=120)
    assert len(gone) == 2, "a lost rank takes the other with it"
    run = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    assert (run["status"], run["policy_version"]) == ("succeeded", 5), run
    assert run["restarts"]["trainer"] >= 1
    records = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    require_whole(stack, run_id, 5)
