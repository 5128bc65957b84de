"""What is reported while a policy is made, and what it descends from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.activities.training.prepare import descent, make_default
from tests.unit.activities.training.conftest import SMALL


def test_a_warm_start_reports_each_tenth_step_and_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(SMALL, batch=1, threads=1, clean_limit=12, cooldown=7, noisy_steps=3)
    make_default(recipe, "reverse-text", 0)
    reported = [json.loads(line)["progress"] for line in capsys.readouterr().out.splitlines()]
    steps = [text.partition(": ")[2].partition(",")[0] for text in reported]
    assert steps == [f"step {step} of at most 22" for step in (10, 20, 22)]


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
