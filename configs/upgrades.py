"""The stored form of a run's config, and how stored configs of older builds are read.

A stored config is a resolved one with the number of its schema. It lies in the store
(`config.json`), in checkpoints, and in the inputs of workflows and activities. Configs that users
write have no schema number: `configs.load.validate` reads those.

When a key of a config is added, renamed, moved or removed, or changes its meaning:

1. Add `from_<n>_to_<n + 1>` and enter it in CONFIG. For an added key it sets what runs did before.
2. Changes of a running run are partial configs: `overrides` in the run's state, `config_changes` in
   its memo. If the key is one that may change (`configs/live.py`), the run state needs an
   upgrader too (`workflows/protocol/upgrades.py`), and an older memo keeps the old name.
3. Record the new shape (`tests/recorded/README.md`).

A missing key takes its default, since sections omit unset keys; an unknown key is refused, so that
nothing that was moved is lost silently.
"""

from typing import Any

from ratchet.configs.run import RunConfig
from ratchet.configs.versions import SCHEMA, Document, Versions, unchanged


def from_1_to_2(config: Document) -> Document:
    """`model.dtype` of both sides becomes `trainer.compute_dtype` and `inference.dtype`.

    Trainers of schema 1 held weights and moments in that dtype. A bfloat16 run continues with those
    values as its float32 weights and moments. The renderer stays the former default; there was one
    trainer backend and one weight transfer.
    """
    model = {"renderer": "ratchet-chatml", **config.get("model", {})}
    dtype = model.pop("dtype", "float32")
    trainer = {**config.get("trainer", {}), "compute_dtype": dtype, "backend": "torch"}
    inference = {**config.get("inference", {}), "dtype": dtype, "transfer": "store"}
    return {**config, "model": model, "trainer": trainer, "inference": inference}


def from_2_to_3(config: Document) -> Document:
    """Keys that a section omits get the former defaults, those of the tiny policy.

    Truncation of the distribution and stop strings did not exist: they get today's defaults.
    """
    trainer = {"seq_len": 256, "optim": {}, **config.get("trainer", {})}
    if trainer["optim"].get("type", "adamw") == "adamw":
        before = {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}
        trainer["optim"] = {**before, **trainer["optim"]}
    sides = {kind: _short_replies(config.get(kind, {})) for kind in ("train", "eval")}
    return {**config, **sides, "trainer": trainer}


def from_3_to_4(config: Document) -> Document:
    """A run in which everything failed used to continue. Hub names used to mean their main branch,
    nothing was recomputed in the backward pass; evals at the end, empty batches and what custom
    algorithms see have defaults that match the former behaviour; a set too small for an eval used
    to be refused.
    """
    return {"when_all_fail": "continue", **config}


def from_4_to_5(config: Document) -> Document:
    """A run continues as it began: its evals queried the policy as train rollouts do, and it wrote
    no log of its own. Servers had 120 s to start, and get no less; they logged only warnings. A
    teacher had 60 s to reply, a source as long as its rollout.
    """
    config = {**config, **_waits_as_before(config)}
    sides = {kind: _quiet(side) for kind, side in config.items() if kind in ("train", "eval")}
    asked_as_before = {"client": "tokens", **sides.get("eval", {})}
    return {**config, **sides, "eval": asked_as_before}


def from_5_to_6(config: Document) -> Document:
    """A run whose config had no `retention.rollouts` kept the rollouts of all steps."""
    return {**config, "retention": {"rollouts": "all", **config.get("retention", {})}}


def from_6_to_7(config: Document) -> Document:
    """An env had one server unless its section named a number."""

    def alone(side: Document) -> Document:
        return {**side, "env": [{"workers": 1, **env} for env in side.get("env", ())]}

    sides = {kind: alone(side) for kind, side in config.items() if kind in ("train", "eval")}
    return {**config, **sides}


def _quiet(side: Document) -> Document:
    envs = [{"log_level": "warning", **env, **_waits_as_before(env)} for env in side.get("env", ())]
    return {**side, "env": envs}


def _waits_as_before(place: Document) -> Document:
    """The `algo` of a config or an env with the time limits of schema 4 for frozen models."""
    if not (algo := place.get("algo")):
        return {}
    before = {
        "teacher": {"timeout_s": 60.0, "connect_timeout_s": 10.0},
        "source": {"timeout_s": 86_400.0, "connect_timeout_s": 30.0},
    }
    models = {key: algo[key] for key in before if isinstance(algo.get(key), dict)}
    return {"algo": {**algo, **{key: {**before[key], **it} for key, it in models.items()}}}


def _short_replies(side: Document) -> Document:
    envs = [
        {**env, "sampling": {"max_tokens": 16, **env["sampling"]}} if env.get("sampling") else env
        for env in side.get("env", ())
    ]
    return {**side, "env": envs, "sampling": {"max_tokens": 16, **side.get("sampling", {})}}


CONFIG = Versions(
    "the stored config",
    {
        0: unchanged,
        1: from_1_to_2,
        2: from_2_to_3,
        3: from_3_to_4,
        4: from_4_to_5,
        5: from_5_to_6,
        6: from_6_to_7,
    },
)


def read_config(stored: dict[str, Any]) -> RunConfig:
    """A stored config of this build or an older one; raises NewerSchema, ValidationError."""
    data = CONFIG.upgraded(stored)
    return RunConfig.model_validate({key: data[key] for key in data if key != SCHEMA})


def config_document(config: RunConfig) -> Document:
    """A config as it is stored and sent."""
    return {**config.model_dump(mode="json"), SCHEMA: CONFIG.current}
