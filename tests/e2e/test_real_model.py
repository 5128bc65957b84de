"""Two steps of the example of a pretrained model: its template, tasks, engine and trainer."""

import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Stack
from tests.dtypes import quick_dtypes
from tests.e2e.driving import ENDED, get, launch, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]


def test_smollm2_learns_for_two_steps(stack: Stack) -> None:
    where = stack.up()
    small = [
        "train.batch_size=16",
        "train.sampling.max_tokens=8",
        "eval.env=[]",
        "retention.batches=all",
    ]
    # All of a few replies may be wrong; what is trained here is whatever was said.
    run_id = launch(
        where,
        "smollm2_chain_sum",
        "max_steps=2",
        *small,
        *quick_dtypes(),
        "filters.pre_batch=[]",
        "filters.post_batch=[]",
    )
    run = wait_until(where, run_id, lambda run: run["status"] in ("succeeded", "paused"))
    assert run["status"] in ENDED and run["policy_version"] == 2, run
    steps = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        # One of the two batches may be of version 0, though the policy is at 1.
        assert step["metrics"]["mismatch_kl"] < 0.05 and step["metrics"]["samples"] == 16
    store = ArtifactStore(f"file://{stack.home}/store")
    samples = decode_batch(store.get(store.require(keys.batch(run_id, 2))))
    assert {sample.env for sample in samples} == {"reasoning-gym-tasks"}
    # The template's own system message, four examples and a question, all of which nobody sampled.
    assert all(185 <= sample.loss_mask.index(True) <= 200 for sample in samples)
