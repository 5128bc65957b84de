"""`key=value` arguments as nested sections, for changes sent to the API. Pure."""

import json
import tomllib
from collections.abc import Iterable
from typing import Any

from ratchet.configs.load import toml_value


def _keys(key: str) -> list[str]:
    """The parts of a dotted key, some of which may be quoted as in TOML."""
    try:
        place: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise ValueError(
            f"{key!r} is not a key; separate its parts by dots, and quote those that contain one: "
            'train.env."a.b".ratio=2'
        ) from None
    parts: list[str] = []
    while isinstance(place, dict):
        ((part, place),) = place.items()
        parts.append(part)
    return parts


def nested(assignments: Iterable[str]) -> dict[str, Any]:
    """{'a': {'b': 1}} from 'a.b=1'; values are TOML, `none` and `null` are null, all else is text.

    Raises ValueError for an invalid assignment, and for two that contradict each other.
    """
    together: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{assignment!r} does not have the form key=value")
        *sections, last = _keys(key)
        place = together
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key}: {section} already has a value of its own")
        if last in place:
            raise ValueError(f"{key} is set twice, or a part of it is")
        place[last] = None if text == "null" else toml_value(text)
    return together


def pairs(assignments: Iterable[str]) -> dict[str, str]:
    """{'owner': 'ana'} from 'owner=ana'; raises ValueError for an invalid assignment."""
    result: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"{assignment!r} does not have the form name=value")
        result[name] = value
    return result


def one_line(value: Any) -> str:
    """A value as one line of JSON, all of it printable."""
    return json.dumps(value, separators=(",", ":"))
