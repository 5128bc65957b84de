"""Config errors say what, where and how to mend it, all at once."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.configs.load import ConfigError, dump_toml, load, parse, validate

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}
EXAMPLES = sorted(Path("configs/examples").glob("*.toml"))


def problems(**changes: Any) -> dict[str, str]:
    """Messages by JSON pointer for the minimal config with changes."""
    with pytest.raises(ConfigError) as error:
        validate({**MINIMAL, **changes})
    return {problem.pointer: problem.message for problem in error.value.problems}


def test_unknown_key_names_the_nearest_valid_one() -> None:
    found = problems(
        train={"env": [{"id": "x", "adress": "tcp://h:1"}], "batchsize": 8}, max_step=2
    )
    assert found == {
        "/train/env/0/adress": "unknown key; did you mean 'address'?",
        "/train/batchsize": "unknown key; did you mean 'batch_size'?",
        "/max_step": "unknown key; did you mean 'max_steps'?",
    }


def test_a_version_of_a_run_is_named_whole() -> None:
    model = validate({**MINIMAL, "model": {"name": "run:reverse-1a2b3c@40"}}).model
    assert model.lineage == {"source": "reverse-1a2b3c", "step": 40, "kind": "model"}
    assert validate({**MINIMAL, "model": {"name": "owner/model"}}).model.lineage is None
    for name in ("run:reverse", "run:reverse@", "run:reverse@-1", "run:Reverse@1", "run:a@1@2"):
        found = problems(model={"name": name})
        assert "looks like 'run:reverse-1a2b3c@40'" in found["/model/name"]


def test_far_off_key_lists_the_valid_ones() -> None:
    assert problems(checkpoint={"zzz": 1}) == {
        "/checkpoint/zzz": "unknown key; valid keys: interval, keep_last, keep_every"
    }


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"max_steps": 0}, "/max_steps", "greater than or equal to 1, got 0"),
        ({"name": "My Run"}, "/name", "lower-case"),
        ({"train": {"env": []}}, "/train/env", "at least 1 item"),
        ({"train": {}}, "/train/env", "is required and missing"),
        ({"train": {"env": [{"id": "a"}, {"id": "a"}]}}, "/train", "used twice"),
        ({"train": {"env": [{"id": "a"}], "batch_size": 9}}, "/train", "multiple of group_size"),
        ({"train": {"env": [{"id": "all"}]}}, "/train/env/0/name", "reserved"),
        (
            {"train": {"env": [{"id": "a", "address": "here:1"}]}},
            "/train/env/0/address",
            "tcp://host:port",
        ),
        ({"dispatch": {"max_inflight_rollouts": 4}}, "", "must hold the largest group"),
        ({"trainer": {"seq_len": 16}}, "", "leave room for a prompt"),
        ({"trainer": {"optim": {"lr": -1.0}}}, "/trainer/optim/lr", "greater than 0, got -1.0"),
        ({"train": {"env": [{"id": "a"}], "sampling": {"temperature": 0}}}, "", "temperature 0"),
        ({"retention": {"weights": 1}}, "/retention/weights", "at least 2, got 1"),
        ({"metadata": {"k" * 65: "v"}}, "/metadata", "at most 64"),
    ],
)
def test_each_mistake_is_named(changes: dict[str, Any], pointer: str, message: str) -> None:
    found = problems(**changes)
    assert list(found) == [pointer] and message in found[pointer]


def test_broken_toml_and_json_say_where() -> None:
    with pytest.raises(ConfigError, match=r"not valid toml.*line 2"):
        parse("a = 1\nb = ?")
    with pytest.raises(ConfigError, match=r"not valid json.*line 1 column 2"):
        parse("{a", media="json")


def test_overrides_reach_into_sections_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(validate(MINIMAL)))
    config = load(file, ["seed=7", "train.batch_size=16", "train.env.0.name=words", "name=b-1"])
    assert (config.seed, config.train.batch_size, config.name) == (7, 16, "b-1")
    assert config.train.env[0].name == "words"
    for wrong, message in [
        ("seed", "key=value"),
        ("train.env.3.name=x", "train.env.3.name"),
        ("seed.x=1", "seed.x"),
        ("sed=1", "did you mean 'seed'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(file, [wrong])
    with pytest.raises(ConfigError, match="no such config file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_examples_are_valid_and_survive_a_dump(path: Path) -> None:
    config = load(path)
    assert validate(parse(dump_toml(config))) == config
