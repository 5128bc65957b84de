"""Two algorithms in one batch on the whole real stack, one of them with a teacher.

The teacher is a second vLLM beside the run's own, served as `make teacher` serves it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from activities.storage import keys
from activities.storage.store import ArtifactStore
from configs.load import load
from worker import teacher
from worker.demo import Outcome, carry_out
from worker.stack import ROOT, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUIET = Console(stderr=True, quiet=True)


@dataclass(frozen=True)
class Place:
    """A stack that is up, and the teacher's address."""

    stack: Stack
    api: str
    base_url: str

    def run(self, name: str, place: str, *overrides: str) -> Outcome:
        """A run of an example config with this teacher at key `place`."""
        given = [f"{place}.base_url={self.base_url}", *overrides]
        return carry_out(self.api, load(ROOT / "configs" / f"{name}.toml", given), QUIET)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    os.environ.pop("TEMPORAL_ADDRESS", None)
    home = tmp_path_factory.mktemp("home")
    stack = Stack(home)
    port = teacher.free_port("127.0.0.1")
    with teacher.running(home, lambda text: None, port):
        assert teacher.answers(port)
        try:
            yield Place(stack, stack.up().api, teacher.base_url(port))
        finally:
            stack.down()
    assert not teacher.answers(port)


def member_tokens(rows: list[dict[str, Any]], stream: str) -> int:
    """Tokens with a weight other than 0; of an absent stream, none."""
    return sum(weight != 0 for row in rows for weight in row[stream] or ())


def test_two_algorithms_share_a_batch(place: Place, tmp_path: Path) -> None:
    steps = 4
    outcome = place.run(
        "mixed",
        "train.env.1.algo.teacher",
        f"max_steps={steps}",
        "eval.env=[]",
        "model.warm_start_env=reverse-text",
    )
    run = outcome.run
    assert (run["status"], run["step"], run["policy_version"]) == ("succeeded", steps, steps), run
    store = ArtifactStore(f"file://{place.stack.home}/store")
    mixed = 0
    for step in range(1, steps + 1):
        file = tmp_path / f"{step}.parquet"
        file.write_bytes(store.get(store.require(keys.batch(run["id"], step))))
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
        metrics = outcome.steps[step - 1]["metrics"]
        sampled = sum(sum(row["loss_mask"]) for row in by_env["reverse-retry"])
        assert metrics["tokens_rl"] == sampled > 0
        assert metrics["tokens_ref_kl"] == member_tokens(rows, "ref_kl_weights") > 0
        assert metrics["loss_ref_kl"] > 0.0, "the policy is behind its teacher"
        assert metrics["loss"] == pytest.approx(metrics["loss_rl"] + metrics["loss_ref_kl"])
        assert metrics["zero_advantage/reverse-text"] == 0.0
        mixed += 1
    assert mixed, "some batch holds samples of both"
