"""Which code of the users' own a config may name: functions by import path, and env folders. Pure.

Whoever may create runs would else run anything that workers can import. The allow-list
(RATCHET_CUSTOM_CODE) holds module names, which stand for themselves and all below, and absolute
folders.
"""

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from api.problems import FieldError, shown
from configs.base import FunctionSection
from configs.env import EnvConfig
from configs.run import RunConfig


def _sections(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionSection | EnvConfig):
        yield pointer, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _sections(getattr(value, name), f"{pointer}/{name}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _sections(item, f"{pointer}/{place}")


def _below(folder: str, allowed: Sequence[str]) -> bool:
    path = posixpath.normpath(folder)
    roots = [posixpath.normpath(entry) for entry in allowed if entry.startswith("/")]
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _named(module: str, allowed: Sequence[str]) -> bool:
    return any(module == entry or module.startswith(f"{entry}.") for entry in allowed)


def refused(config: RunConfig, allowed: Sequence[str] | None) -> list[FieldError]:
    """What of the config names code that is not allowed; None allows everything."""
    if allowed is None:
        return []
    errors: list[FieldError] = []

    def refuse(pointer: str, value: str, what: str) -> None:
        listed = ", ".join(allowed) or "nothing"
        errors.append(
            FieldError(
                pointer=pointer,
                key=pointer.strip("/").replace("/", "."),
                value=shown(value),
                message=f"{what} that the API does not allow; allowed: {listed} "
                "(RATCHET_CUSTOM_CODE of the API lists modules and folders)",
            )
        )

    for pointer, section in _sections(config):
        if isinstance(section, FunctionSection):
            module = section.function.partition(":")[0]
            if not _named(module, allowed):
                refuse(f"{pointer}/function", section.function, "names code")
        if section.path is not None and not _below(section.path, allowed):
            refuse(f"{pointer}/path", section.path, "names a folder of code")
    return errors
