"""Environment variables that a config names in place of a secret: `{ env_var = "NAME" }`."""

import re
from typing import Any

from pydantic import Field

from ratchet.configs.base import Section

NAME = r"[A-Z_][A-Z0-9_]{0,63}"


class VariableConfig(Section):
    """An environment variable that stands for its value."""

    env_var: str = Field(pattern=rf"^{NAME}$", description="Its name, in capitals, digits and '_'.")


def variable_of(value: Any) -> str | None:
    """NAME of `{ env_var = "NAME" }`, whatever its characters; None for anything else."""
    if isinstance(value, dict) and value.keys() == {"env_var"}:
        name = value["env_var"]
        return name if isinstance(name, str) else None
    return None


def named_variable(value: Any) -> str | None:
    """The same, if NAME is one that `VariableConfig` accepts."""
    name = variable_of(value)
    return name if name is not None and re.fullmatch(NAME, name) else None
