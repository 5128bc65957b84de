"""The replay tool: the same bits across attempts, and the first one that differs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training import replay
from ratchet.activities.training.bits import first_difference
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.upgrades import read_config
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG


class Recorder:
    """Trains in this process, and records as a run does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = ArtifactStore(str(root / "store"))

    def config(self, run: str, **trainer: Any) -> dict[str, Any]:
        config = read_config({**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}})
        data = config.model_dump(mode="json")
        self.store.put_json(keys.config(run), data)
        return data

    def keep(self, key: str, folder: Path) -> None:
        self.store.put_folder(key, folder, attempt="t")

    def train(self, trainer: Trainer, run: str, steps: range) -> None:
        for step in steps:
            data, out = encode_batch(make_batch(step)), self.root / f"{run}-{step}"
            self.store.put(keys.batch(run, step), data)
            trainer.train(step, data, out)
            self.keep(keys.weights(run, step), out)

    def save(self, trainer: Trainer, run: str, step: int) -> Path:
        out = self.root / f"{run}-checkpoint-{step}"
        trainer.save(step, out)
        self.keep(keys.checkpoint(run, step), out)
        return out


@pytest.fixture
def resumed(tmp_path: Path, policy: Path) -> ArtifactStore:
    """Run x: 4 steps, resumed after step 2 with another weight decay, then 3 steps."""
    made, trainer = Recorder(tmp_path), Trainer()
    # Threads are torch's choice: the checkpoint knows which it was, and the replay goes by it.
    trainer.load(policy, made.config("x", threads=None), checkpoint=False)
    made.keep(keys.weights("x", 0), policy)
    made.train(trainer, "x", range(1, 3))
    checkpoint = made.save(trainer, "x", 2)
    made.train(trainer, "x", range(3, 5))

    optim = {**CONFIG["trainer"]["optim"], "weight_decay": 0.5}
    trainer.load(checkpoint, made.config("x+2", optim=optim, threads=None), checkpoint=True)
    made.keep(keys.checkpoint("x+2", 2), checkpoint)
    made.store.put_json(keys.lineage("x+2"), {"source": "x", "step": 2, "kind": "resume"})
    made.train(trainer, "x+2", range(3, 6))
    made.save(trainer, "x+2", 5)
    return made.store


def flipped(store: ArtifactStore, key: str, file: str, tensor: str) -> None:
    """Commits, under `key`, what is there with one bit of a tensor turned over."""
    ref = store.require(key)
    folder = Path(store.path(key)).with_suffix(".flipped")
    ignored = shutil.ignore_patterns("manifest.json")
    shutil.copytree(store.fetch_folder(ref), folder, ignore=ignored)
    tensors = load_file(folder / file)
    tensors[tensor].view(-1).view(torch.int32)[3] ^= 1
    save_file(tensors, folder / file, metadata={"format": "pt"})
    store.delete(ref)
    store.put_folder(key, folder, attempt="flipped")


