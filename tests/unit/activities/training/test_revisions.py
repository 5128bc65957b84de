"""Changes of the config while a trainer holds its state."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.client import StateMismatch
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG

DATA = [encode_batch(make_batch(step)) for step in range(4)]


def changed(*path: str, to: Any) -> dict[str, Any]:
    """The config with the key at `path` set."""

    def put(section: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        below = put(section[keys[0]], keys[1:]) if len(keys) > 1 else to
        return {**section, keys[0]: below}

    return put(CONFIG, path)


def loaded(folder: Path, config: dict[str, Any], *, checkpoint: bool = False) -> Trainer:
    trainer = Trainer()
    trainer.load(folder, config, checkpoint=checkpoint)
    return trainer


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


LINEAR = {"type": "linear", "warmup_steps": 0, "decay_steps": 2, "min_lr": 0.0}
IPO = {"type": "ipo", "ipo_threshold": 0.01}


@pytest.mark.parametrize(
    "path, to",
    [
        (("trainer", "optim", "lr"), 3e-3),
        (("trainer", "optim", "max_norm"), 0.01),
        (("trainer", "scheduler"), LINEAR),
        (("trainer", "loss"), IPO),
    ],
)
def test_a_revision_holds_from_the_step_that_names_it(
    tmp_path: Path, policy: Path, path: tuple[str, ...], to: Any
) -> None:
    first, second = CONFIG, changed(*path, to=to)
    trainer = loaded(policy, first)
    plain = loaded(policy, first)
    # The schedule only goes down in the last two of four steps.
    for step, data in enumerate(DATA, 1):
        revision = int(step >= 4)
        config = second if revision else first
        result = trainer.train(step, data, tmp_path / f"a{step}", config=config, revision=revision)
        assert result["config_revision"] == revision
        plain.train(step, data, tmp_path / f"b{step}", config=first)
        same = weights(tmp_path / f"a{step}") == weights(tmp_path / f"b{step}")
        assert same == (revision == 0)
        if step == 3:
            trainer.save(3, tmp_path / "checkpoint")

    # A trainer made anew from the checkpoint, by whichever revision, repeats the step.
    for number, config in enumerate((first, second)):
        again = loaded(tmp_path / "checkpoint", config, checkpoint=True)
        again.train(4, DATA[3], tmp_path / f"c{number}", config=second, revision=1)
        assert weights(tmp_path / f"c{number}") == weights(tmp_path / "a4")


def test_more_steps_stretch_the_schedule(tmp_path: Path, policy: Path) -> None:
    short = changed("trainer", "scheduler", to=LINEAR)
    trainer = loaded(policy, short)
    rates = []
    for step, data in enumerate(DATA, 1):
        longer = {**short, "max_steps": 40} if step >= 4 else short
        result = trainer.train(step, data, tmp_path / str(step), config=longer, revision=step // 4)
        rates.append(result["lr"])
    assert rates[3] == rates[2] == rates[0] == CONFIG["trainer"]["optim"]["lr"]


def test_a_step_is_repeated_by_its_own_revision_only(tmp_path: Path, policy: Path) -> None:
    second = changed("trainer", "optim", "lr", to=3e-3)
    trainer = loaded(policy, CONFIG)
    result = trainer.train(1, DATA[0], tmp_path / "a", config=second, revision=1)
    trainer.save(1, tmp_path / "checkpoint")
    restored = loaded(tmp_path / "checkpoint", second, checkpoint=True)
    for one in (trainer, restored):
        assert one.train(1, DATA[0], tmp_path / "a", config=second, revision=1) == result
        with pytest.raises(StateMismatch, match="revision 0"):
            one.train(1, DATA[0], tmp_path / "a", config=CONFIG, revision=0)


@pytest.mark.parametrize(
    "path, to",
    [
        (("seed",), 1),
        (("inference",), {"dtype": "bfloat16"}),
        (("trainer", "compute_dtype"), "bfloat16"),
        (("trainer", "matmul_precision"), "high"),
        (("trainer", "threads"), 2),
        (("trainer", "packing"), False),
        (("trainer", "deterministic"), True),
        (("trainer", "optim"), {"type": "sgd"}),
        (("trainer", "optim", "weight_decay"), 0.1),
    ],
)
def test_what_is_fixed_since_the_load(
    tmp_path: Path, policy: Path, path: tuple[str, ...], to: Any
) -> None:
    trainer = loaded(policy, CONFIG)
    with pytest.raises(ValueError, match="cannot change"):
        trainer.train(1, DATA[0], tmp_path / "a", config=changed(*path, to=to), revision=1)
    assert trainer.step == 0
    trainer.train(1, DATA[0], tmp_path / "a")
    loaded(policy, CONFIG).train(1, DATA[0], tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_weights_that_could_not_be_written_are_written_later(tmp_path: Path, policy: Path) -> None:
    trainer, straight = loaded(policy, CONFIG), loaded(policy, CONFIG)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        trainer.train(1, DATA[0], tmp_path / "file" / "out")
    assert trainer.step == 1
    result = trainer.train(1, DATA[0], tmp_path / "a")
    straight.train(1, DATA[0], tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") and result["seconds_export"] > 0
