"""What configs of curricula refuse, and what they default to."""

from typing import Any

import pytest

from ratchet.configs.curriculum import (
    AdvantageRangeConfig,
    CurriculumConfig,
    DifficultyPoolConfig,
    StandardSamplerConfig,
)
from ratchet.configs.load import ConfigError, dump_toml, parse, validate
from ratchet.configs.run import RunConfig

PLACE = "/train/env/0/curriculum"


def config(curriculum: dict[str, Any]) -> RunConfig:
    env = {"id": "reverse-text", "curriculum": curriculum}
    return validate({"max_steps": 3, "train": {"env": [env]}})


def sampler(**options: Any) -> dict[str, Any]:
    return {"sampler": {"type": "difficulty_pool", **options}}


def gate(**options: Any) -> dict[str, Any]:
    return {"gates": [{"type": "advantage_range", **options}]}


@pytest.mark.parametrize(
    ("curriculum", "pointer", "message"),
    [
        ({"sampler": {"type": "difficulty_pools"}}, "/sampler/type", "mean 'difficulty_pool'?"),
        ({"sampler": {}}, "/sampler/type", "is required; one of 'standard', 'difficulty_pool'"),
        ({"sampler": {"type": "standard", "seed": 1}}, "/sampler/seed", "its options: none"),
        (sampler(hard_below=0.75), "/sampler", "must increase in this order"),
        (sampler(easy_below=0.5), "/sampler", "easy_below (0.5) must increase"),
        (sampler(hard_below=float("nan")), "/sampler/hard_below", "finite number"),
        (sampler(easy_weight=-1), "/sampler/easy_weight", "greater than or equal to 0, got -1"),
        (sampler(unseen_weight=0), "/sampler", "set a weight, however small"),
        (
            sampler(hard_weight=0, normal_weight=0, easy_weight=0, unseen_weight=0),
            "/sampler",
            "or use sampler 'standard'",
        ),
        (gate(reject_min=0.5, reject_max=0.25), "/gates/0", "swap them, or remove the gate"),
        (gate(reject_min=0.1), "/gates/0", "is above reject_max (0.0)"),
        (gate(reject_max=float("inf")), "/gates/0/reject_max", "finite number"),
        (gate(low=0.1), "/gates/0/low", "its options: reject_min, reject_max"),
        ({"gates": [{"type": "reward"}]}, "/gates/0/type", "there is 'advantage_range'"),
        ({"gate": []}, "/gate", "did you mean 'gates'?"),
    ],
)
def test_refused_with_place_and_remedy(
    curriculum: dict[str, Any], pointer: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(curriculum)
    (problem,) = error.value.problems
    assert problem.pointer == PLACE + pointer
    assert message in problem.message


def test_defaults() -> None:
    plain = validate({"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}})
    assert plain.train.env[0].curriculum == CurriculumConfig(
        sampler=StandardSamplerConfig(), gates=[]
    )
    given = config(sampler() | gate()).train.env[0].curriculum
    assert given.sampler == DifficultyPoolConfig(
        hard_below=0.25,
        normal_below=0.75,
        easy_below=1.0,
        hard_weight=0.2,
        normal_weight=1.0,
        easy_weight=0.2,
        unseen_weight=1.0,
    )
    assert given.gates == [AdvantageRangeConfig(reject_min=0.0, reject_max=0.0)]


def test_survives_a_round_trip_through_toml() -> None:
    text = """
        max_steps = 3
        [[train.env]]
        id = "reverse-text"
        [train.env.curriculum]
        sampler = { type = "difficulty_pool", easy_weight = 0.0 }
        [[train.env.curriculum.gates]]
        type = "advantage_range"
        reject_min = -0.1
    """
    resolved = validate(parse(text))
    assert validate(parse(dump_toml(resolved))) == resolved
    curriculum = resolved.train.env[0].curriculum
    assert curriculum.sampler == DifficultyPoolConfig(easy_weight=0.0)
    assert curriculum.gates == [AdvantageRangeConfig(reject_min=-0.1)]
