"""Inputs and results of the preflight, which runs before anything is started."""

from dataclasses import dataclass, field
from typing import Any

from ratchet.configs.run import RunConfig


@dataclass(frozen=True)
class CheckInput:
    """A whole run config as plain data; the checks read their own sections. A run that is
    `restored` has its version 0 from the checkpoint's run, and needs no other run for it.
    """

    config: dict[str, Any]
    restored: bool = False


@dataclass(frozen=True)
class CheckProblem:
    """Something in the config that only a worker could find out. `pointer` is RFC 6901."""

    pointer: str
    key: str
    message: str


@dataclass(frozen=True)
class CheckResult:
    """Problems found (none: good), the number of examples per '<kind>/<env>', and what the run will
    take, in bytes by part, of 'trainer memory', 'engine memory' and 'disk'.
    """

    problems: list[CheckProblem] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    estimates: dict[str, dict[str, int]] = field(default_factory=dict)


def load_limits(config: RunConfig) -> dict[str | None, float]:
    """How long the environments of each import path, which one process loads, are waited for."""
    limits: dict[str | None, float] = {}
    for env in (*config.train.env, *config.eval.env):
        limits[env.path] = limits.get(env.path, 0.0) + env.load_limit_s
    return limits
