"""A run that an earlier build paused is resumed by this one, on the whole real stack.

The earlier build's home folder is as its `make down` left it: Temporal's database with every
execution of the run, and the artifact store. Nothing of it was written by the code as it is.
"""

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Stack
from tests import ROOT
from tests.e2e.driving import ENDED, get, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

RECORDED = ROOT / "tests" / "recorded" / "c20687b" / "home.tar.xz"
RUN = "recorded-c8060e"
PAUSED_AT, STEPS = 8, 14
GROUPS = 8
"""In a batch."""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A stack in the earlier build's home, not up yet."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["tar", "-xf", str(RECORDED), "-C", str(home)], check=True)
    made = Stack(home)
    yield made
    made.down()


def _rows(where: Any) -> list[Any]:
    rows: list[Any] = get(where, f"/v1/runs/{RUN}/metrics")["data"]
    return rows


def _trained(store: ArtifactStore) -> list[int]:
    """The train counters of the groups in all batches, in order; each trained once per mention."""
    counters: Counter[int] = Counter()
    for step in range(1, STEPS + 1):
        samples = decode_batch(store.get(store.require(keys.batch(RUN, step))))
        groups = {sample.group.split(".")[0] for sample in samples}
        counters.update(int(group.removeprefix("train/")) for group in groups)
    return sorted(counters.elements())


def _optimizer_steps(store: ArtifactStore) -> set[int]:
    """How often the optimizer of the last checkpoint has moved each parameter."""
    folder = store.fetch_folder(store.require(keys.checkpoint(RUN, STEPS)))
    state = load_file(folder / "optimizer.safetensors")
    return {int(count) for name, count in state.items() if name.startswith("step/")}


def test_a_paused_run_of_an_earlier_build_goes_on_to_its_end(stack: Stack) -> None:
    where = stack.up()
    paused, before = get(where, f"/v1/runs/{RUN}"), _rows(where)
    assert (paused["status"], paused["step"], len(before)) == ("paused", PAUSED_AT, PAUSED_AT)
    assert paused["config_revision"] == 1 and paused["metadata"] == {"owner": "ana"}

    httpx.post(f"{where.api}/v1/runs/{RUN}/resume", timeout=60).raise_for_status()
    run = wait_until(where, RUN, lambda run: run["status"] in ENDED)

    assert (run["status"], run["step"], run["policy_version"]) == ("succeeded", STEPS, STEPS)
    assert run["attempt"] == 1, "it went on, and was not begun again"
    assert run["rollouts"]["train"] >= paused["rollouts"]["train"] + 32 * (STEPS - PAUSED_AT)
    after = _rows(where)
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    assert after[:PAUSED_AT] == before, "what was recorded before the pause stands"
    rates = {row["step"]: row["metrics"]["lr"] for row in after}
    assert rates[STEPS] < rates[1], "the change of its learning rate holds"
    store = ArtifactStore(f"file://{stack.home}/store")
    assert _optimizer_steps(store) == {STEPS}, "no batch moved the weights twice"
    counters = _trained(store)
    assert len(counters) == len(set(counters)), "no example trained twice"
    # Groups whose rewards are all alike have no sample in a batch.
    assert len(counters) > GROUPS * STEPS / 2 and counters[-1] < GROUPS * STEPS + 2 * GROUPS
