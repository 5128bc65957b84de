"""Problems of GSM8K, from files of the hub's layout in its cache; none is fetched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from pydantic import ValidationError

from ratchet.activities.envs.shipped.gsm8k_tasks import (
    FILES,
    REVISION,
    SUFFIX,
    Gsm8kConfig,
    Gsm8kTask,
    Gsm8kTaskset,
    number_in,
)

ROWS = {
    "train": [("How many?", "2 + 2 = <<2+2=4>>4 eggs\n#### 4"), ("How much?", "#### 1,200")],
    "eval": [("How far?", "#### -3.50")],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with made-up data, on a machine without a network."""
    snapshot = tmp_path / "datasets--openai--gsm8k" / "snapshots" / REVISION
    for split, rows in ROWS.items():
        file = snapshot / FILES[split]
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = {"question": [q for q, _ in rows], "answer": [a for _, a in rows]}
        pq.write_table(pyarrow.table(columns), file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def tasks(**config: Any) -> list[Gsm8kTask]:
    return list(Gsm8kTaskset(Gsm8kConfig(**config)).load())


def test_splits_are_those_of_the_data(cache: Path) -> None:
    train, held_out = tasks(), tasks(split="eval", num_examples=5)
    assert [(task.data.id, task.data.answer) for task in train] == [
        ("train/0", "4"),
        ("train/1", "1200"),
    ]
    assert train[0].data.prompt == "How many?" + SUFFIX
    assert [(task.data.id, task.data.answer) for task in held_out] == [("eval/0", "-3.50")]
    assert [task.data.prompt for task in tasks(num_examples=1, suffix="")] == ["How many?"]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("2 + 2 = 4", 1.0),
        ("It is **4**.", 1.0),
        ("4.0", 1.0),
        ("\\boxed{4}", 1.0),
        ("4, or 5", 0.0),
        ("-4", 0.0),
        ("four", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(cache: Path, reply: str, reward: float) -> None:
    def trace(cut: bool) -> Any:
        return SimpleNamespace(is_truncated=cut, last_reply=reply)

    (task, _) = tasks()
    assert task.grade(trace(False)) == reward
    assert task.grade(trace(True)) == 0.0


def test_numbers_are_compared_by_value() -> None:
    assert number_in("12, then 1,234.50 dollars.") == number_in("1234.5")
    assert number_in("nothing") is None


def test_what_is_missing_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"not in the cache \(.*empty\), and the hub \(http"):
        tasks()
    with pytest.raises(ValidationError):
        Gsm8kConfig(num_examples=-2)


def test_a_problem_without_an_answer_is_refused(cache: Path) -> None:
    pq.write_table(
        pyarrow.table({"question": ["?"], "answer": ["#### none"]}), cache / FILES["eval"]
    )
    with pytest.raises(ValueError, match="problem 0 of split 'eval' has no answer"):
        tasks(split="eval")
