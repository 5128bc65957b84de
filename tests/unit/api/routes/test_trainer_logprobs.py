"""How the trainer scored a rollout: the file of the right step, and the rows of the rollout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.storage.token_logprobs import encode_token_logprobs
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import Rollouts

SAMPLE = Sample(
    "", 0, "e", 1.0, 1.0, [0, 1, 3], [False, True, True], [0.0, -0.5, -0.25], None, [-1, 4, 5],
    rl_weights=[0.0, 0.0, 0.0],
)  # fmt: skip
Scores = list[float | None]


def scores(
    store: ArtifactStore,
    run: str,
    step: int,
    *rows: tuple[str, int, list[float]],
    variant: str = "",
) -> None:
    """Commits the scores of a step: (group, rollout, those of the first tokens) of each sample."""
    samples = [replace(SAMPLE, group=group, rollout=rollout) for group, rollout, _ in rows]
    data = encode_token_logprobs(samples, [np.array(row, np.float32) for *_, row in rows])
    store.put(keys.token_logprobs(run, step) + variant, data)


def group(store: ArtifactStore, run: str, name: str, versions: list[int]) -> None:
    """A group of two rollouts of two samples each."""
    sample = {
        "token_ids": SAMPLE.token_ids,
        "loss_mask": SAMPLE.loss_mask,
        "logprobs": SAMPLE.logprobs,
        "versions": versions,
    }
    members = [
        {"rollout": index, "error": None, "reward": 1.0, "samples": [sample, sample]}
        for index in (0, 1)
    ]
    value: dict[str, Any] = {"group": name, "kind": name.partition("/")[0], "env": "e"}
    store.put_json(keys.group(run, name), {**value, "example": 0, "rollouts": members})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    made = ArtifactStore(f"file://{tmp_path}")
    made.put_json(keys.config("x"), {})
    return made


def shown_scores(store: ArtifactStore, run: str, rid: str) -> list[Scores | None]:
    found = Rollouts(Records(store)).full(run, rid)
    assert found is not None
    return [sample.trainer_logprobs for sample in found.samples]


def test_the_file_of_its_step_is_found_and_its_own_rows(store: ArtifactStore) -> None:
    group(store, "x", "train/1", [-1, 4, 5])
    assert shown_scores(store, "x", "train:1:1") == [None, None]
    own, other = ("train/1", 1), ("train/2", 1)
    # No later than its newest token: not this group, whatever its name.
    scores(store, "x", 5, (*own, [-9.0, -9.0, -9.0]))
    scores(store, "x", 6, (*other, [-8.0, -8.0, -8.0]))
    assert shown_scores(store, "x", "train:1:1") == [None, None]
    rows = [(*other, [-7.0] * 3), (*own, [-4.0, -0.5, -0.25]), (*own, [-4.0, -0.75])]
    scores(store, "x", 8, *rows)
    assert shown_scores(store, "x", "train:1:1") == [[None, -0.5, -0.25], [None, -0.75, None]]
    assert shown_scores(store, "x", "train:1:0") == [None, None], "a filter kept it from training"
    # Another trainer process of the run came to other bits, and the run went on with those.
    scores(store, "x", 8, *[(g, n, [v - 1 for v in row]) for g, n, row in rows], variant=".e3")
    assert shown_scores(store, "x", "train:1:1") == [[None, -1.5, -1.25], [None, -1.75, None]]
    for key in store.committed_keys("runs/x/token_logprobs"):
        store.delete(store.require(key))
    assert shown_scores(store, "x", "train:1:1") == [None, None]


def test_what_a_file_that_is_being_deleted_held_is_not_there(store: ArtifactStore) -> None:
    group(store, "x", "train/1", [-1, 4, 5])
    scores(store, "x", 6, ("train/1", 0, [-1.0, -2.0, -3.0]))
    ref = store.require(keys.token_logprobs("x", 6))
    Path(store.path(ref.path)).unlink()
    assert shown_scores(store, "x", "train:1:0") == [None, None]


def test_evals_are_not_trained(store: ArtifactStore) -> None:
    group(store, "x", "eval/5-1/e/0", [-1, 5, 5])
    scores(store, "x", 6, ("eval/5-1/e/0", 0, [-1.0, -2.0, -3.0]))
    assert shown_scores(store, "x", "eval:5-1:e:0:0") == [None, None]


def test_an_attempt_that_goes_on_with_a_batch_has_its_scores(store: ArtifactStore) -> None:
    group(store, "x", "train/1", [-1, 3, 3])
    scores(store, "x", 6, ("train/1", 0, [-1.0, -2.0, -3.0]))
    store.put_json(keys.config("x+2"), {})
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 5, "kind": "resume"})
    assert shown_scores(store, "x", "train:1:0") == [None, None], (
        "step 6 of x is no part of the run"
    )
    scores(store, "x+2", 6, ("train/1", 0, [-1.0, -2.5, -3.5]))
    assert shown_scores(store, "x", "train:1:0") == [[None, -2.5, -3.5], None]
    # The same name in a later attempt is another group.
    group(store, "x+2", "train/1", [-1, 6, 6])
    assert shown_scores(store, "x", "train:1:0") == [None, None]
