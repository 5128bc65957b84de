"""What a run takes of the disk that holds its store, by part, from its config alone.

Pure. Sizes are bytes. Counted are weights, the optimizer's moments and adapters; a tokenizer and a
run's state are small beside them. Rollouts are not counted: how long they are nobody knows before.
"""

import math
from typing import Any

from ratchet.activities.training.memory import BYTES, GIB, Shape, adapter_size, shown
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import OptimizerConfig

MOMENTS = {"adamw": 2, "muon": 2, "sgd": 1, "signsgd": 0}
"""Moments of a trained parameter, in float32; Muon has one for matrices and two for others."""
FIRST_STEPS = 100
"""As far as a run is counted: one that keeps all fills any disk, and may be stopped before."""


def checkpoint_bytes(trained: int, optim: OptimizerConfig) -> int:
    """Bytes of a checkpoint of `trained` parameters, at most: they and their moments in float32."""
    return 4 * trained * (1 + MOMENTS[optim.type])


def disk_parts(shape: Shape, config: RunConfig) -> dict[str, int]:
    """Bytes of each part at the fullest moment of a run: what retention keeps, with a checkpoint
    being written beside it; of what it keeps for good, that of its first FIRST_STEPS steps.
    """
    kept, steps = config.checkpoint, int(min(config.last_step, FIRST_STEPS))
    trained = adapter = 0
    if (lora := config.trainer.lora) is not None:
        trained = adapter = adapter_size(shape, lora)
    first = BYTES[config.inference.dtype] * shape.parameters
    version = 4 * adapter + (0 if config.transfer == "adapter" else first)
    checkpoint = 0
    if config.trains:
        checkpoint = checkpoint_bytes(trained or shape.parameters, config.trainer.optim)
    saved = math.ceil(steps / kept.interval)
    checkpoints = min(kept.keep_last, saved)
    if kept.keep_every is not None:
        checkpoints += max(steps // math.lcm(kept.interval, kept.keep_every) - kept.keep_last, 0)
    held = steps if config.retention.weights == "all" else min(config.retention.weights, steps)
    if config.retention.weights != "all":
        # Of the best results of evals, and of the steps of an adapter's checkpoints.
        apart = len(config.eval.env) + (checkpoints if lora is not None else 0)
        held = min(held + apart, steps)
    return {
        "versions": first + held * version,
        "checkpoints": checkpoints * checkpoint,
        # Once as the trainer writes it, and once as the store takes it.
        "being written": 2 * max(checkpoint, version, first),
    }


def _remedies(shape: Shape, config: RunConfig) -> dict[str, int]:
    def needed(**changes: dict[str, Any]) -> int:
        sections = {
            name: getattr(config, name).model_copy(update=update)
            for name, update in changes.items()
        }
        return sum(disk_parts(shape, config.model_copy(update=sections)).values())

    fewest: dict[str, dict[str, dict[str, Any]]] = {
        "retention.weights = 2": {"retention": {"weights": 2}},
        "checkpoint.keep_last = 2 without checkpoint.keep_every": {
            "checkpoint": {"keep_last": 2, "keep_every": None}
        },
        'inference.dtype = "bfloat16"': {"inference": {"dtype": "bfloat16"}},
    }
    all_of_them = {name: update for changes in fewest.values() for name, update in changes.items()}
    sizes = {text: needed(**changes) for text, changes in fewest.items()}
    return {**sizes, "all of these": needed(**all_of_them)}


def problem(shape: Shape, config: RunConfig, *, free: int, where: str) -> str | None:
    """Why what a run keeps does not fit into `free` bytes of the store `where`, and what would;
    None if it fits.
    """
    parts = disk_parts(shape, config)
    needed = sum(parts.values())
    if needed <= free:
        return None
    fitting = {text: size for text, size in _remedies(shape, config).items() if size <= free}
    least = min(_remedies(shape, config).values())
    help = (
        "set " + " or ".join(f"{text} ({size / GIB:.1f} GiB)" for text, size in fitting.items())
        if fitting
        else f"with the least that its keys allow it takes {least / GIB:.1f} GiB: free some space, "
        "or name another store"
    )
    return (
        f"a run keeps some {needed / GIB:.1f} GiB ({shown(parts)}), and {where} has "
        f"{free / GIB:.1f} GiB free; {help}"
    )
