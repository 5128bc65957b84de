"""`make bench-learning`: whether the tiny policy learns reverse-text, on three seeds.

Each of SEEDS (0 1 2) runs STEPS (40) steps of configs/examples/reverse_text.toml on the whole real
stack, in a home of its own. Afterwards every sampled token is scored once more with the weights of
the version that sampled it. The last line of stdout is one JSON object: per seed the reward,
mismatch KL and seconds of every step, the mean reward of the last five steps, the mean mismatch KL
of the last three, and the largest difference of a rescored token. Exits with 1 unless every seed
goes from at most 0.35 to at least 0.8, with a mismatch KL of at most 0.01 and a difference of at
most 1e-4.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.load import load
from ratchet.worker.stack import Stack
from tests import ROOT
from tests.e2e.rescoring import batch_samples, worst_difference

START_AT_MOST, END_AT_LEAST = 0.35, 0.8
MISMATCH_KL_AT_MOST, DIFFERENCE_AT_MOST = 0.01, 1e-4
ENDED = ("succeeded", "failed", "cancelled")


def one_seed(stack: Stack, api: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its curves, and what it came to."""
    kept = ["retention.weights=all", "retention.batches=all"]
    overrides = [f"seed={seed}", f"max_steps={steps}", *kept]
    config = load(ROOT / "configs" / "examples" / "reverse_text.toml", overrides)
    began = time.monotonic()
    with httpx.Client(base_url=api, timeout=60) as client:
        reply = client.post("/v1/runs", json=config.model_dump(mode="json"))
        assert reply.status_code == 201, reply.text
        run_id = reply.json()["id"]
        while (run := client.get(f"/v1/runs/{run_id}").json())["status"] not in ENDED:
            time.sleep(1)
        assert run["status"] == "succeeded", run
        wall_s = time.monotonic() - began
        records = client.get(f"/v1/runs/{run_id}/metrics", params={"limit": steps}).json()["data"]
    metrics = [record["metrics"] for record in records]
    assert len(metrics) == steps
    store = ArtifactStore(f"file://{stack.home}/store")
    samples = batch_samples(store, run_id, steps)
    worst, checked = worst_difference(store, run_id, samples, config.trainer.seq_len)
    rewards = [step["reward/all/mean"] for step in metrics]
    kl = [step["mismatch_kl"] for step in metrics]
    result = {
        "seed": seed,
        "reward_first": rewards[0],
        "reward_last_5": fmean(rewards[-5:]),
        "mismatch_kl_last_3": fmean(kl[-3:]),
        "rescored_worst": worst,
        "rescored_tokens": checked,
        "wall_s": round(wall_s, 1),
    }
    good = (
        result["reward_first"] <= START_AT_MOST
        and result["reward_last_5"] >= END_AT_LEAST
        and result["mismatch_kl_last_3"] <= MISMATCH_KL_AT_MOST
        and worst <= DIFFERENCE_AT_MOST
        and checked == sum(sum(sample.loss_mask) for sample in samples)
    )
    seconds = [step["time/step"] for step in metrics]
    print(json.dumps({**result, "ok": good}), file=sys.stderr, flush=True)
    curves = {"reward": rewards, "mismatch_kl": kl, "seconds": seconds}
    return {**result, "ok": good, "curves": curves}


def main() -> int:
    """Entry point; returns the exit status."""
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
    steps = int(os.environ.get("STEPS", "40"))
    with tempfile.TemporaryDirectory(prefix="ratchet-learning-") as home:
        stack = Stack(Path(home))
        try:
            where = stack.up()
            results = [one_seed(stack, where.api, seed, steps) for seed in seeds]
        finally:
            stack.down()
    good = all(result["ok"] for result in results)
    print(json.dumps({"steps": steps, "seeds": results, "ok": good}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
