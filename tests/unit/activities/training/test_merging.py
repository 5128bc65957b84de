"""An adapter that is merged after the run: by peft, and to the bits that the trainer exports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training import merging
from ratchet.activities.training.model import load_model, save
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_adapters import config


@pytest.fixture
def version(tmp_path: Path, policy: Path) -> Path:
    """A version of a run: merged weights, and the adapter beside them."""
    trainer = Trainer()
    trainer.load(policy, config({"rank": 4, "alpha": 6}), checkpoint=False)
    for step in (1, 2):
        trainer.train(step, encode_batch(make_batch(step)), tmp_path / str(step))
    return tmp_path / "2"


def test_it_is_pefts_merge_and_what_the_trainer_exports(
    tmp_path: Path, policy: Path, version: Path
) -> None:
    merging.merge(policy, version / "adapter", tmp_path / "whole")
    merged = load_file(tmp_path / "whole" / "model.safetensors")
    adapted = PeftModel.from_pretrained(load_model(policy), str(version / "adapter"))
    theirs = adapted.merge_and_unload().state_dict()
    exported = load_file(version / "model.safetensors")
    assert merged.keys() == theirs.keys() == exported.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, theirs[name]) and torch.equal(tensor, exported[name]), name
    base = load_file(policy / "model.safetensors")
    assert any(not torch.equal(merged[name], base[name]) for name in base)
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").encode("ab")


def test_it_has_the_dtype_of_its_base(tmp_path: Path, policy: Path, version: Path) -> None:
    low, model = tmp_path / "low", AutoModelForCausalLM.from_pretrained(policy)
    AutoTokenizer.from_pretrained(policy).save_pretrained(low)
    save(model, low, "bfloat16")
    merging.merge(low, version / "adapter", tmp_path / "whole")
    about = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert about["dtype"] == "bfloat16"
    merged = load_file(tmp_path / "whole" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_its_arguments_are_base_adapter_and_out(
    tmp_path: Path, policy: Path, version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(policy), str(version / "adapter"), str(tmp_path / "whole")]
    monkeypatch.setattr(sys, "argv", ["merging", *places])
    merging.main()
    assert (tmp_path / "whole" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_it_is_a_command(tmp_path: Path, policy: Path, version: Path) -> None:
    places = [str(policy), str(version / "adapter"), str(tmp_path / "whole")]
    subprocess.run([sys.executable, "-P", "-m", merging.__name__, *places], check=True)
    assert (tmp_path / "whole" / "model.safetensors").is_file()
