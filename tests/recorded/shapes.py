"""The shapes of what outlives a process: each key that the data has, and its type.

    python -m tests.recorded.shapes     records the shapes of schemas that have none yet

`shapes/<class>.<schema>.json` is the shape of one schema, and never changes once it was released;
`shapes/signals.json` is that of the signals, to which keys are only added.
"""

import json
import sys
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from ratchet.activities.contracts.health import HealthReport
from ratchet.activities.contracts.hosting import EngineLoad, HostReport
from ratchet.activities.contracts.rollouts import Released
from ratchet.activities.contracts.versioned import VERSIONED, hints_of
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import CONFIG
from ratchet.workflows.protocol.messages import Control, DispatchReport
from tests.recorded import HERE

SHAPES = HERE / "shapes"
SIGNALS_FILE = SHAPES / "signals.json"
SIGNALS = (Control, DispatchReport, EngineLoad, HealthReport, HostReport, Released)
ABOUT = ("title", "description", "default", "examples", "discriminator")
"""What a JSON schema says of a key besides its type."""

Shape = dict[str, Any]


def shape_of(cls: type) -> Shape:
    """Type by key, as 'hosts[].role'; `[]` is any item of a list, `{}` any value of an object."""
    return dict(sorted(_lines(cls, "", top=True)))


def _lines(hint: Any, place: str, *, top: bool = False) -> Iterator[tuple[str, str]]:
    parts = get_args(hint)
    if hint in VERSIONED and not top:
        yield place, f"{hint.__name__}, by its own schema"
    elif is_dataclass(hint):
        for key, inner in hints_of(hint).items():
            yield from _lines(inner, f"{place}.{key}".removeprefix("."))
    elif get_origin(hint) in (Union, types.UnionType) and any(map(is_dataclass, parts)):
        for part in parts:
            if part is types.NoneType:
                yield f"{place}?", "may be null"
            else:
                yield from _lines(part, place)
    elif get_origin(hint) is list:
        yield from _lines(parts[0], f"{place}[]")
    elif get_origin(hint) is dict:
        yield from _lines(parts[1], f"{place}{{}}")
    else:
        plain = isinstance(hint, type) and not parts
        yield place, hint.__name__ if plain else str(hint).replace("typing.", "")


def config_shape() -> Shape:
    """Type by key of a config and its sections, as '<section>.<key>'."""
    schema = RunConfig.model_json_schema()
    sections = {"RunConfig": schema, **schema["$defs"]}
    return {
        f"{name}.{key}": json.dumps(_bare(value), sort_keys=True)
        for name, section in sorted(sections.items())
        for key, value in sorted(section["properties"].items())
    }


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: _bare(entry) for key, entry in value.items() if key not in ABOUT}


def signals_shape() -> Shape:
    """The shapes of all signals."""
    return {cls.__name__: shape_of(cls) for cls in SIGNALS}


def current() -> dict[Path, Shape]:
    """The shape of everything that has a schema, by the file where it is recorded."""
    found = {
        SHAPES / f"{cls.__name__}.{versions.current}.json": shape_of(cls)
        for cls, versions in VERSIONED.items()
    }
    found[SHAPES / f"RunConfig.{CONFIG.current}.json"] = config_shape()
    return found


def grown(before: Shape, after: Shape) -> bool:
    """Whether `after` has all that `before` has, as it was."""
    return (
        all(
            grown(value, after[key]) if isinstance(value, dict) else after[key] == value
            for key, value in before.items()
            if key in after
        )
        and before.keys() <= after.keys()
    )


def main() -> int:
    """Records what is not recorded; returns the exit status."""
    SHAPES.mkdir(exist_ok=True)
    for path, shape in current().items():
        if not path.exists():
            path.write_text(json.dumps(shape, indent=1) + "\n")
            print(f"recorded {path.name}")
        elif json.loads(path.read_text()) != shape:
            print(f"{path.name} is another: raise the number, see workflows/protocol/upgrades.py")
            return 1
    signals = signals_shape()
    before = json.loads(SIGNALS_FILE.read_text()) if SIGNALS_FILE.exists() else {}
    if not grown(before, signals):
        print("a key of a signal is gone or has another type, see workflows/protocol/upgrades.py")
        return 1
    SIGNALS_FILE.write_text(json.dumps(signals, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
