"""How inputs of hosts and documents of checkpoints and weights from older builds are read.

One table for each; `workflows/protocol/upgrades.py` says what to do when a field changes.
"""

from ratchet.configs.versions import Document, Versions, unchanged

HOST_INPUT = Versions("the input of a host", {0: unchanged})

CHECKPOINT_STATE = Versions("run_state.json", {}, oldest=1, keys=frozenset({"state", "config"}))
"""`state` is a run's state and `config` a stored config, each with a number of its own."""


def trainer_from_1_to_2(state: Document) -> Document:
    """All weights were trained."""
    return {**state, "lora": None, "base": None}


def trainer_from_2_to_3(state: Document) -> Document:
    """A state without these keys is of one rank, AdamW and a config that was not changed."""
    return {"optimizer": "adamw", "config_revision": 0, "ranks": 1, **state}


TRAINER_STATE = Versions(
    "trainer.json",
    {1: trainer_from_1_to_2, 2: trainer_from_2_to_3},
    oldest=1,
    keys=frozenset(
        {
            "step",
            "optimizer",
            "scheduler_step",
            "ranks",
            "torch_threads",
            "torch_version",
            "batch_sha256",
            "config_revision",
            "metrics",
            "lora",
            "base",
        }
    ),
)
"""The part of a trainer's state that is not tensors. `lora` is the section of the config that an
adapter was created with, and `base` names the weights that it belongs to (`adapters.identity`).
"""


def canary_from_0_to_1(canary: Document) -> Document:
    """The one sequence becomes a list of one; the noise of kernels was not measured."""
    return {"sequences": [canary], "noise": {}}


def canary_from_1_to_2(canary: Document) -> Document:
    """Noise was only the largest difference; the mean is about a quarter of that."""
    noise = {dtype: {"largest": n, "mean": n / 4} for dtype, n in canary["noise"].items()}
    return canary | {"noise": noise}


CANARY = Versions(
    "canary.json",
    {0: canary_from_0_to_1, 1: canary_from_1_to_2},
    keys=frozenset({"sequences", "noise"}),
)
"""{schema, sequences: [{token_ids, logprobs}], noise: {dtype: {largest, mean}}}, in nats"""
