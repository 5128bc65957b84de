"""JSON pointers (RFC 6901), which locate mistakes. Pure."""

from typing import Any


def pointer(*parts: object) -> str:
    """The pointer to the value under `parts`, from the outermost inwards."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def pointer_to(key: str) -> str:
    """The pointer to a dotted key of a config, none of whose parts has a dot."""
    return pointer(*key.split("."))


def key_of(text: str) -> str:
    """The dotted key that a pointer names: '/train/env/0/id' is 'train.env.0.id'."""
    return ".".join(parts_of(text))


def parts_of(text: str) -> list[str]:
    """The parts of a pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def value_at(data: Any, text: str) -> Any:
    """The value a pointer names, or None where there is none."""
    for key in parts_of(text):
        if isinstance(data, dict):
            data = data.get(key)
        elif isinstance(data, list) and key.isdecimal() and int(key) < len(data):
            data = data[int(key)]
        else:
            return None
    return data
