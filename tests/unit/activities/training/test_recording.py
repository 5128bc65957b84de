"""Which artifacts of which attempt a replay is made from."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.fencing import variant
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.recording import NotReplayable, plan


class World:
    """A store in which attempts of runs leave what matters to a plan."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(str(root / "store"))
        self.root = root

    def state(self, key: str) -> None:
        folder = self.root / key.replace("/", "-")
        folder.mkdir()
        (folder / "x").write_text(key)
        self.store.put_folder(key, folder, attempt="t")

    def attempt(
        self,
        run: str,
        *,
        batches: range = range(0),
        weights: tuple[int, ...] = (),
        checkpoints: tuple[int, ...] = (),
        lineage: tuple[str, int] | None = None,
    ) -> None:
        self.store.put_json(keys.config(run), {"of": run})
        for step in batches:
            self.store.put(keys.batch(run, step), f"{run} {step}".encode())
        for version in weights:
            self.state(keys.weights(run, version))
        for step in checkpoints:
            self.state(keys.checkpoint(run, step))
        if lineage:
            origin: dict[str, Any] = {"source": lineage[0], "step": lineage[1], "kind": "resume"}
            self.store.put_json(keys.lineage(run), origin)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names_of(refs: list[Any]) -> list[str]:
    return [ref.key for ref in refs]


def test_a_run_in_one_piece(world: World) -> None:
    # Batch 7 was shipped and never trained.
    world.attempt("x", batches=range(1, 8), weights=(0, 5, 6), checkpoints=(2, 4))
    made = plan(world.store, "x")
    assert (made.run, made.start, made.state.key) == ("x", 2, keys.checkpoint("x", 2))
    assert [step.step for step in made.steps] == [3, 4, 5, 6]
    assert [len(step.weights) for step in made.steps] == [0, 0, 1, 1]
    assert [len(step.checkpoints) for step in made.steps] == [0, 1, 0, 0]
    assert {step.attempt for step in made.steps} == {"x"}

    whole = plan(world.store, "x", start=0, stop=5)
    assert whole.state.key == keys.weights("x", 0) and not whole.from_checkpoint
    assert [step.step for step in whole.steps] == [1, 2, 3, 4, 5]


def test_attempts_and_forks_are_followed(world: World) -> None:
    world.attempt("x", batches=range(1, 7), weights=(0, 5, 6), checkpoints=(2, 4, 6))
    world.attempt(
        "x+2", batches=range(3, 6), weights=(0, 2, 5), checkpoints=(2, 5), lineage=("x", 2)
    )
    world.attempt("y", batches=range(6, 8), weights=(0, 5, 7), checkpoints=(5,), lineage=("x+2", 5))
    # Created, and its checkpoint not restored yet.
    world.attempt("x+3")
    made = plan(world.store, "x", start=0)
    assert made.run == "x+2"
    assert [step.attempt for step in made.steps] == ["x", "x", "x+2", "x+2", "x+2"]
    # At the step where one leaves off both have the state; what x did beyond it does not count.
    assert names_of(made.steps[1].checkpoints) == [keys.checkpoint(a, 2) for a in ("x", "x+2")]
    assert names_of(made.steps[3].checkpoints) == []
    assert names_of(made.steps[4].weights) == [keys.weights("x+2", 5)]

    fork = plan(world.store, "y")
    assert fork.start == 2 and fork.state.key == keys.checkpoint("x+2", 2)
    assert [step.attempt for step in fork.steps] == ["x+2"] * 3 + ["y"] * 2
    first = plan(world.store, "x+1")
    assert first.run == "x" and [step.step for step in first.steps] == [3, 4, 5, 6]


def test_revisions_are_those_of_the_record(world: World) -> None:
    world.attempt("x", batches=range(1, 4), weights=(0, 3))
    record = {"step": 1, "time": 0.0, "metrics": {"config_revision": 2.0}}
    world.store.put_json(keys.step_record("x", 1), record)
    batch = world.store.require(keys.batch("x", 2))
    world.store.put_json(keys.train_metrics("x", 2, batch.sha256), {"config_revision": 1.0})
    assert [step.revision for step in plan(world.store, "x").steps] == [0, 0, 0], "there is one"
    world.store.put_json(keys.config("x", 1), {})
    assert [step.revision for step in plan(world.store, "x").steps] == [2, 1, 0]


def test_all_that_trainers_made_of_a_step_counts(world: World) -> None:
    world.attempt("x", batches=range(1, 4), weights=(0, 1, 3), checkpoints=(2,))
    for key in (keys.weights("x", 1), keys.checkpoint("x", 2)):
        world.state(variant(key, 3))
    made = plan(world.store, "x", start=0)
    assert names_of(made.steps[0].weights) == [keys.weights("x", 1), keys.weights("x", 1) + ".e3"]
    assert len(made.steps[1].checkpoints) == 2
    assert plan(world.store, "x", start=2).state.key == keys.checkpoint("x", 2) + ".e3"


def test_what_is_missing_is_named(world: World) -> None:
    world.attempt("x", batches=range(4, 9), weights=(0, 8), checkpoints=(3, 6))

    def refusal(run: str = "x", **given: int) -> str:
        with pytest.raises(NotReplayable) as caught:
            plan(world.store, run, **given)
        return str(caught.value)

    missing = refusal(start=0)
    assert "batches of steps 1 to 3" in missing and 'retention.batches="all"' in missing
    assert missing.endswith("begin at a checkpoint (kept: 3, 6)"), "0 is where it began"
    assert "no checkpoint of step 4" in refusal(start=4)
    assert "the newest step with weights or a checkpoint is 8" in refusal(stop=9)
    assert "from step 6 to 5" in refusal(start=6, stop=5)
    assert "has no weights or checkpoint of steps 4 to 5" in refusal(stop=5)
    assert "no run 'z'" in refusal("z") and "its runs: x" in refusal("z")
    assert "'x+two' names no run" in refusal("x+two")
    world.attempt("fresh", weights=(0,))
    assert "from step 0 to 0" in refusal("fresh")
