"""Inputs and results of the preflight, which runs before anything is started."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ratchet.activities.contracts.redact import writable
from ratchet.configs.run import RunConfig


@dataclass(frozen=True)
class CheckInput:
    """A whole run config as plain data; each check reads its own sections. A `restored` run has its
    version 0 from the checkpoint's run, and needs no other run for it.
    """

    config: dict[str, Any]
    restored: bool = False


@dataclass(frozen=True)
class CheckProblem:
    """A mistake in the config that only a worker could find. `pointer` is RFC 6901."""

    pointer: str
    key: str
    message: str


def without_secrets(problems: Iterable[CheckProblem]) -> list[CheckProblem]:
    """Problems whose messages may hold what a user's code said."""
    return [replace(problem, message=writable(problem.message)) for problem in problems]


@dataclass(frozen=True)
class CheckResult:
    """Problems (empty: none), the number of examples per '<kind>/<env>', what the run will take, in
    bytes by part, of 'trainer memory', 'engine memory' and 'disk', and how many `cores` the machine
    has where the environments were checked (0: not known).
    """

    problems: list[CheckProblem] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    estimates: dict[str, dict[str, int]] = field(default_factory=dict)
    cores: int = 0


def load_limits(config: RunConfig) -> dict[str | None, float]:
    """Time limits for loading the environments of each import path, which share a process."""
    limits: dict[str | None, float] = {}
    for env in (*config.train.env, *config.eval.env):
        limits[env.path] = limits.get(env.path, 0.0) + env.load_limit_s
    return limits
