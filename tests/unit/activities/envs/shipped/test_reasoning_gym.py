"""Tasks of the reasoning-gym package: questions of two splits, answers scored by the package."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

from ratchet.activities.envs.datasets import split_of
from ratchet.activities.envs.shipped import reasoning_gym_tasks
from ratchet.activities.envs.shipped.reasoning_gym_tasks import (
    ReasoningGymConfig,
    ReasoningGymTask,
    ReasoningGymTaskset,
    entries_of,
)

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def tasks(**config: Any) -> list[ReasoningGymTask]:
    given = {"dataset": "chain_sum", "arguments": SMALL, **config}
    return list(ReasoningGymTaskset(ReasoningGymConfig(**given)).load())


def score(task: ReasoningGymTask, reply: str, truncated: bool = False) -> float:
    trace: Any = SimpleNamespace(is_truncated=truncated, last_reply=reply)
    return task.grade(trace)


def question(task: ReasoningGymTask) -> str:
    data = task.data
    entries = entries_of(data.dataset, data.arguments, data.seed, data.size)
    return str(entries[data.index]["question"])


def test_evals_ask_what_training_never_does() -> None:
    train, held_out = tasks(num_examples=400), tasks(num_examples=400, split="eval")
    asked = [{question(task) for task in split} for split in (train, held_out)]
    assert all(split_of(text) == "eval" for text in asked[1]) and not asked[0] & asked[1]
    # Two terms of one digit make 200 questions, which come again and again.
    assert 100 < len(asked[0] | asked[1]) <= 200
    for split in (train, held_out):
        assert len({task.data.id for task in split}) == len(split) == 400


def test_a_task_is_an_entry_of_the_package() -> None:
    one, other = tasks(num_examples=2, suffix=" Be brief.", seed=5)
    entries = entries_of(one.data.dataset, one.data.arguments, 5, one.data.size)
    assert one.data.prompt == question(one) + " Be brief."
    assert one.data.index != other.data.index
    assert score(one, entries[one.data.index]["answer"]) == 1.0


def test_shots_are_turns_of_the_prompt_whose_questions_are_not_asked() -> None:
    plain = tasks(num_examples=400)
    shown = [question(plain[0]), question(plain[1])]
    shots = [(asked, f"reply {index}") for index, asked in enumerate(shown)]
    train = tasks(num_examples=300, shots=shots, suffix=" Go.")
    held_out = tasks(num_examples=300, shots=shots, suffix=" Go.", split="eval")
    for task in train + held_out:
        *solved, asked = task.data.prompt
        assert [message.role for message in solved] == ["user", "assistant"] * 2
        assert [message.content for message in solved[::2]] == [text + " Go." for text in shown]
        assert [message.content for message in solved[1::2]] == ["reply 0", "reply 1"]
        assert asked.content == question(task) + " Go."
    asked_of = {question(task) for task in train}
    assert asked_of <= {question(task) for task in plain} - set(shown) and len(asked_of) > 100


def test_an_eval_question_is_no_shot() -> None:
    (held_out,) = tasks(num_examples=1, split="eval")
    with pytest.raises(ValueError, match="is an eval question; show another"):
        tasks(shots=[(question(held_out), "7")])


def test_what_verifiers_names_keeps_its_meaning() -> None:
    own, settings = vars(ReasoningGymTask), ReasoningGymConfig.model_fields
    assert not {name for name in own if not name.startswith("_")} & set(dir(vf.Task))
    known = {name for name in dir(vf.TasksetConfig) if not name.startswith("_")}
    assert not (settings.keys() - vf.TasksetConfig.model_fields.keys()) & known


def test_what_of_a_reply_counts() -> None:
    whole = tasks(num_examples=1)[0]
    number = tasks(num_examples=1, answer="last-number")[0]
    right = entries_of("chain_sum", whole.data.arguments, 0, whole.data.size)
    answer = right[whole.data.index]["answer"]
    result = f"7 and 8, so it is {answer}."
    assert score(number, result) == 1.0 > score(whole, result)
    assert score(number, result, truncated=True) == 0.0
    assert score(number, "I cannot tell.") < 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset": "no_such"}, "cannot make 'no_such'"),
        ({"arguments": {"min_terms": 3, "max_terms": 2}}, "cannot make 'chain_sum'"),
        ({"arguments": {"digits": 2}}, "cannot make 'chain_sum'"),
        ({"dataset": "game_of_life", "arguments": {}}, "needs cellpylib"),
    ],
)
def test_what_the_package_refuses(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks(**config)


def test_a_split_that_entries_avoid_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "TRIES_PER_EXAMPLE", 1)
    with pytest.raises(ValueError, match=r"has only \d+ entries for split 'eval'; lower"):
        tasks(num_examples=40, split="eval")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entries_of.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'ratchet-rl\[reasoning-gym\]'"):
        tasks()
    entries_of.cache_clear()
