"""Changes of a running run's config: which keys may change, and the config they make.

A change is a nested section like a config's own, e.g. {"dispatch": {"tasks_per_minute": 600}}; envs
are keyed by name: {"train": {"env": {"reverse-text": {"ratio": 2}}}}. The config with all changes
so far must be valid for a new run. Limits and metadata take effect at once; everything else makes a
new revision of the config, which takes effect at the next step.

All changes so far travel with the run, so they hold nothing that has no effect: a null that removes
nothing is dropped, however many there are.
"""

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from ratchet.configs.load import MOST_REPORTED, ConfigError, Problem, unknown_key, validate
from ratchet.configs.pointers import pointer
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
    "retention.rollouts",
)
LIVE_KEYS = (*AT_ONCE, *FROM_NEXT_STEP)
"""What may be changed while a run is running."""


Key = tuple[str, ...]


def _problem(key: Key, value: Any, message: str) -> Problem:
    return Problem(pointer(*key), ".".join(key), value, message)


def _leaves(patch: dict[str, Any], above: Key = ()) -> list[Key]:
    keys = []
    for name, value in patch.items():
        key = (*above, name)
        keys += _leaves(value, key) if isinstance(value, dict) and value else [key]
    return keys


def _is_one_of(key: Key, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(".".join(key), pattern.replace("<name>", "*")) for pattern in patterns)


def merged(base: dict[str, Any], patch: dict[str, Any], above: Key = ()) -> dict[str, Any]:
    """`base` with the values of `patch` merged in, section by section; sections of a list are keyed
    by their name. Raises ConfigError for an unknown name. `above` is the key of `base` itself.
    """
    result = dict(base)
    for name, value in patch.items():
        below, key = result.get(name), (*above, name)
        if isinstance(value, dict) and isinstance(below, dict):
            result[name] = merged(below, value, key)
        elif isinstance(value, dict) and isinstance(below, list):
            result[name] = _merged_by_name(below, value, key)
        else:
            result[name] = value
    return result


def _merged_by_name(base: list[Any], patch: dict[str, Any], key: Key) -> list[Any]:
    names = [section["name"] for section in base]
    if unknown := [name for name in patch if name not in names]:
        text = f"no {'.'.join(key)} has this name; names: {', '.join(names) or 'none'}"
        raise ConfigError([_problem((*key, name), None, text) for name in unknown])
    return [
        merged(section, patch.get(section["name"], {}), (*key, section["name"])) for section in base
    ]


def changed(
    config: dict[str, Any], overrides: dict[str, Any], patch: dict[str, Any]
) -> tuple[dict[str, Any], RunConfig]:
    """All changes with `patch` on top, and the config that they make of `config`.

    Raises ConfigError for keys that cannot change and for invalid values.
    """
    keys = _leaves(patch)
    may = f"keys that may change while a run is running: {', '.join(LIVE_KEYS)}"
    rest = "cannot change; a fork takes any other, and so does a new run"
    if not keys:
        raise ConfigError([Problem("", "(config)", patch, f"nothing to change; {may}")])
    if fixed := [key for key in keys if not _is_one_of(key, LIVE_KEYS)]:
        raise ConfigError(
            [
                _problem(key, None, f"{_unknown(key) or rest} ({may})")
                for key in fixed[:MOST_REPORTED]
            ]
        )
    together = _effective(config, merged(overrides, patch))
    result = validate(_without_nulls(merged(config, together)))
    if result.permits is None and validate(config).permits is not None:
        text = "cannot become 'auto': only engines of a run that began with it report their load"
        raise ConfigError([_problem(("dispatch", "max_inflight_rollouts"), "auto", text)])
    return together, result


def _unknown(key: Key) -> str:
    """The error for a key that no config has, with the nearest that may change; else ''."""
    if not (text := unknown_key(key)):
        return ""
    near = get_close_matches(".".join(key)[:64], LIVE_KEYS, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else text


def _effective(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides` without nulls for pairs that the metadata of `config` does not have."""
    if not isinstance(pairs := overrides.get("metadata"), dict):
        return overrides
    there = config.get("metadata") or {}
    left = {name: value for name, value in pairs.items() if value is not None or name in there}
    rest = {name: value for name, value in overrides.items() if name != "metadata"}
    return {**overrides, "metadata": left} if left else rest


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """A null removes a pair from the metadata."""
    metadata = config.get("metadata") or {}
    return {**config, "metadata": {k: v for k, v in metadata.items() if v is not None}}


def needs_revision(patch: dict[str, Any]) -> bool:
    """Whether some change of the patch takes effect at the next step, and not at once."""
    return any(_is_one_of(key, FROM_NEXT_STEP) for key in _leaves(patch))


Diff = dict[str, list[Any]]
"""Old and new value by dotted key."""


def _value(config: Any, key: Key) -> Any:
    for name in key:
        if isinstance(config, list):
            config = next((entry for entry in config if entry["name"] == name), None)
        else:
            config = (config or {}).get(name)
    return config


def differences(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> Diff:
    """What a patch changes: old and new value of each of its keys whose value differs between two
    whole configs.
    """
    values = {".".join(key): [_value(before, key), _value(after, key)] for key in _leaves(patch)}
    return {key: value for key, value in values.items() if value[0] != value[1]}


def pending(config: RunConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Changes that take effect at the next step: their values by dotted key."""
    plain = config.model_dump(mode="json")
    return {
        ".".join(key): value
        for key in _leaves(overrides)
        if _is_one_of(key, FROM_NEXT_STEP)
        and (value := _value(overrides, key)) != _value(plain, key)
    }
