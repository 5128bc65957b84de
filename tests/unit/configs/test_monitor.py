"""Heartbeats in configs: a URL, or the variable that holds one, and no secret in an error."""

from typing import Any

import pytest

from ratchet.configs.load import ConfigError, dump_toml, parse, validate

SECRET = "sk-very-secret-1234567890"
URL = "https://hc.example.org:8443/ping/1"


def _data(url: Any) -> dict[str, Any]:
    return {
        "max_steps": 1,
        "train": {"env": [{"id": "a"}]},
        "monitor": {"heartbeat_url": url},
    }


@pytest.mark.parametrize(
    ("given", "url", "variable"),
    [(URL, URL, ""), ({"env_var": "PING_URL"}, "", "PING_URL"), (None, "", "")],
)
def test_what_is_pinged(given: Any, url: str, variable: str) -> None:
    config = validate(_data(given))
    assert (config.monitor.url, config.monitor.url_var) == (url, variable)
    assert validate(parse(dump_toml(config))) == config


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"https://user:{SECRET}@h/", "must have no user, query or fragment"),
        (f"https://h/?key={SECRET}", "must have no user, query or fragment"),
        (f"h/{SECRET}", "http(s)://host/path"),
        (f"ftp://h/{SECRET}", "http(s)://host/path"),
        (f"http://h/ {SECRET}", "http(s)://host/path"),
        ("http://h:99999", "http(s)://host/path"),
        (7, "http(s)://host/path"),
        ({"env_var": SECRET}, "the name in capitals"),
        ({"url": SECRET}, "the name in capitals"),
    ],
)
def test_what_cannot_be_pinged_is_refused_unseen(url: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(_data(url))
    (problem,) = caught.value.problems
    assert problem.key == "monitor.heartbeat_url" and words in problem.message
    assert SECRET not in repr(problem)
