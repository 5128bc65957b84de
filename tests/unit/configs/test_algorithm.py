"""What configs of algorithms refuse, inherit and default to."""

from pathlib import Path
from typing import Any

import pytest

from configs.algorithm import GrpoConfig, MaxRlConfig
from configs.load import ConfigError, dump_toml, load, parse, validate
from configs.run import RunConfig

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}


def refused(**changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        validate({**MINIMAL, **changes})
    return {problem.pointer: problem.message for problem in error.value.problems}


@pytest.mark.parametrize(
    ("algo", "pointer", "message"),
    [
        ({"type": "opd"}, "/algo/type", "'grpo', 'max_rl', 'reward', 'custom'"),
        ({"type": "max-rl"}, "/algo/type", "did you mean 'max_rl'?"),
        ({"type": 3}, "/algo/type", "there is no algorithm 3"),
        ({}, "/algo/type", "is required; one of 'grpo'"),
        ({"type": "max_rl", "coef": 1}, "/algo/coef", "no option of algorithm 'max_rl'"),
        ({"type": "grpo", "coef": 1}, "/algo/coef", "length_penalty, length_weighted_baseline"),
        (
            {"type": "grpo", "length_penalty": {"type": "linear", "coef": -1.0}},
            "/algo/length_penalty/coef",
            "greater than 0, got -1.0",
        ),
        (
            {"type": "grpo", "length_penalty": {"type": "tokenz"}},
            "/algo/length_penalty/type",
            "did you mean 'tokens'?",
        ),
        (
            {"type": "grpo", "length_penalty": {"type": "turns", "coef": 1}},
            "/algo/length_penalty/coef",
            "its options: none",
        ),
        (
            {"type": "grpo", "length_penalty": {"type": "turns"}, "length_weighted_baseline": True},
            "/algo",
            "drop one of them, or use length_penalty 'linear'",
        ),
        (
            {
                "type": "grpo",
                "length_penalty": {"type": "tokens", "output_weight": 0, "tool_weight": 0},
            },
            "/algo/length_penalty",
            "leave length_penalty out",
        ),
        ({"type": "custom"}, "/algo/function", "is required"),
        ({"type": "custom", "function": "credit"}, "/algo/function", "'module:function'"),
        ("grpo", "/algo", "valid dictionary"),
    ],
)
def test_configs_that_are_refused(algo: Any, pointer: str, message: str) -> None:
    found = refused(algo=algo)
    assert list(found) == [pointer] and message in found[pointer]


def test_groups_of_one_need_an_algorithm_that_does_not_compare() -> None:
    envs = [{"id": "reverse-text", "group_size": 1}]
    message = refused(train={"env": envs})[""]
    assert "'grpo' compares" in message and "set group_size to 2 or more" in message
    algo = {"type": "reward"}
    config = validate({**MINIMAL, "train": {"env": [{**envs[0], "algo": algo}]}})
    assert config.train.size_of(config.train.env[0]) == 1


def test_an_env_replaces_the_algorithm_of_its_run(tmp_path: Path) -> None:
    text = """
    max_steps = 1
    [algo]
    type = "max_rl"
    [[train.env]]
    id = "reverse-text"
    [[train.env]]
    id = "reverse-retry"
    [train.env.algo]
    type = "grpo"
    length_penalty = { type = "linear", gate_by_correctness = true }
    """
    config = validate(parse(text))
    assert config.algorithm("reverse-text") == MaxRlConfig()
    own = config.algorithm("reverse-retry")
    assert isinstance(own, GrpoConfig) and own.length_penalty is not None
    assert own.length_penalty.type == "linear"
    file = tmp_path / "resolved.toml"
    file.write_text(dump_toml(config))
    assert load(file) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_defaults_and_the_example() -> None:
    assert validate(MINIMAL).algorithm("reverse-text") == GrpoConfig()
    assert load("configs/max_rl.toml").algo == MaxRlConfig()
    schema = RunConfig.model_json_schema()
    tags = schema["properties"]["algo"]["discriminator"]["mapping"]
    assert sorted(tags) == ["custom", "grpo", "max_rl", "reward"]
