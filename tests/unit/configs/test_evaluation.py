"""Evaluations made of a config: what is kept of it, and what is refused."""

from typing import Any

import pytest

from ratchet.configs.evaluation import evaluations, model_named
from ratchet.configs.load import ConfigError, validate

CONFIG: dict[str, Any] = {
    "name": "reverse",
    "max_steps": 40,
    "model": {"name": "owner/model", "revision": "v1", "renderer": "default"},
    "algo": {"type": "reward"},
    "train": {"batch_size": 64, "env": [{"id": "reverse-text"}, {"id": "chain-sum"}]},
    "eval": {
        "num_examples": 200,
        "group_size": 4,
        "env": [{"id": "reverse-text"}, {"id": "guess", "name": "guess-hard"}],
    },
    "trainer": {
        "seq_len": 1536,
        "lora": {"rank": 8},
        "scheduler": {"type": "linear", "warmup_steps": 10},
    },
}


def refused(*arguments: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        evaluations(*arguments)
    return {problem.key: problem.message for problem in error.value.problems}


def test_of_a_config_what_evaluates_is_kept() -> None:
    (plain,) = evaluations(CONFIG)
    made = validate(plain)
    assert (made.trains, made.max_steps, made.last_step) == (False, 0, 0)
    assert made.envs == ["reverse-text", "guess-hard"]
    assert (made.eval_num_examples("reverse-text"), made.eval_group_size("guess-hard")) == (200, 4)
    assert (made.model.name, made.model.revision) == ("owner/model", "v1")
    assert (made.trainer.seq_len, made.permits) == (1536, 64)
    assert made.trainer.lora is None, "there is nothing to train it for"
    assert CONFIG["max_steps"] == 40 and len(CONFIG["train"]["env"]) == 2, "it is untouched"


def test_a_config_needs_no_training_to_be_evaluated() -> None:
    (plain,) = evaluations({"eval": {"env": [{"id": "reverse-text"}]}})
    assert validate(plain).envs == ["reverse-text"]


def test_each_model_has_a_config_of_its_own() -> None:
    models = ["owner/model", "reverse-1a2b3c@40", "/data/model@2"]
    made = [validate(plain) for plain in evaluations(CONFIG, models, ["guess-hard"])]
    assert [config.model.name for config in made] == [
        "owner/model",
        "run:reverse-1a2b3c@40",
        "/data/model@2",
    ]
    assert [config.model.revision for config in made] == ["v1", None, None]
    assert {config.model.renderer for config in made} == {"default"}
    assert all(config.envs == ["guess-hard"] for config in made)


def test_a_version_is_named_in_short() -> None:
    assert model_named("reverse-1a2b3c@40") == model_named("run:reverse-1a2b3c@40")
    for name in ("owner/model@40", "reverse@", "Reverse@1", "reverse"):
        assert model_named(name) == name


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    twice = refused(CONFIG, ["reverse-1a2b3c@4", "x", "run:reverse-1a2b3c@4"])
    assert "'run:reverse-1a2b3c@4' is named twice" in twice["model"]
    unknown = refused(CONFIG, [], ["guess"])["env"]
    assert unknown == "'guess' is not an env of the config; its eval envs: reverse-text, guess-hard"
    trained = refused(CONFIG, [], ["chain-sum"])["env"]
    assert trained.startswith("'chain-sum' has no [[eval.env]] of its own")
    nothing = {"train": {"env": [{"id": "reverse-text"}]}}
    assert "at least one [[eval.env]]" in refused(nothing, [], ["reverse-text"])["eval.env"]
    assert "a table of sections" in refused([])["(config)"]


def test_what_is_no_table_is_named_by_the_validation() -> None:
    for section in ("train", "trainer", "model"):
        (plain,) = evaluations({**CONFIG, section: 5}, ["other"])
        with pytest.raises(ConfigError) as error:
            validate(plain)
        assert f"/{section}" in [problem.pointer for problem in error.value.problems]


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"max_steps": 0}, "/max_steps", "run `ratchet eval` with it"),
        ({"train": {"env": []}}, "/train/env", "max_steps = 0, as `ratchet eval` sets it"),
        ({"max_steps": None, "train": {"env": []}}, "/train/env", "max_steps = 0"),
        (
            {"max_steps": 0, "train": {"env": []}, "eval": {}},
            "/eval/env",
            "at least one [[eval.env]]",
        ),
    ],
)
def test_a_run_trains_or_evaluates(changes: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate({**CONFIG, **changes})
    (problem,) = error.value.problems
    assert problem.pointer == pointer and message in problem.message
