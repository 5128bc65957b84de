"""What the args of an environment plug in or send, at any depth. Pure.

Only the environment itself can check its args. This module recognizes what verifiers allows in the
args of any environment (judges, functions, endpoints, files) and values that look like secrets: a
config is stored, shown and sent, so that a secret in it reaches everyone who may read. The config
holds `{ env_var = "NAME" }` instead, which the environment's processes replace by the variable of
their worker (`ratchet.activities.envs.loading`).
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ratchet.configs.variables import variable_of

Place = tuple[str | int, ...]
Kind = Literal["host", "variable", "function", "file", "judge", "mistake"]

JUDGES = ("decision", "reference", "rubric")
"""Judges that verifiers ships."""
_OF_ALL = (
    *("id", "name", "weight", "model", "sampling", "prompt", "timeout"),
    *("base_url", "api_key_var", "headers", "headers_from_env"),
)
_OF_ONE = {
    "decision": ("levels", "question_field", "answer_field", "view"),
    "reference": ("answer_field", "question_field", "view", "choices"),
    "rubric": (
        *("path", "weights", "question_field", "answer_field", "view"),
        *("max_criteria", "structured_output"),
    ),
}
"""Keys of a judge's config, in verifiers 0.4."""

_SECRET = re.compile(
    r"(?:^|_)(?:api_?key|(?:access|account|auth|client|encryption|license|private|secret|shared"
    r"|signing|storage|subscription)_?key|secret|passwd|password|passphrase|pwd|credential"
    r"|authorization|bearer|cookie|token|pat)s?$"
)
_TOKENS_OF_TEXT = re.compile(
    r"(?:^|_)(?:bos|cls|eos|mask|pad|sep|unk|stop|start|begin|end|image|audio|video|special|think"
    r"|thinking|tool|tool_call|prefix|suffix|middle|answer|separator|delimiter|boundary|first|last"
    r"|next|extra|per|max|min|num)_tokens?$"
)


class Use(NamedTuple):
    """What an argument does. `message` says what is wrong with a mistake."""

    kind: Kind
    place: Place
    value: Any
    message: str = ""


def looks_secret(key: str) -> bool:
    """Whether a key of this name usually holds a secret: `api_key`, `accessToken`, `password`; not
    `max_tokens` or `eos_token`.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    return _SECRET.search(words) is not None and _TOKENS_OF_TEXT.search(words) is None


def uses(args: dict[str, Any], place: Place) -> Iterator[Use]:
    """Everything that the args plug in or send, and their mistakes."""
    return _within(args, place)


def _within(value: Any, place: Place) -> Iterator[Use]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in inner:
        below = (*place, name)
        if (variable := variable_of(item)) is not None:
            yield Use("variable", (*below, "env_var"), variable)
            continue
        yield from _entry(name, item, below)
        if isinstance(item, dict | list):
            yield from _within(item, below)


def _entry(name: str | int, item: Any, place: Place) -> Iterator[Use]:
    if isinstance(name, str) and looks_secret(name) and _has_text(item):
        message = (
            "looks like a secret, and a config is stored and shown: put it into an environment "
            f"variable of rollout workers and env hosts, and write {name} = "
            '{ env_var = "NAME_OF_IT" }'
        )
        # The reply must not contain the value itself.
        yield Use("mistake", place, "(not shown)", message)
    match name, item:
        case "judges", _ if item:
            yield from _judges(item, place)
        case "judge", dict() if item:
            yield from _endpoint(item, place)
        case "headers_from_env", dict():
            yield from (Use("variable", (*place, key), str(named)) for key, named in item.items())
        case "fn", str():
            yield Use("function", place, item)
        case "system_prompt", str():
            yield Use("file", place, item)
        case "base_url", str():
            yield Use("host", place, item)
        case "api_key_var", str():
            yield Use("variable", place, item)


def _has_text(item: Any) -> bool:
    if isinstance(item, list):
        return any(map(_has_text, item))
    return isinstance(item, str) and item != ""


def _judges(judges: Any, place: Place) -> Iterator[Use]:
    # verifiers accepts pairs, too, which could hide anything.
    for number, judge in enumerate(judges if isinstance(judges, list) else [None]):
        below = (*place, number)
        input = judge if isinstance(judge, dict) else {}
        name = str(input.get("id"))
        yield Use("judge", (*below, "id"), name)
        for key in _OF_ONE.get(name, ()) and sorted(set(input) - {*_OF_ALL, *_OF_ONE[name]}):
            known = ", ".join((*_OF_ALL, *_OF_ONE[name]))
            message = f"is not a key of judge {name!r}; its keys: {known}"
            yield Use("mistake", (*below, key), input[key], message)
        if isinstance(judge, dict):
            yield from _endpoint(judge, below)


def _endpoint(judge: dict[str, Any], place: Place) -> Iterator[Use]:
    """Requires the keys of a judge's endpoint that verifiers would otherwise fill in: with a host
    of its own choice, and with a key that is meant for that host.
    """
    for key, what in (
        ("base_url", "the endpoint of the judge"),
        (
            "api_key_var",
            "the variable of workers that holds the endpoint's key, such as "
            "'RATCHET_JUDGE_KEY'; it may be unset for an endpoint without one",
        ),
    ):
        if not isinstance(judge.get(key), str):
            yield Use("mistake", (*place, key), None, f"is required here: {what}")
    for key in ("prompt", "path"):
        if judge.get(key) is not None:
            yield Use("file", (*place, key), str(judge[key]))
