"""Config errors say what, where and how to fix it, all at once."""

import contextlib
import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ratchet.activities.contracts.names import SHIPPED_ENVS
from ratchet.configs.load import ConfigError, dump_toml, load, parse, validate
from ratchet.configs.run import RunConfig

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}
EXAMPLES = sorted(Path("configs/examples").glob("*.toml"))
RECIPES = sorted(Path("configs/recipes").glob("*.toml"))


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
        assert "write 'run:reverse-1a2b3c@40'" in found["/model/name"]


def test_far_off_key_lists_the_valid_ones() -> None:
    assert problems(checkpoint={"zzz": 1}) == {
        "/checkpoint/zzz": "unknown key; valid keys: interval, keep_last, keep_every"
    }


def test_servers_of_an_env_are_bounded_and_none_is_started_beside_an_address() -> None:
    there = {"id": "a", "address": "tcp://there:5000"}
    found = problems(train={"env": [{**there, "workers": 2}]})
    (message,) = found.values()
    assert "remove `workers` or `address`" in message
    validate({**MINIMAL, "train": {"env": [{**there, "workers": 1}]}})
    many = [{"id": f"e{k}", "workers": 64} for k in range(5)]
    validate({**MINIMAL, "train": {"env": many[:4]}})
    (message,) = problems(train={"env": many}).values()
    assert "315 servers besides the first of each" in message and "may have 256" in message
    assert problems(train={"env": [{"id": "a", "workers": 65}]}) == {
        "/train/env/0/workers": "Input should be less than or equal to 64, or input should be "
        "'auto', got 65"
    }
    found = problems(dispatch={"max_inflight_rollouts": ["many"]})
    assert found.keys() == {"/dispatch/max_inflight_rollouts"}
    assert problems(trainer={"optim": {"betas": [0.9]}}) == {
        "/trainer/optim/betas/1": "is required and missing"
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[train.env]\nid = "a"', r"train.env: must be a list of tables; .* \[\[train.env\]\]"),
        ("[[train]]\nenv = []", r"train: is one table, not a list; .* \[train\]"),
        ('batch_sise = 3\n[[train.env]]\nid = "a"', "batch_sise: .* 'train.batch_size'"),
        ('max_norn = 3\n[[train.env]]\nid = "a"', "max_norn: .* 'trainer.optim.max_norm'"),
        ('[[train.env]]\nid = "a"\nratios = 1', r"train.env.0.ratios: .* did you mean 'ratio'"),
        ("[train\n", r"not valid toml: .*line 2.*, in the line of '\[train'"),
        ("max_steps = 4", r"Cannot overwrite .*line 2.*, in the line of 'max_steps'"),
        ('a = [\n"hunter2" "x"]', r"not valid toml: .*line 3, column \d+\)$"),
    ],
)
def test_mistakes_in_a_file_name_file_key_and_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"max_steps = 3\n{text}\n")
    with pytest.raises(ConfigError, match=message) as refused:
        load(file)
    assert refused.value.source == str(file)
    assert all(line.startswith(f"{file}: ") for line in str(refused.value).splitlines())


def test_none_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(validate(MINIMAL)))
    assert load(file).trainer.optim.max_norm == 1.0
    for none in ("none", " none", '"<none>"'):
        assert load(file, [f"trainer.optim.max_norm={none}"]).trainer.optim.max_norm is None
    assert load(file, ['name="none"']).name == "none", "in quotes it is a text"
    assert parse('a = ["<none>", {b = "<none>"}]\nc = "\\\\<none>"') == {
        "a": [None, {"b": None}],
        "c": "<none>",
    }
    assert parse('{"a": null, "b": "<none>"}', media="json") == {"a": None, "b": "<none>"}


PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.sampled_from(["", "none", "<none>", "\\<none>", "a.b", "x\ny"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def optional_keys(section: type[BaseModel], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All keys of a config that may be none, those of every kind of a section included."""
    found: list[tuple[str, ...]] = []
    for name, field in section.model_fields.items():
        hints = [field.annotation]
        while any(not isinstance(hint, type) or get_args(hint) for hint in hints):
            hints = [part for hint in hints for part in (get_args(hint) or [hint])]
            hints = [hint for hint in hints if isinstance(hint, type) or get_args(hint)]
        if type(None) in hints:
            found.append((*above, name))
        for hint in hints:
            if issubclass(hint, BaseModel):
                found += optional_keys(hint, (*above, name))
    return found


FROZEN = {"name": "m", "base_url": "http://127.0.0.1:1/v1"}
FUNCTION = {"type": "custom", "function": "m:f", "kwargs": {"none": None, "text": "<none>"}}
KINDS: dict[tuple[str, ...], list[dict[str, Any]]] = {
    ("algo",): [
        *({"type": kind} for kind in ("grpo", "max_rl", "hierarchical_grpo", "reward", "rae")),
        *(
            {"type": "grpo", "length_penalty": {"type": kind}}
            for kind in ("tokens", "turns", "linear", "group_max")
        ),
        {"type": "opd", "teacher": FROZEN},
        {"type": "opsd"},
        {"type": "sft", "source": FROZEN},
        {**FUNCTION, "needs_task": True},
    ],
    ("trainer", "optim"): [{"type": kind} for kind in ("adamw", "sgd", "muon", "signsgd")],
    ("trainer", "scheduler"): [{"type": kind} for kind in ("constant", "linear", "cosine")],
    ("trainer", "loss"): [{"type": "default"}, {"type": "ipo"}, FUNCTION],
    ("filters",): [{"pre_batch": [{"type": "reward", "min": 0.5}], "post_batch": []}],
}
"""Sections that have kinds, which the examples do not all show."""


@settings(max_examples=200, deadline=None)
@given(data=st.data(), args=st.dictionaries(st.sampled_from(["k", "none", "x y"]), PLAIN))
def test_every_config_survives_a_dump(data: st.DataObject, args: dict[str, Any]) -> None:
    """`load(dump(config)) == config`, whatever its sections are and whichever keys are none."""
    path = data.draw(st.sampled_from(EXAMPLES))
    plain: dict[str, Any] = load(path).model_dump(mode="json")
    plain["train"]["env"][0]["args"] = args
    for (*above, last), kinds in KINDS.items():
        changed = copy.deepcopy(plain)
        section = changed
        for part in above:
            section = section[part]
        section[last] = data.draw(st.sampled_from([section[last], *kinds]))
        with contextlib.suppress(ConfigError):
            plain = validate(changed).model_dump(mode="json")
    plain["metadata"] = {"owner": data.draw(st.sampled_from(["none", "<none>", "\\\\<none>"]))}
    for key in data.draw(st.sets(st.sampled_from(sorted(optional_keys(RunConfig))))):
        changed = copy.deepcopy(plain)
        places: list[Any] = [changed]
        for part in key[:-1]:
            below = [place.get(part) for place in places if isinstance(place, dict)]
            places = [p for found in below for p in (found if isinstance(found, list) else [found])]
        for place in places:
            if isinstance(place, dict) and key[-1] in place:
                place[key[-1]] = None
        with contextlib.suppress(ConfigError):
            validate(changed)
            plain = changed
    config = validate(plain)
    assert validate(parse(dump_toml(config))) == config


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_examples_are_valid_and_survive_a_dump(path: Path) -> None:
    config = load(path)
    assert validate(parse(dump_toml(config))) == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_that_it_was_not_run_until_it_was(path: Path) -> None:
    config = load(path)
    assert re.fullmatch(r"Qwen/Qwen3-[\d.]+B", config.model.name)
    assert {env.id for env in (*config.train.env, *config.eval.env)} <= set(SHIPPED_ENVS)
    assert config.trainer.compute_dtype == config.inference.dtype == "bfloat16"
    row = next(
        line for line in Path("docs/hardware.md").read_text().splitlines() if path.name in line
    )
    assert f"configs/recipes/{path.name}" in row and "not run" in row
