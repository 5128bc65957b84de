"""JSON pointers (RFC 6901): each mistake's lead to its place, whatever the keys are called."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.api.http.allowlist import refused
from ratchet.api.routes._common import read_as
from ratchet.api.schemas.bodies import ForkBody
from ratchet.api.schemas.problems import ApiProblem
from ratchet.configs.live import changed
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.pointers import key_of, parts_of, pointer, value_at

ODD = "X/~1.y"
CONFIG: dict[str, Any] = {
    "max_steps": 2,
    "train": {"batch_size": 8, "group_size": 8, "env": [{"id": "reverse-text", "name": "a.b"}]},
}


@given(st.lists(st.text()))
def test_parts_survive(parts: list[str]) -> None:
    assert parts_of(pointer(*parts)) == parts


def test_pointers_are_those_of_the_rfc() -> None:
    assert pointer("foo", 0, "a/b", "m~n", "") == "/foo/0/a~1b/m~0n/"
    assert key_of("/foo/0/a~1b/m~0n") == "foo.0.a/b.m~n"
    document = {"foo": [{"a/b": {"m~n": {"": 7}}}]}
    assert value_at(document, "/foo/0/a~1b/m~0n/") == 7
    assert value_at(document, "/foo/1") is None and value_at(document, "/foo/x") is None


def test_a_header_that_may_not_be_sent_is_pointed_at() -> None:
    config = {**CONFIG, "train": {**CONFIG["train"]}}
    config["train"]["env"] = [{"id": "reverse-text", "args": {"headers_from_env": {ODD: "HOME"}}}]
    (error,) = refused(validate(config), (), (), ())
    assert value_at(config, error.pointer) == "HOME"


@pytest.mark.parametrize("env", [{"a.b": {"seed": 1}}, {"c.d": {"ratio": 2}}])
def test_a_change_of_a_dotted_env_is_pointed_at(env: dict[str, Any]) -> None:
    (name,) = env
    with pytest.raises(ConfigError) as caught:
        changed(CONFIG, {}, {"train": {"env": env}})
    (problem,) = caught.value.problems
    assert parts_of(problem.pointer)[:3] == ["train", "env", name]


def test_a_field_of_a_body_is_pointed_at() -> None:
    with pytest.raises(ApiProblem) as caught:
        read_as(ForkBody, {"metadata": {ODD: 5}})
    (error,) = caught.value.document.errors or []
    assert parts_of(error.pointer) == ["metadata", ODD]