@pytest.mark.timeout(120)
def test_a_step_by_as_many_threads_as_it_was_recorded_with(
    tmp_path: Path, policy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, trainer = Recorder(tmp_path), Trainer()
    trainer.load(policy, made.config("x", threads=None), checkpoint=False)
    made.keep(keys.weights("x", 0), policy)
    made.train(trainer, "x", range(1, 2))
    made.save(trainer, "x", 1)
    assert replay.main(["x", "--from", "0", "--store", made.store.url]) == 0
    said = capfd.readouterr()
    report = json.loads(said.out.splitlines()[-1])
    assert "from runs/x/" in said.out + said.err and "goes on from" not in said.out + said.err
    assert [row["kind"] for row in report["compared"]] == ["weights", "checkpoint"]
    assert report["equal"] and report["torch_threads"] == torch.get_num_threads() == 1


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_an_adapter_from_its_checkpoint(
    tmp_path: Path, policy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, trainer = Recorder(tmp_path), Trainer()
    trainer.load(policy, made.config("x", lora={"rank": 4, "dropout": 0.1}), checkpoint=False)
    made.keep(keys.weights("x", 0), policy)
    for step in (1, 2):
        made.train(trainer, "x", range(step, step + 1))
        made.save(trainer, "x", step)
    tensor = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    for status in (0, 1):
        assert replay.main(["x", "--from", "1", "--store", made.store.url]) == status
        report = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert [row["kind"] for row in report["compared"]] == ["weights", "checkpoint"]
        if status == 0:
            flipped(made.store, keys.checkpoint("x", 2), keys.ADAPTER_FILE, tensor)
    assert report["first_difference"]["tensor"] == tensor


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_across_attempts_to_the_last_bit(
    resumed: ArtifactStore, capfd: pytest.CaptureFixture[str]
) -> None:
    def replayed(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = replay.main([*arguments, "--store", resumed.url])
        return status, json.loads(capfd.readouterr().out.splitlines()[-1])

    status, report = replayed("x", "--from", "0")
    assert status == 0 and report["equal"] and report["first_difference"] is None
    assert (report["run"], report["from"], report["to"]) == ("x+2", 0, 5)
    assert [(row["key"], row["equal"]) for row in report["compared"]] == [
        (keys.weights("x", 1), True),
        (keys.weights("x", 2), True),
        (keys.checkpoint("x", 2), True),
        *[(keys.weights("x+2", step), True) for step in (3, 4, 5)],
        (keys.checkpoint("x+2", 5), True),
    ]
    assert report["torch_threads"] == 1 and report["torch_version"] == torch.__version__

    moment = "exp_avg_sq/lm_head.weight"
    flipped(resumed, keys.checkpoint("x+2", 5), "optimizer.safetensors", moment)
    status, report = replayed("x", "--from", "2")
    assert status == 1 and not report["equal"] and report["steps"] == 3
    found = report["first_difference"]
    assert (found["step"], found["kind"], found["tensor"]) == (5, "checkpoint", moment)
    assert (found["elements"], found["what"]) == (1, "values") and found["largest"] >= 0
    assert [row["equal"] for row in report["compared"]] == [True, True, True, False]

    flipped(resumed, keys.weights("x+2", 4), "model.safetensors", "lm_head.weight")
    status, report = replayed("x", "--to", "5")
    found = report["first_difference"]
    assert status == 1 and (found["step"], found["kind"]) == (4, "weights")
    assert report["steps"] == 2, "nothing is trained beyond the difference"


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_each_attempt_in_its_own_mode(
    resumed: ArtifactStore, capfd: pytest.CaptureFixture[str]
) -> None:
    ref = resumed.require(keys.config("x+2"))
    config = resumed.get_json(ref)
    resumed.delete(ref)
    config["trainer"]["deterministic"] = True
    resumed.put_json(keys.config("x+2"), config)

    def mode(*arguments: str) -> bool:
        assert replay.main([*arguments, "--store", resumed.url]) == 0
        report = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert report["equal"] and report["steps"] >= 2
        return bool(report["deterministic"])

    assert mode("x", "--from", "0") is True
    assert mode("x", "--no-deterministic") is False
    assert mode("x+1", "--from", "0", "--to", "2") is False
    assert mode("x+1", "--from", "0", "--to", "2", "--deterministic") is True


def test_what_cannot_be_replayed(
    resumed: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert replay.main([*arguments, "--store", resumed.url]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert "no run 'nobody'" in refusal("nobody")
    resumed.delete(resumed.require(keys.batch("x", 1)))
    assert "batches of steps 1 of x+2 were removed" in refusal("x", "--from", "0")
    assert "no checkpoint of step 3" in refusal("x", "--from", "3")


def test_bits_and_not_values(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    same = {"a": nan, "b": torch.ones(2, 2, dtype=torch.bfloat16), "s": torch.tensor(3.0)}

    def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
        save_file(mine, one / "model.safetensors")
        # Spread over two files, as large models are.
        for n, names in enumerate((sorted(theirs)[:1], sorted(theirs)[1:])):
            save_file({k: theirs[k] for k in names}, other / f"model-{n}.safetensors")
        return first_difference(one, other, "model*.safetensors")

    assert difference(same, same) is None, "a NaN is the same as itself"
    zero = difference(same, {**same, "a": torch.tensor([float("nan"), -0.0, 1.0])})
    assert (zero.tensor, zero.elements, zero.size, zero.largest) == ("a", 1, 3, 0.0)
    number = difference(same, {**same, "a": torch.tensor([2.0, 0.0, 1.0])})
    assert number.largest is None
    assert difference(same, {**same, "s": torch.tensor([3.0])}).tensor == "s"
    assert difference(same, {**same, "b": torch.ones(2, 2)}).what.startswith("torch.bfloat16")
    assert difference({**same, "z": nan.clone()}, same).what == "only in the replay"
    assert difference(same, {**same, "z": nan.clone()}).what == "only recorded"
