"""Estimates the disk space that a run takes in its store, by part, from its config alone.

Pure. Sizes are in bytes. Weights, moments, adapters, rollouts with their groups and batches are
counted; tokenizer, run state and step records are small in comparison. How long rollouts will be is
unknown before: each counts as one sequence of the most tokens. Those that filters discard, an eval
of a whole set and the texts of long conversations do not count.
"""

import math
from typing import Any

from ratchet.activities.training.memory import BYTES, GIB, Shape, adapter_size, shown
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import OptimizerConfig

MOMENTS = {"adamw": 2, "muon": 2, "sgd": 1, "signsgd": 0}
"""Moments for each trained parameter, in float32; Muon has one for matrices and two for others."""
PER_ROLLOUT = 4096
"""Bytes of a rollout and its part of a group without tokens, as measured in the demo."""
ROLLOUT_TOKEN, GROUP_TOKEN = 10.2, 8.8
BATCH_TOKEN, SCORE_TOKEN = 7.5, 5.7
"""Bytes of a token in each of its files, as measured in docs/benchmarks.md (`make bench-batches`).
"""
FIRST_STEPS = 100
"""Steps that the estimate covers: a run that keeps everything would fill any disk in the end."""


def checkpoint_bytes(trained: int, optim: OptimizerConfig) -> int:
    """Bytes of a checkpoint of `trained` parameters, at most: they and their moments in float32."""
    return 4 * trained * (1 + MOMENTS[optim.type])


def _train_rollouts(config: RunConfig) -> tuple[int, int]:
    """Rollouts of a step and their tokens, at most; of a batch that is counted in tokens, those of
    its longest rollouts.
    """
    longest, train = config.trainer.seq_len, config.train
    if train.token_batch_size is not None:
        return math.ceil(train.token_batch_size / longest), train.token_batch_size
    assert train.batch_size is not None
    return train.batch_size, train.batch_size * longest


def _kept_since_checkpoint(config: RunConfig, steps: int) -> int:
    """Steps since the oldest checkpoint that is kept, when the next one is due."""
    kept = config.checkpoint
    if kept.keep_every is not None:
        return steps
    return min(kept.interval * (kept.keep_last + 1), steps)


def _rollout_bytes(config: RunConfig, steps: int) -> int:
    """Rollouts and groups that are kept: of the newest steps, and since the oldest checkpoint."""
    kept = steps
    if config.retention.rollouts != "all":
        since = _kept_since_checkpoint(config, steps)
        kept = min(max(config.retention.rollouts + config.checkpoint.interval, since), steps)
    token = ROLLOUT_TOKEN + GROUP_TOKEN
    size = 0.0
    if config.trains:
        rollouts, tokens = _train_rollouts(config)
        size += kept * (PER_ROLLOUT * rollouts + token * tokens)
    for env in config.eval.env:
        played = max(config.eval_num_examples(env.name), 0) * config.eval_group_size(env.name)
        evals = kept // config.eval_interval(env.name) + 1
        size += evals * played * (PER_ROLLOUT + token * config.trainer.seq_len)
    return int(size)


def _batch_bytes(config: RunConfig, steps: int) -> int:
    """Batches that are kept, with the trainer's scores of their tokens."""
    if not config.trains:
        return 0
    kept = steps
    if config.retention.batches != "all":
        kept = _kept_since_checkpoint(config, steps)
    return int(kept * (BATCH_TOKEN + SCORE_TOKEN) * _train_rollouts(config)[1])


def disk_parts(shape: Shape, config: RunConfig) -> dict[str, int]:
    """Bytes of each part when the run holds most: all that retention keeps while another checkpoint
    is written. Of what is kept for good, the first FIRST_STEPS steps count.
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
        # The best version of each eval, and with an adapter that of each checkpoint.
        apart = len(config.eval.env) + (checkpoints if lora is not None else 0)
        held = min(held + apart, steps)
    return {
        "rollouts": _rollout_bytes(config, steps),
        "batches": _batch_bytes(config, steps),
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
        "retention.rollouts = 1": {"retention": {"rollouts": 1}},
        'retention.batches = "checkpoint"': {"retention": {"batches": "checkpoint"}},
    }
    all_of_them: dict[str, dict[str, Any]] = {}
    for changes in fewest.values():
        for name, update in changes.items():
            all_of_them[name] = {**all_of_them.get(name, {}), **update}
    sizes = {text: needed(**changes) for text, changes in fewest.items()}
    return {**sizes, "all of these": needed(**all_of_them)}


def problem(shape: Shape, config: RunConfig, *, free: int, where: str) -> str | None:
    """Why a run does not fit into the `free` bytes of the store `where`, and what helps; None if it
    fits.
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
        else f"even with the smallest settings it keeps {least / GIB:.1f} GiB: free some "
        "space, or name another store"
    )
    return (
        f"the run keeps about {needed / GIB:.1f} GiB ({shown(parts)}), and {where} has "
        f"{free / GIB:.1f} GiB free; {help}"
    )
