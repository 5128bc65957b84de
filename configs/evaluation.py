"""Evaluations made of a config: its eval envs, a run for each model, and nothing trained. Pure.

An evaluation is a run without train envs whose `max_steps` is 0.
"""

from collections.abc import Sequence
from typing import Any

from ratchet.configs.load import ConfigError, Problem
from ratchet.configs.model import OF_RUN, version_named

ABOUT_TRAINING = ("lora", "loss")
"""Keys of [trainer] that name what only training needs."""


def model_named(text: str) -> str:
    """The `model.name` that a person means: RUN@STEP is a version of a run."""
    version = f"{OF_RUN}{text}"
    return text if version_named(version) is None else version


def _sections(config: dict[str, Any], kind: str) -> list[tuple[str, Any]]:
    """The env sections of a kind with their names; what is no section has none."""
    section = config.get(kind)
    envs = section.get("env") if isinstance(section, dict) else None
    return [
        (str(env.get("name") or env.get("id")), env)
        for env in (envs if isinstance(envs, list) else [])
        if isinstance(env, dict)
    ]


def _problems(config: dict[str, Any], models: list[str], envs: Sequence[str]) -> list[Problem]:
    problems = []
    for k, name in enumerate(models):
        if name in models[:k]:
            text = f"{name!r} is named twice; a model compared with itself shows nothing"
            problems.append(Problem("", "model", name, text))
    known = [name for name, _ in _sections(config, "eval")]
    if not known:
        text = "an evaluation needs at least one [[eval.env]], and this config has none"
        problems.append(Problem("/eval/env", "eval.env", None, text))
    trained = [name for name, _ in _sections(config, "train")]
    for name in envs if known else ():
        if name not in known:
            other = "is not an env of the config"
            why = "has no [[eval.env]] of its own" if name in trained else other
            text = f"{name!r} {why}; its eval envs: {', '.join(known)}"
            problems.append(Problem("/eval/env", "env", name, text))
    return problems


def evaluations(
    config: Any, models: Sequence[str] = (), envs: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A plain config for each of `models` (none: its own), of its eval envs or those named.

    What the config says of training is left out. Raises ConfigError for a model that is named twice
    and for an env that is no eval env; anything else is found when the configs are validated.
    """
    if not isinstance(config, dict):
        raise ConfigError([Problem("", "(config)", None, "a config is a table of sections")])
    named = [model_named(model) for model in models]
    if problems := _problems(config, named, envs):
        raise ConfigError(problems)
    base = {key: value for key, value in config.items() if key != "algo"}
    base["max_steps"] = 0
    train, trainer, own = (config.get(key, {}) for key in ("train", "trainer", "model"))
    # What is no table is left as it is, for the validation to name.
    if isinstance(train, dict):
        base["train"] = {**train, "env": []}
    if isinstance(trainer, dict):
        base["trainer"] = {key: trainer[key] for key in trainer if key not in ABOUT_TRAINING}
    if envs:
        chosen = [section for name, section in _sections(config, "eval") if name in envs]
        base["eval"] = {**config["eval"], "env": chosen}
    if not named or not isinstance(own, dict):
        return [base]
    made = []
    for name in named:
        # A revision is that of the model that the config names.
        kept = own if name == own.get("name") else {**own, "revision": None}
        made.append({**base, "model": {**kept, "name": name}})
    return made
