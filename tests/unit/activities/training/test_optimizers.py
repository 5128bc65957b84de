"""What all optimizers share."""

from pathlib import Path

from ratchet.activities.training.model import load_model
from ratchet.activities.training.optimizers import Optimizer
from ratchet.configs.upgrades import read_config
from tests.unit.activities.training.test_process import CONFIG


def test_gradients_that_are_forgotten_take_no_memory(policy: Path) -> None:
    model = load_model(policy)
    optimizer = Optimizer(model, read_config(CONFIG).trainer.optim)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
