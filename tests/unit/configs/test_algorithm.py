"""What configs of algorithms refuse, inherit and default to."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ratchet.configs.algorithm import (
    AlgorithmConfig,
    EchoConfig,
    EchoRoleConfig,
    GrpoConfig,
    MaxRlConfig,
    RaeConfig,
    scores_at_once,
    source_of,
    teacher_of,
)
from ratchet.configs.load import ConfigError, dump_toml, load, parse, validate
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}
FROZEN = {"name": "big", "base_url": "http://teacher:8000"}


def refused(**changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        validate({**MINIMAL, **changes})
    return {problem.pointer: problem.message for problem in error.value.problems}


@pytest.mark.parametrize(
    ("algo", "pointer", "message"),
    [
        ({"type": "ppo"}, "/algo/type", "'grpo', 'max_rl', 'hierarchical_grpo', 'reward', 'rae'"),
        ({"type": "opd"}, "/algo/teacher", "needs a frozen teacher: a table with its name"),
        ({"type": "opd", "teacher": "policy"}, "/algo/teacher", "algo.type 'opsd' shows it"),
        ({"type": "opd", "teacher": {"name": "m"}}, "/algo/teacher/base_url", "is required"),
        ({"type": "opsd", "teacher": "self"}, "/algo/teacher", "must be 'policy', or a table"),
        ({"type": "opsd", "demo_key": ""}, "/algo/demo_key", "at least 1 character"),
        ({"type": "sft"}, "/algo/source", "needs a frozen source: a table with the name"),
        ({"type": "sft", "source": "policy"}, "/algo/source", "set algo.type to 'grpo'"),
        ({"type": "grpo", "source": FROZEN}, "/algo/source", "or set algo.type to 'sft'"),
        ({"type": "opd", "teacher": FROZEN, "source": FROZEN}, "/algo/source", "policy itself"),
        ({"type": "rae", "teacher": FROZEN}, "/algo/teacher", "set algo.type to 'opd' or 'opsd'"),
        ({"type": "rae", "decay": 1.0}, "/algo/decay", "less than 1"),
        ({"type": "echo", "roles": {}}, "/algo/roles", "at least 1 item"),
        ({"type": "echo", "roles": {"tool": {"alpha": 0}}}, "/algo/roles/tool/alpha", "than 0"),
        ({"type": "echo", "roles": {"me": {"alpha": 1}}}, "/algo/roles/me", "'user' or 'tool'"),
        (
            {"type": "hierarchical_grpo", "episode_agents": [""]},
            "/algo/episode_agents/0",
            "least 1",
        ),
        ({"type": "max-rl"}, "/algo/type", "did you mean 'max_rl'?"),
        ({"type": 3}, "/algo/type", "there is no algorithm 3"),
        ({"type": []}, "/algo/type", "there is no algorithm []"),
        ({}, "/algo/type", "is required; one of 'grpo'"),
        ({"type": "max_rl", "coef": 1}, "/algo/coef", "not an option of algorithm 'max_rl'"),
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
            "remove one of them, or use length_penalty 'linear'",
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
    assert len(found) == 1
    ((where, said),) = found.items()
    assert where.removesuffix("/[key]") == pointer and message in said


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
    assert load("configs/examples/max_rl.toml").algo == MaxRlConfig()
    schema = RunConfig.model_json_schema()
    tags = schema["properties"]["algo"]["discriminator"]["mapping"]
    assert sorted(tags) == [
        "custom", "echo", "grpo", "hierarchical_grpo", "max_rl", "opd", "opsd", "rae", "reward",
        "sft",
    ]  # fmt: skip


def test_defaults_of_algorithms_with_other_models_and_of_echo() -> None:
    def algo(**section: Any) -> AlgorithmConfig:
        return validate({**MINIMAL, "algo": section}).algo

    opsd, opd = algo(type="opsd"), algo(type="opd", teacher=FROZEN)
    assert teacher_of(opsd) == "policy" and source_of(opsd) == "policy"
    frozen = teacher_of(opd)
    assert isinstance(frozen, FrozenModelConfig) and frozen.name == "big"
    assert source_of(algo(type="sft", source=FROZEN)) == frozen
    assert teacher_of(algo(type="sft", source=FROZEN)) is None
    echo = algo(type="echo")
    assert isinstance(echo, EchoConfig) and echo.roles == {"tool": EchoRoleConfig(alpha=0.1)}
    echo = algo(type="echo", roles={"user": {"alpha": 0.5}})
    assert isinstance(echo, EchoConfig) and list(echo.roles) == ["user"]
    rae = algo(type="rae")
    assert isinstance(rae, RaeConfig) and rae.decay == 0.95


@pytest.mark.parametrize(
    ("algo", "alone"),
    [
        ({"type": "echo"}, False),
        ({"type": "hierarchical_grpo"}, False),
        ({"type": "hierarchical_grpo", "episode_agents": ["solver"]}, True),
        ({"type": "rae"}, True),
        ({"type": "opsd"}, True),
        ({"type": "opd", "teacher": FROZEN}, True),
        ({"type": "sft", "source": FROZEN}, True),
    ],
)
def test_which_algorithms_do_with_groups_of_one(algo: dict[str, Any], alone: bool) -> None:
    train = {"env": [{"id": "reverse-text", "group_size": 1, "algo": algo}]}
    if alone:
        assert not validate({**MINIMAL, "train": train}).algorithm("reverse-text").group_relative
    else:
        assert "compares the rollouts of a group" in refused(train=train)[""]


@pytest.mark.parametrize(
    ("opsd", "context"),
    [
        ({}, 2048 + 256),
        ({"demo_tokens": 40}, 2048 + 40),
        ({"teacher": FROZEN, "demo_tokens": 40}, 2048),
    ],
)
def test_engines_have_room_for_what_the_policy_is_shown(opsd: dict[str, Any], context: int) -> None:
    """Only where the policy is its own teacher."""
    train = {"env": [{"id": "a"}, {"id": "b", "algo": {"type": "opsd", **opsd}}]}
    assert validate({**MINIMAL, "train": train}).context == context


def test_echo_refuses_a_renderer_that_attributes_nothing() -> None:
    echo = {"type": "echo"}
    message = refused(algo=echo, model={"renderer": "default"})[""]
    assert "env 'reverse-text'" in message and "set model.renderer" in message
    assert validate({**MINIMAL, "algo": echo, "model": {"renderer": "qwen3"}}).algo.type == "echo"
    assert validate({**MINIMAL, "model": {"renderer": "default"}}).algo.type == "grpo"


def test_only_a_frozen_model_may_play_greedily() -> None:
    train = {"env": [{"id": "a"}], "sampling": {"temperature": 0}}
    assert validate({**MINIMAL, "train": train, "algo": {"type": "sft", "source": FROZEN}})
    for algo in ({"type": "opd", "teacher": FROZEN}, {"type": "grpo"}):
        assert "temperature 0" in refused(train=train, algo=algo)[""]


@pytest.mark.parametrize(
    ("algo", "at_once"),
    [
        ({"type": "grpo"}, True),
        ({"type": "max_rl"}, True),
        ({"type": "hierarchical_grpo"}, True),
        ({"type": "reward"}, True),
        ({"type": "echo"}, True),
        ({"type": "sft", "source": FROZEN}, True),
        ({"type": "rae"}, False),
        ({"type": "opd", "teacher": FROZEN}, False),
        ({"type": "opsd"}, False),
        ({"type": "custom", "function": "credit:mine"}, False),
    ],
)
def test_what_asks_nobody_scores_at_once(algo: dict[str, Any], at_once: bool) -> None:
    made: AlgorithmConfig = TypeAdapter(AlgorithmConfig).validate_python(algo)
    assert scores_at_once(made) is at_once
