"""What is reported while a policy is made, and what it descends from."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.keys import ADAPTER_FOLDER
from ratchet.activities.training import prepare
from ratchet.activities.training.prepare import descent, load_named, make_default
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import SMALL, make_batch
from tests.unit.activities.training.test_adapters import config as adapting


def test_a_warm_start_reports_each_tenth_step_and_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(SMALL, batch=1, threads=1, clean_limit=12, cooldown=7, noisy_steps=3)
    torch.set_num_threads(2)
    make_default(recipe, "reverse-text", 0)
    assert torch.get_num_threads() == recipe.threads == 1
    reported = [json.loads(line)["progress"] for line in capsys.readouterr().out.splitlines()]
    steps = [text.partition(": ")[2].partition(",")[0] for text in reported]
    assert steps == [f"step {step} of at most 22" for step in (10, 20, 22)]


def test_a_model_that_cannot_be_loaded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_named("mine", str(tmp_path))
    assert ended.value.code == prepare.PROBLEM
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert problem.startswith("model 'mine' cannot be loaded: ")


def test_a_folder_descends_from_what_its_card_names(tmp_path: Path) -> None:
    order = {"name": str(tmp_path)}
    assert descent(order) == {"base": str(tmp_path), "license": None}
    card = "---\nlicense: mit\nbase_model: Qwen/Qwen3-0.6B\n---\n# mine\n"
    (tmp_path / "README.md").write_text(card)
    assert descent(order) == {"base": "Qwen/Qwen3-0.6B", "license": "mit"}
    (tmp_path / "README.md").write_text("---\nbase_model: [a/b, c/d]\n---\n# merged\n")
    assert descent(order) == {"base": str(tmp_path), "license": None}, "of two it has no one base"


def test_a_version_of_a_run_descends_as_that_run_does(tmp_path: Path) -> None:
    order = {"name": "run:r@3", "folder": str(tmp_path), "base": "a/b", "license": "mit"}
    assert descent(order) == {"base": "a/b", "license": "mit"}


def prepared(
    order: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """The weights that are made for `order`."""
    (folder / "order.json").write_text(json.dumps(order))
    argv = ["prepare", "--order", str(folder / "order.json"), "--out", str(folder / "v0")]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(prepare, "end_with_parent", lambda: None)
    prepare.main()
    return load_file(folder / "v0" / "model.safetensors")


def test_a_version_with_an_adapter_is_merged(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    trainer.load(policy, adapting({"rank": 4}), checkpoint=False)
    trainer.train(1, encode_batch(make_batch(1)), tmp_path / "1")
    folder = shutil.copytree(policy, tmp_path / "held")
    shutil.copytree(tmp_path / "1" / ADAPTER_FOLDER, folder / ADAPTER_FOLDER)
    order = {"name": "run:r@1", "folder": str(folder), "env": "reverse-text", "seed": 0}
    made = prepared(order | {"base": "a/b", "license": "mit"}, tmp_path, monkeypatch)
    merged, base = (load_file(f / "model.safetensors") for f in (tmp_path / "1", policy))
    assert all(torch.equal(made[name], merged[name]) for name in merged)
    assert any(not torch.equal(made[name], base[name]) for name in base)


@pytest.mark.parametrize("lowered", [False, True])
def test_only_a_run_in_bfloat16_rounds_weights_between_two_of_its_numbers(
    policy: Path,
    tmp_path: Path,
    lowered: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(policy, tmp_path / "half")
    half = {name: t.half() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    order = {"name": str(folder), "env": "reverse-text", "seed": 0, "lowered": lowered}
    made, rounded, ties, count = prepared(order, tmp_path, monkeypatch), 0, 0, 0
    for name, given in half.items():
        whole, low = given.float(), given.float().bfloat16().float()
        between = (whole.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(made[name], torch.where(between & lowered, low, whole)), name
        assert torch.equal(made[name].bfloat16().float(), low), "one in bfloat16 sees no difference"
        rounded += int((made[name] != whole).sum())
        ties, count = ties + int(between.sum()), count + whole.numel()
    assert 0.1 < ties / count < 0.15 and rounded == (ties if lowered else 0)
    said = [json.loads(line)["progress"] for line in capsys.readouterr().out.splitlines()]
    text = f"rounded {ties} of {count} weights, which lay between two of bfloat16"
    assert said == ([text] if lowered else [])
