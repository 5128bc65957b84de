"""Imports the function that [trainer.loss] with type "custom" names."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.configs.trainer import CustomLossConfig


def module_file(config: CustomLossConfig) -> Path | None:
    """The module's file if the config names its folder; None: it is imported by its name."""
    if config.path is None:
        return None
    module = config.function.partition(":")[0]
    return Path(config.path).expanduser() / (module.replace(".", "/") + ".py")


def load_function(config: CustomLossConfig) -> Callable[..., Any]:
    """Imports the function. Raises ValueError with the reason if that fails."""
    module, _, name = config.function.partition(":")
    try:
        loaded = _load(module, module_file(config))
    except Exception as error:
        # The module is the user's code: they need to see any error of it.
        hint = "; set `path` to its folder" if config.path is None else ""
        said = f"{type(error).__name__}: {error}"[:500]
        raise ValueError(f"trainer.loss: module {module!r} cannot be imported: {said}{hint}") from (
            error
        )
    function = getattr(loaded, name, None)
    if not callable(function):
        raise ValueError(f"trainer.loss: module {module!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _load(module: str, file: Path | None) -> ModuleType:
    if file is None:
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(f"ratchet_loss_{module.replace('.', '_')}", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
