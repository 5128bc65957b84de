"""Dataclasses that outlive a process: read strictly, upgraded from older schemas.

`@versioned` on a dataclass with a field `schema` makes every read by pydantic, nested or not,
follow the same steps: refuse a newer schema, upgrade an older one, then require exactly the keys
that the class and its nested dataclasses have. Defaults are for code that creates a value, not for
data that lost one.

Signals are not versioned and are read leniently: Temporal's SDK drops a signal that cannot be
decoded, and a dropped report is lost work. What they carry only grows, by fields with defaults; a
class that is strict inside a versioned one (`Lease`, `Control`) is lenient inside a signal.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ratchet.configs.versions import Versions

T = TypeVar("T", bound=type)

VERSIONED: dict[type, Versions] = {}
"""Every versioned class, and its schemas."""


def versioned(versions: Versions) -> Callable[[T], T]:
    """Makes a dataclass strict and upgradable, as described above."""

    def decorate(cls: T) -> T:
        def read(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            data = versions.upgraded(value)
            if result := list(_differences(cls, data, cls.__name__)):
                raise ValueError(f"{versions.what}: {'; '.join(result)}")
            return data

        def schema_of(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
            return core_schema.no_info_before_validator_function(read, handler(source))

        cls.__get_pydantic_core_schema__ = staticmethod(schema_of)  # type: ignore[attr-defined]
        VERSIONED[cls] = versions
        return cls

    return decorate


@functools.cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass, and their types."""
    return get_type_hints(cls)


def _differences(hint: Any, value: Any, place: str) -> Iterator[str]:
    """Keys that are missing or unknown in `value`, which is JSON of type `hint`."""
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        hints = hints_of(hint)
        if missing := hints.keys() - value.keys():
            yield f"{place} lacks {', '.join(sorted(missing))}"
        if unknown := value.keys() - hints.keys():
            yield f"{place} has unknown {', '.join(sorted(unknown))}"
        for key in hints.keys() & value.keys():
            # A versioned class checks its own keys.
            if not any(part in VERSIONED for part in (hints[key], *get_args(hints[key]))):
                yield from _differences(hints[key], value[key], f"{place}.{key}")
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _differences(part, value, place)
    elif get_origin(hint) is list and isinstance(value, list):
        for place_of, item in enumerate(value):
            yield from _differences(get_args(hint)[0], item, f"{place}[{place_of}]")
    elif get_origin(hint) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _differences(get_args(hint)[1], item, f"{place}[{key!r}]")
