"""An environment on two servers, one of which is killed in mid-run; old rollouts go meanwhile."""

import re
import socket
from collections import Counter

import psutil
import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Stack
from tests.e2e.driving import ENDED, get, launch, processes_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

SERVER = "ratchet.activities.envs.server"
STEPS, KEPT = 8, 2


def test_killing_one_of_two_env_servers_loses_no_rollout(stack: Stack) -> None:
    where = stack.up()
    envs = 'train.env=[{id = "reverse-text", workers = 2}]'
    small = ["eval.env=[]", "train.batch_size=32", "train.group_size=4", "checkpoint.interval=1"]
    kept = ["retention.batches=all", f"retention.rollouts={KEPT}"]
    run_id = launch(where, "reverse_text", f"max_steps={STEPS}", envs, *small, *kept)
    wait_until(where, run_id, lambda run: run["step"] >= 2)
    victim, other = processes_of(stack.home, SERVER)
    victim.kill()
    psutil.wait_procs([victim], timeout=60)
    said = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    assert said["status"] == "succeeded" and said["restarts"]["env"] == 1
    gone, _ = psutil.wait_procs([other], timeout=120)
    assert gone == [other], "the run's end ends it"
    records = get(where, f"/v1/runs/{run_id}/metrics")["data"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    failed = {name: n for r in records for name, n in r["metrics"].items() if "errors/" in name}
    assert not any(failed.values()), failed
    store = ArtifactStore(f"file://{stack.home}/store")
    trained: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        samples = decode_batch(store.get(store.require(keys.batch(run_id, step))))
        trained.update({sample.group.partition(".")[0] for sample in samples})
    assert set(trained.values()) == {1}, "every example trains once"
    folder = keys.group(run_id, "train/0").rpartition("/")[0]
    assert keys.group(run_id, "train/0") not in store.committed_keys(folder), "an old one is gone"
    assert 0 < len(store.committed_keys(folder)) < 8 * STEPS
    result = get(where, f"/v1/runs/{run_id}/gauges", role="env")["data"]
    sources = {sample["source"] for sample in result}
    for server in ("reverse-text", "reverse-text-2"):
        own = re.compile(rf"env-server-{server}-{re.escape(socket.gethostname())}-[0-9a-f]{{6}}")
        assert any(own.fullmatch(source) for source in sources), (server, sources)
