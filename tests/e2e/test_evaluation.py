"""Two models evaluated and compared on the whole real stack, with much of it killed on the way."""

import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.client import Ratchet
from ratchet.configs.load import read
from ratchet.worker.stack import Stack
from tests import ROOT
from tests.e2e.driving import ENGINE, get, kill, kill_server, launch, processes_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.stack,
]

SMALL = ("train.batch_size=16", "train.group_size=4")
TRAINER = "ratchet.activities.training.process"
ENV = "reverse-text"
EXAMPLES, SIZE = 200, 4


def test_an_evaluation_goes_on_over_kills_and_is_compared(stack: Stack) -> None:
    where = stack.up()
    trained = launch(where, "reverse_text", "max_steps=2", "eval.env=[]", *SMALL)
    wait_until(where, trained, lambda run: run["status"] == "succeeded")
    counts = (f"eval.num_examples={EXAMPLES}", f"eval.group_size={SIZE}")
    plain = read(ROOT / "configs" / "examples" / "reverse_text.toml", [*SMALL, *counts])
    with Ratchet(where.api) as client:
        first, second = (
            run.id for run in client.runs.evaluate(plain, models=["ratchet/tiny", f"{trained}@2"])
        )
        wait_until(where, first, lambda run: (run["progress"] or {}).get("rollouts_inflight_eval"))
        assert get(where, f"/v1/runs/{second}")["status"] == "queued", "one after another"
        assert not processes_of(stack.home, TRAINER)
        kill(stack, "worker-orchestrator")
        kill(stack, "worker-rollout")
        kill_server(stack, ENGINE)
        stack.up()
        kill(stack, "api")
        stack.up()
        for run_id in (first, second):
            run = wait_until(where, run_id, lambda run: run["status"] == "succeeded")
            assert run["kind"] == "eval" and run["eval"][ENV]["rollouts"] == EXAMPLES * SIZE
            assert not run["eval"][ENV]["failed"], "what was killed cost no rollout"
        assert get(where, f"/v1/runs/{first}")["restarts"]["engine"] >= 1
        (found,) = client.runs.compare_evals(second, first)
    assert found.problem is None and found.examples == EXAMPLES
    assert found.wins + found.losses + found.ties == EXAMPLES and found.difference is not None
    store = ArtifactStore(f"file://{stack.home}/store")
    for each in found.differ[:3]:
        for run_id, ids in ((second, each.rollouts), (first, each.other_rollouts)):
            read_back = [get(where, f"/v1/runs/{run_id}/rollouts/{rid}") for rid in ids]
            assert {rollout["example"] for rollout in read_back} == {each.example}
    for run_id in (first, second):
        record = store.get_json(store.require(keys.eval_record(run_id, f"0-0/{ENV}")))
        assert len(record["rewards"]) == EXAMPLES
