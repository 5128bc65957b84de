"""Learning rates against torch's own schedulers, step by step."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ratchet.activities.training.schedules import learning_rate
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
)

LR = 2e-3


def rates_of(build: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = build(optimizer)
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(2, 12), st.integers(0, 20), st.sampled_from([0.0, 1e-4]))
def test_linear(warmup: int, decay: int, level: int, min_lr: float) -> None:
    steps = warmup + level + decay
    low = min_lr / LR or 1e-8

    def build(optimizer: Any) -> Any:
        parts = [
            LinearLR(optimizer, low, 1.0, warmup),
            LinearLR(optimizer, 1.0, 1.0, level),
            LinearLR(optimizer, 1.0, low, decay - 1),
        ]
        return SequentialLR(optimizer, parts, milestones=[warmup, warmup + level])

    config = LinearScheduleConfig(warmup_steps=warmup, decay_steps=decay, min_lr=min_lr)
    ours = [learning_rate(config, LR, taken, steps) for taken in range(steps)]
    assert ours == pytest.approx(rates_of(build, steps), rel=1e-9)
    assert ours[0] == pytest.approx(LR * low) and ours[-1] == pytest.approx(LR * low)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.sampled_from([0.0, 1e-4]))
def test_cosine(warmup: int, fall: int, min_lr: float) -> None:
    steps = warmup + fall

    def build(optimizer: Any) -> Any:
        parts = [
            LinearLR(optimizer, min_lr / LR or 1e-8, 1.0, warmup),
            CosineAnnealingLR(optimizer, fall, min_lr),
        ]
        return SequentialLR(optimizer, parts, milestones=[warmup])

    config = CosineScheduleConfig(warmup_steps=warmup, min_lr=min_lr)
    ours = [learning_rate(config, LR, taken, steps) for taken in range(steps)]
    assert ours == pytest.approx(rates_of(build, steps), rel=1e-9, abs=1e-15)


def test_edges() -> None:
    assert learning_rate(ConstantScheduleConfig(), LR, 7, 3) == LR
    level = LinearScheduleConfig(warmup_steps=0, decay_steps=0)
    assert [learning_rate(level, LR, taken, 3) for taken in range(5)] == [LR] * 5
    once = LinearScheduleConfig(warmup_steps=0, decay_steps=1)
    assert learning_rate(once, LR, 2, 3) == LR
    beyond = LinearScheduleConfig(warmup_steps=1, decay_steps=2)
    assert learning_rate(beyond, LR, 9, 5) == learning_rate(beyond, LR, 4, 5)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"type": "linear"}, "do not fit"),
        ({"type": "cosine", "warmup_steps": 12}, "leaves none of"),
    ],
)
def test_schedules_longer_than_the_run(scheduler: dict[str, Any], says: str) -> None:
    trainer = {"scheduler": scheduler}
    data = {"train": {"env": [{"id": "reverse-text"}]}, "trainer": trainer}
    with pytest.raises(ValueError, match=says):
        RunConfig.model_validate({**data, "max_steps": 12})
    RunConfig.model_validate({**data, "max_steps": 40})


MINIMAL: dict[str, Any] = {"train": {"env": [{"id": "a"}]}}


def test_a_run_without_an_end_never_falls() -> None:
    """It may warm up; a schedule that falls towards its last step is refused, with both keys."""
    warm = {"type": "linear", "warmup_steps": 4, "decay_steps": 0}
    for scheduler in ({"type": "constant"}, warm):
        made = validate({**MINIMAL, "max_steps": None, "trainer": {"scheduler": scheduler}})
        rates = [
            learning_rate(made.trainer.scheduler, 1.0, taken, made.last_step)
            for taken in (0, 2, 4, 10**7)
        ]
        assert rates[2:] == [1.0, 1.0] and rates[0] <= rates[1] <= 1.0
    for scheduler in ({"type": "cosine"}, {"type": "linear", "decay_steps": 5}):
        with pytest.raises(ConfigError) as caught:
            validate({**MINIMAL, "max_steps": None, "trainer": {"scheduler": scheduler}})
        assert "trainer.scheduler.type" in str(caught.value) and "max_steps" in str(caught.value)
