"""Frozen models in configs: what is normalised, what is refused, and that no key is repeated."""

from typing import Any

import pytest

from ratchet.configs.load import ConfigError, validate
from ratchet.configs.reference import FrozenModelConfig

SECRET = "sk-very-secret-1234567890"


def _data(teacher: Any) -> dict[str, Any]:
    algo = {"type": "opd", "teacher": teacher}
    return {"max_steps": 1, "algo": algo, "train": {"env": [{"id": "reverse-text"}]}}


def _table(**changes: Any) -> dict[str, Any]:
    return {"name": "big", "base_url": "http://host:8000", **changes}


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses_are_normal(url: str) -> None:
    model = FrozenModelConfig(name="big", base_url=url)
    assert (model.base_url, model.root) == ("http://h:1/v1", "http://h:1")
    assert FrozenModelConfig.model_validate(model.model_dump(mode="json")) == model


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"api_key": SECRET}, "api_key", "name that in api_key_var"),
        ({"token": SECRET}, "token", "name that in api_key_var"),
        ({"api_key_var": SECRET}, "api_key_var", "name of an environment variable"),
        ({"api_key_var": SECRET.replace("-", "_")}, "api_key_var", "capitals"),
        ({"base_url": f"http://user:{SECRET}@host"}, "base_url", "name that in api_key_var"),
        ({"base_url": f"http://host/v1?key={SECRET}"}, "base_url", "name that in api_key_var"),
        ({"base_url": f"host/{SECRET}"}, "base_url", "http(s)://host:port"),
        ({"base_url": "http://host:99999"}, "base_url", "http(s)://host:port"),
        ({"max_concurent": 3}, "max_concurent", "did you mean 'max_concurrent'?"),
        ({"more_urls": [f"http://u:{SECRET}@h"]}, "more_urls", "name that in api_key_var"),
        ({"more_urls": SECRET}, "more_urls", "must be a list"),
        ({"headers_from_env": {"X-Key": SECRET}}, "headers_from_env", "the variable in capitals"),
        ({"headers_from_env": {"X Key": "A_KEY"}}, "headers_from_env", '"X-Name" = "VARIABLE"'),
        ({"headers_from_env": [SECRET]}, "headers_from_env", "must have the form"),
        (
            {"headers_from_env": {"authorization": "A"}},
            "headers_from_env",
            "api_key_var names",
        ),
    ],
)
def test_what_may_hold_a_key_is_refused_unseen(
    changes: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(_data(_table(**changes)))
    (problem,) = caught.value.problems
    assert problem.key == f"algo.teacher.{key}"
    assert words in problem.message
    assert SECRET not in repr(problem)
    assert SECRET.replace("-", "_") not in repr(problem)


def test_urls_differ() -> None:
    with pytest.raises(ConfigError, match="contain one URL twice"):
        validate(_data(_table(more_urls=["http://host:8000/v1/"])))
    model = FrozenModelConfig.model_validate(_table(more_urls=["http://b:1", "http://c/v1/"]))
    assert model.base_urls == ["http://host:8000/v1", "http://b:1/v1", "http://c/v1"]
    assert (model.timeout_s, model.connect_timeout_s, model.max_retries) == (1200, 30, 3)


def test_who_plays_an_env() -> None:
    data = _data(_table())
    data["train"]["env"].append(
        {"id": "reverse-retry", "algo": {"type": "sft", "source": _table(name="other")}}
    )
    data["eval"] = {"env": [{"id": "reverse-retry"}]}
    config = validate(data)
    assert not config.is_frozen("reverse-text"), "a teacher only scores"
    assert config.is_frozen("reverse-retry")
    sampler = config.sampler("reverse-retry", "train")
    assert sampler is not None and sampler.name == "other"
    assert config.sampler("reverse-retry", "eval") is None, "evals are the policy's"
