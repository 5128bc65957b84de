"""Changes of a running run's config: which keys may change, and what the run makes of them. Pure.

A change is a nested section like a config's own, e.g. {"dispatch": {"tasks_per_minute": 600}}; the
config with all changes so far must be one that could have been started.
"""

from typing import Any

from configs.load import ConfigError, Problem, validate
from configs.run import RunConfig
from workflows.state import Limits

LIVE_KEYS = ("dispatch.max_inflight_rollouts", "dispatch.tasks_per_minute")
"""What may be changed while a run runs."""


def _leaves(patch: dict[str, Any], above: str = "") -> list[str]:
    keys = []
    for name, value in patch.items():
        key = f"{above}{name}"
        keys += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return keys


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `patch` put in, section by section."""
    result = dict(base)
    for name, value in patch.items():
        below = result.get(name)
        both = isinstance(value, dict) and isinstance(below, dict)
        result[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def changed(
    config: dict[str, Any], overrides: dict[str, Any], patch: dict[str, Any]
) -> tuple[dict[str, Any], RunConfig]:
    """All changes with `patch` on top, and the config they make of `config`.

    Raises ConfigError for keys that cannot change and for values that cannot be.
    """
    keys = _leaves(patch)
    may = f"keys that may change while a run runs: {', '.join(LIVE_KEYS)}"
    if not keys:
        raise ConfigError([Problem("", "(config)", patch, f"nothing to change; {may}")])
    if fixed := [key for key in keys if key not in LIVE_KEYS]:
        pointers = [(key, "/" + key.replace(".", "/")) for key in fixed]
        raise ConfigError([Problem(p, key, None, f"cannot change; {may}") for key, p in pointers])
    together = merged(overrides, patch)
    result = validate(merged(config, together))
    if result.permits is None and validate(config).permits is not None:
        key = "dispatch.max_inflight_rollouts"
        text = "cannot become 'auto': only the engines of a run that began so report their load"
        raise ConfigError([Problem("/" + key.replace(".", "/"), key, "auto", text)])
    return together, result


def limits_of(config: RunConfig, before: Limits | None = None) -> Limits:
    """The limits that a config sets; 'auto' permits go on from those `before`."""
    auto = config.permits is None
    first = config.dispatch.concurrency.initial or config.largest_part
    permits = config.permits or (before.permits if before else first)
    return Limits(
        permits=max(permits, config.largest_part),
        auto=auto,
        tasks_per_minute=config.dispatch.tasks_per_minute,
    )
