"""Changes of a running run's config: which keys may change, and the config they make.

A change is a nested section like a config's own, e.g. {"dispatch": {"tasks_per_minute": 600}}; envs
are named: {"train": {"env": {"reverse-text": {"ratio": 2}}}}. The config with all changes so far
must be one that could have been started. Limits and metadata hold at once; all else makes another
revision of the config, which holds from the next step on.
"""

from fnmatch import fnmatchcase
from typing import Any

from ratchet.configs.load import ConfigError, Problem, validate
from ratchet.configs.run import RunConfig

AT_ONCE = ("dispatch.max_inflight_rollouts", "dispatch.tasks_per_minute", "metadata.*")
FROM_NEXT_STEP = (
    "max_steps",
    "trainer.optim.lr",
    "eval.interval",
    "eval.env.<name>.interval",
    "train.env.<name>.ratio",
    "checkpoint.interval",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "retention.weights",
    "retention.batches",
)
LIVE_KEYS = (*AT_ONCE, *FROM_NEXT_STEP)
"""What may be changed while a run runs."""


def _leaves(patch: dict[str, Any], above: str = "") -> list[str]:
    keys = []
    for name, value in patch.items():
        key = f"{above}{name}"
        keys += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return keys


def _is_one_of(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern.replace("<name>", "*")) for pattern in patterns)


def merged(base: dict[str, Any], patch: dict[str, Any], above: str = "") -> dict[str, Any]:
    """`base` with the values of `patch` put in, section by section; sections of a list go by their
    name. Raises ConfigError for a name that is not there. `above` is the key of `base` itself.
    """
    result = dict(base)
    for name, value in patch.items():
        below, key = result.get(name), f"{above}{name}"
        if isinstance(value, dict) and isinstance(below, dict):
            result[name] = merged(below, value, f"{key}.")
        elif isinstance(value, dict) and isinstance(below, list):
            result[name] = _merged_by_name(below, value, key)
        else:
            result[name] = value
    return result


def _merged_by_name(base: list[Any], patch: dict[str, Any], key: str) -> list[Any]:
    names = [section["name"] for section in base]
    if unknown := [name for name in patch if name not in names]:
        pointer = "/" + key.replace(".", "/")
        text = f"no {key} is named so; there are: {', '.join(names) or 'none'}"
        raise ConfigError([Problem(f"{pointer}/{n}", f"{key}.{n}", None, text) for n in unknown])
    return [
        merged(section, patch.get(section["name"], {}), f"{key}.{section['name']}.")
        for section in base
    ]


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
    if fixed := [key for key in keys if not _is_one_of(key, LIVE_KEYS)]:
        pointers = [(key, "/" + key.replace(".", "/")) for key in fixed]
        raise ConfigError([Problem(p, key, None, f"cannot change; {may}") for key, p in pointers])
    together = merged(overrides, patch)
    result = validate(_without_nulls(merged(config, together)))
    if result.permits is None and validate(config).permits is not None:
        key = "dispatch.max_inflight_rollouts"
        text = "cannot become 'auto': only the engines of a run that began so report their load"
        raise ConfigError([Problem("/" + key.replace(".", "/"), key, "auto", text)])
    return together, result


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """A null takes a pair out of the metadata."""
    metadata = config.get("metadata") or {}
    return {**config, "metadata": {k: v for k, v in metadata.items() if v is not None}}


def needs_revision(patch: dict[str, Any]) -> bool:
    """Whether some change of the patch holds from the next step on, and not at once."""
    return any(_is_one_of(key, FROM_NEXT_STEP) for key in _leaves(patch))
