"""A user's own function as an algorithm.

The function is called as `function(rollouts, **kwargs)` with a list of `RolloutView`, once per
group, in a thread of a rollout worker. It may be async. It returns a list with, for each rollout,
one number or a list (or array) of one number per sampled token. Exceptions and invalid results
become a CreditError that names it.
"""

import importlib
import importlib.util
import inspect
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.activities.scoring.algorithms.base import (
    Advantage,
    Algorithm,
    Credit,
    CreditError,
    RolloutView,
    credits_of,
)
from ratchet.configs.algorithm import CustomConfig
from ratchet.configs.base import FunctionSection


def _import_from(folder: str, module: str) -> ModuleType:
    """Imports a module, or a module of a package, that lies in `folder`.

    It is imported under a unique name, so that two runs whose folders hold modules of the same name
    do not interfere, and a later run sees the current file. Modules next to it are found if they
    are of the same package and imported relatively.
    """
    top, _, rest = module.partition(".")
    result = PathFinder.find_spec(top, [str(Path(folder).expanduser())])
    if result is None or result.origin is None:
        raise ModuleNotFoundError(f"there is no module {top!r} in {folder!r}")
    alias = f"ratchet_custom_{uuid.uuid4().hex[:12]}_{top}"
    spec = importlib.util.spec_from_file_location(
        alias, result.origin, submodule_search_locations=result.submodule_search_locations
    )
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[alias] = loaded
    try:
        spec.loader.exec_module(loaded)
        return importlib.import_module(f"{alias}.{rest}") if rest else loaded
    except BaseException:
        del sys.modules[alias]
        raise


def load_function(config: FunctionSection) -> Callable[..., Any]:
    """The function that `config` names. Raises CreditError that says what is wrong with it."""
    module, _, name = config.function.partition(":")
    try:
        loaded = (
            importlib.import_module(module)
            if config.path is None
            else _import_from(config.path, module)
        )
    except Exception as error:
        # The module is the user's code: its errors are for the user to read.
        message = f"module {module!r} of algorithm 'custom' cannot be imported: {_said(error)}"
        hint = "; set `path` to its folder" if config.path is None else ""
        raise CreditError(message + hint) from error
    function = getattr(loaded, name, None)
    if not callable(function):
        missing = "has no" if function is None else "has, but not as a function,"
        raise CreditError(f"module {module!r} of algorithm 'custom' {missing} {name!r}")
    try:
        inspect.signature(function).bind([], **config.kwargs)
    except TypeError as error:
        raise CreditError(
            f"{config.function} cannot be called with a list of rollouts and kwargs "
            f"{sorted(config.kwargs)}: {error}"
        ) from None
    except ValueError:
        # Some builtins have no signature; the first call will show.
        pass
    return function  # type: ignore[no-any-return]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


class Custom(Algorithm):
    """Advantages from the user's function."""

    name = "custom"

    def __init__(self, config: CustomConfig) -> None:
        """Imports the function. Raises CreditError if that fails."""
        self._config = config
        self._function = load_function(config)

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> list[Credit]:
        """Calls the function and checks what it returns."""
        name = self._config.function
        try:
            result = self._function(list(rollouts), **self._config.kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            raise CreditError(f"{name} raised {_said(error)}") from error
        result = _plain(result)
        if not isinstance(result, list | tuple):
            raise CreditError(
                f"{name} must return a list with one entry per rollout, not {type(result).__name__}"
            )
        if len(result) != len(rollouts):
            raise CreditError(
                f"{name} returned {len(result)} entries for {len(rollouts)} rollouts; it must "
                "return one for each"
            )
        return credits_of(
            [self._checked(one, rollout) for one, rollout in zip(result, rollouts, strict=True)]
        )

    def _checked(self, value: Any, rollout: RolloutView) -> Advantage:
        """`value` as the advantage of `rollout`."""
        where = f"{self._config.function}, rollout {rollout.index}"
        value = _plain(value)
        if _is_number(value):
            return float(value)
        if not isinstance(value, list | tuple):
            raise CreditError(
                f"{where}: an advantage is a finite number or a list of them, not {value!r}"[:500]
            )
        if len(value) != rollout.sampled_tokens:
            raise CreditError(
                f"{where}: {len(value)} advantages for {rollout.sampled_tokens} sampled tokens; "
                "there must be one for each"
            )
        tokens = [_plain(one) for one in value]
        wrong = [one for one in tokens if not _is_number(one)]
        if wrong:
            raise CreditError(f"{where}: {wrong[0]!r} is not a finite number"[:500])
        return [float(one) for one in tokens]
