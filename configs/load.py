"""Reads a run's config from TOML or JSON and reports all mistakes in it.

Errors name the key, the value, what is allowed and, for an unknown key, the nearest valid one; one
pass finds all of them, before anything starts.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from ratchet.configs.pointers import pointer
from ratchet.configs.run import RunConfig

MOST_REPORTED = 100
"""How many mistakes an error lists."""
NEAR = 64
"""A longer key is not a misspelling of an existing one."""

_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
# Each part begins where no other one could, so that a text is scanned once.
_MANY_PARTS = re.compile(rf"""(?<![\\A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{16}}""")
MOST_KEYS = 10_000


@dataclass(frozen=True)
class Problem:
    """One mistake: `pointer` is a JSON pointer (RFC 6901) to the offending value."""

    pointer: str
    key: str
    value: Any
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


class ConfigError(ValueError):
    """A config that cannot run; `problems` lists every mistake found, `source` names its file."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source
        where = f"{source}: " if source else ""
        super().__init__("\n".join(f"{where}{problem}" for problem in problems))


def _section_fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    for inner in get_args(annotation):
        if fields := _section_fields(inner):
            return fields
    return {}


def _fields_at(location: Iterable[int | str]) -> dict[str, Any]:
    fields = _section_fields(RunConfig)
    for part in location:
        if isinstance(part, str):
            fields = _section_fields(fields.get(part))
    return fields


def _keys_below(fields: dict[str, Any], above: str = "") -> dict[str, str]:
    """Dotted keys of all sections by their last part; the first of several."""
    found: dict[str, str] = {}
    inner: dict[str, str] = {}
    for name, annotation in fields.items():
        found.setdefault(name, above + name)
        inner = _keys_below(_section_fields(annotation), f"{above}{name}.") | inner
    return inner | found


def _unknown(location: tuple[int | str, ...]) -> str:
    """The error for an unknown key: suggests a close match in its section or in any other, else the
    keys of its section.
    """
    key, valid = str(location[-1])[:NEAR], list(_fields_at(location[:-1]))
    beside = {name: name for name in valid}
    for known, alike in (
        (beside, 0.8),
        (_keys_below(_section_fields(RunConfig)), 0.8),
        (beside, 0.5),
    ):
        if near := difflib.get_close_matches(key, known, n=1, cutoff=alike):
            return f"unknown key; did you mean {known[near[0]]!r}?"
    return f"unknown key; valid keys: {', '.join(valid)}"


def unknown_key(key: tuple[str, ...]) -> str:
    """The error for a key that its section does not have, else ''; also '' within a list, whose
    sections have names here.
    """
    valid = _fields_at(key[:-1])
    return _unknown(key) if valid and key[-1] not in valid else ""


def _problem(error: Any) -> Problem:
    location = tuple(error["loc"])
    key = ".".join(str(part) for part in location) or "(config)"
    value = error.get("input")
    shown = repr(value) if not isinstance(value, dict | list) else "this value"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown(location)
    elif error["type"] == "missing":
        message = "is required and missing"
    elif error["type"] == "list_type" and isinstance(value, dict):
        message = f"must be a list of tables; in TOML write [[{key}]] before each of them"
    elif error["type"] == "model_type" and isinstance(value, list):
        message = f"is one table, not a list; in TOML write [{key}], with one bracket"
    elif error["type"] != "value_error":
        message = f"{message}, got {shown}"
    return Problem(pointer=pointer(*location), key=key, value=value, message=message)


def _place(data: Any, location: Iterable[Any]) -> tuple[int | str, ...]:
    """A location within `data`, without what pydantic adds to it for each form of a value."""
    place: list[int | str] = []
    for part in location:
        if not isinstance(data, dict if isinstance(part, str) else list):
            break
        place.append(part)
        if part not in (data if isinstance(data, dict) else range(len(data))):
            break
        data = data[part]
    return tuple(place)


def _by_place(data: Any, errors: Iterable[Any]) -> list[dict[str, Any]]:
    """Errors with their places; those of a value that fits none of its forms are one."""
    found: dict[tuple[int | str, ...], dict[str, Any]] = {}
    for error in errors:
        place = _place(data, error["loc"])
        if place != tuple(error["loc"]) and place in found:
            also = error["msg"].replace("Input", "input", 1)
            found[place]["msg"] = f"{found[place]['msg']}, or {also}"
        else:
            found[place] = {**error, "loc": place}
    return list(found.values())


def validate(data: Any) -> RunConfig:
    """Returns the run's config; raises ConfigError listing every problem."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        found = _by_place(data, error.errors(include_url=False))
        problems = [_problem(e) for e in found[:MOST_REPORTED]]
        if more := len(found) - len(problems):
            problems.append(Problem("", "(config)", None, f"and {more} more mistakes"))
        raise ConfigError(problems) from None


def _require_few_keys(text: str) -> None:
    """Raises ConfigError for TOML that is slow to parse: time grows with the square of a dotted
    key's parts, and by some microseconds for each table and key.
    """
    # Such characters inside quotes count, too: prose has far fewer. A table costs four keys.
    keys = text.count("=") + text.count(".") + 4 * text.count("\n[")
    many_keys = f"not read: it has more than {MOST_KEYS} keys, where a table counts as four"
    message = many_keys if keys > MOST_KEYS else ""
    if not message and (many := _MANY_PARTS.search(text)):
        line = text.count("\n", 0, many.start()) + 1
        message = f"not read: a dotted key has more than 16 parts (line {line})"
    if message:
        raise ConfigError([Problem("", "(config)", None, message)])


NONE = "<none>"
"""How TOML, which has no null, spells that a key has no value. A string that reads the same, after
any number of backslashes, gets one more in front."""
_NONE = re.compile(r"\\*" + re.escape(NONE))


def from_toml(value: Any) -> Any:
    """A value as TOML has it, with null for NONE."""
    if isinstance(value, dict):
        return {key: from_toml(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_toml(item) for item in value]
    if isinstance(value, str) and _NONE.fullmatch(value):
        return None if value == NONE else value[1:]
    return value


def to_toml(value: Any) -> Any:
    """A value as TOML can have it, with NONE for null."""
    if isinstance(value, dict):
        return {key: to_toml(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_toml(item) for item in value]
    if isinstance(value, str) and _NONE.fullmatch(value):
        return "\\" + value
    return NONE if value is None else value


def parse(text: str, *, media: str = "toml") -> Any:
    """Parses TOML or JSON text to plain data; raises ConfigError with the place of a mistake."""
    if media != "json":
        _require_few_keys(text)
    try:
        return json.loads(text) if media == "json" else from_toml(tomllib.loads(text))
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        where = _line_of(text, str(error)) if media == "toml" else ""
        message = f"not valid {media}: {error}{where}"
        raise ConfigError([Problem("", "(config)", None, message)]) from None


def _line_of(text: str, error: str) -> str:
    """', in the line of …' with the key or section that a line begins with which an error names; ''
    if the line may be part of a value.
    """
    number = re.search(r"at line (\d+)", error)
    line = text.split("\n")[int(number[1]) - 1].strip() if number else ""
    key, equals, _ = line.partition("=")
    return f", in the line of {key.strip()[:80]!r}" if equals or line.startswith("[") else ""


def toml_value(text: str) -> Any:
    """The value of a text in TOML, or null for `none`; other text is a string."""
    if text.strip() == "none":
        return None
    try:
        return from_toml(tomllib.loads(f"v = {text}"))["v"]
    except tomllib.TOMLDecodeError:
        return text


def _override(data: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError([Problem("", assignment, None, "must have the form key=value")])
    value = toml_value(text)
    *sections, last = key.split(".")
    place: Any = data
    try:
        for section in sections:
            place = (
                place[int(section)] if isinstance(place, list) else place.setdefault(section, {})
            )
        place[int(last) if isinstance(place, list) else last] = value
    except (IndexError, ValueError, TypeError, AttributeError):
        raise ConfigError([Problem("", key, value, "the config has no such section")]) from None


def read(path: str | Path, overrides: Iterable[str] = ()) -> Any:
    """The plain data of `path` (.toml or .json) with dotted overrides ('train.batch_size=64'), not
    validated. Raises ConfigError, which names the file.
    """
    source = Path(path)
    if not source.is_file():
        raise ConfigError([Problem("", "(config)", None, "no such config file")], str(path))
    try:
        data = parse(source.read_text(), media="json" if source.suffix == ".json" else "toml")
        for assignment in overrides:
            _override(data, assignment)
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None
    return data


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config of `path` with dotted overrides; raises ConfigError, which names the file."""
    data = read(path, overrides)
    try:
        return validate(data)
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None


def dump_toml(config: RunConfig) -> str:
    """The resolved config as TOML with all defaults filled in; reads back as the same config."""
    return tomli_w.dumps(to_toml(config.model_dump()))
