"""The stored form of a run's config, and how stored configs of older builds are read.

A stored config is a resolved one with the number of its schema. It lies in the store
(`config.json`), in checkpoints, and in the inputs of workflows and activities. What users write has
no schema number: `configs.load.validate` reads that.

When a key of a config is added, renamed, moved or removed, or changes its meaning:

1. Add `from_<n>_to_<n + 1>` and enter it in CONFIG. For an added key it sets what runs did before.
2. Changes of a running run are partial configs: `overrides` in the run's state, `config_changes` in
   its memo. If the key is one that may change (`workflows/changes.py`), the run state needs an
   upgrader too (`workflows/protocol/upgrades.py`), and a memo of before keeps the old name.
3. Record the new shape (`tests/recorded/README.md`).

A key that is missing takes its default, since a section says nothing of keys that it leaves out; an
unknown one is refused, so that nothing that was moved is lost in silence.
"""

from typing import Any

from ratchet.configs.run import RunConfig
from ratchet.configs.versions import SCHEMA, Document, Versions


def from_0_to_1(config: Document) -> Document:
    """Schema 1 is the first with a number; its keys are those of before."""
    return config


def from_1_to_2(config: Document) -> Document:
    """`model.dtype` of both sides becomes `trainer.compute_dtype` and `inference.dtype`.

    Trainers of schema 1 held weights and moments in that dtype. A bfloat16 run goes on with those
    values as its float32 weights and moments. The renderer stays what was the default before; there
    was one trainer backend and one transfer of weights.
    """
    model = {"renderer": "ratchet-chatml", **config.get("model", {})}
    dtype = model.pop("dtype", "float32")
    trainer = {**config.get("trainer", {}), "compute_dtype": dtype, "backend": "torch"}
    inference = {**config.get("inference", {}), "dtype": dtype, "transfer": "store"}
    return {**config, "model": model, "trainer": trainer, "inference": inference}


def from_2_to_3(config: Document) -> Document:
    """What a section does not say is what was the default for the tiny policy.

    Nothing was said of how a distribution is truncated, nor of stop strings: the defaults.
    """
    trainer = {"seq_len": 256, "optim": {}, **config.get("trainer", {})}
    if trainer["optim"].get("type", "adamw") == "adamw":
        before = {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}
        trainer["optim"] = {**before, **trainer["optim"]}
    sides = {kind: _short_replies(config.get(kind, {})) for kind in ("train", "eval")}
    return {**config, **sides, "trainer": trainer}


def from_3_to_4(config: Document) -> Document:
    """A run of which everything failed went on. Hub names were of their main branch, nothing was
    computed again in the backward pass, evals at the end, batches of which nothing is left and what
    custom algorithms see are by default as they were; a set that was too small for an eval was
    refused.
    """
    return {"when_all_fail": "continue", **config}


def from_4_to_5(config: Document) -> Document:
    """A run of before goes on as it began: it trains all weights, as by default."""
    return config


def _short_replies(side: Document) -> Document:
    envs = [
        {**env, "sampling": {"max_tokens": 16, **env["sampling"]}} if env.get("sampling") else env
        for env in side.get("env", ())
    ]
    return {**side, "env": envs, "sampling": {"max_tokens": 16, **side.get("sampling", {})}}


CONFIG = Versions(
    "the stored config",
    {0: from_0_to_1, 1: from_1_to_2, 2: from_2_to_3, 3: from_3_to_4, 4: from_4_to_5},
)


def read_config(stored: dict[str, Any]) -> RunConfig:
    """A stored config of this build or an older one; raises NewerSchema, ValidationError."""
    data = CONFIG.upgraded(stored)
    return RunConfig.model_validate({key: data[key] for key in data if key != SCHEMA})


def config_document(config: RunConfig) -> Document:
    """A config as it is stored and sent."""
    return {**config.model_dump(mode="json"), SCHEMA: CONFIG.current}
