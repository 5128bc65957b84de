"""The learning rate of a step: constant, linear (warmup, stable, decay) or cosine.

Invariant: the rate is a pure function of the config, the run's length and the number of steps
before, so a resumed run needs only its step to continue with the same bits.

Steps are counted from 0 here: `taken` is the number of optimizer steps already made.
"""

from __future__ import annotations

import math

from ratchet.configs.trainer import SchedulerConfig

VANISHING = 1e-8
"""Share of the rate used instead of 0 at the ends of a line, where a rate of 0 would do nothing."""


def learning_rate(config: SchedulerConfig, lr: float, taken: int, max_steps: float) -> float:
    """Rate of the step after `taken` steps of a run of `max_steps`; `lr` is the optimizer's.

    Beyond `max_steps` the last rate holds. `max_steps` is infinite for a run without an end, whose
    schedule never falls.
    """
    if config.type == "constant":
        return lr
    low = config.min_lr / lr if config.min_lr > 0 else VANISHING
    if taken < config.warmup_steps:
        return lr * (low + (1.0 - low) * taken / config.warmup_steps)
    if config.type == "linear":
        # The decay has decay_steps points, both ends included.
        into_decay = taken - (max_steps - config.decay_steps)
        if into_decay <= 0 or config.decay_steps == 1:
            return lr
        share = min(into_decay / (config.decay_steps - 1), 1.0) if config.decay_steps else 0.0
        return lr * (1.0 + (low - 1.0) * share)
    span = max_steps - config.warmup_steps
    share = min((taken - config.warmup_steps) / span, 1.0)
    return config.min_lr + (lr - config.min_lr) * (1.0 + math.cos(math.pi * share)) / 2.0
