"""Every optimizer, schedule, loss and layout: a resumed step has the bits of one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.model import load_model
from ratchet.activities.training.optimizers import Optimizer, hidden_matrices
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.trainer import AdamWConfig, MuonConfig, SignSgdConfig
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG


def config(**trainer: Any) -> dict[str, Any]:
    return {**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}}


def trained(policy: Path, out: Path, given: dict[str, Any], *, resume: bool) -> Path:
    trainer = Trainer()
    trainer.load(policy, given, checkpoint=False)
    for step in (1, 2, 3):
        if resume and step == 3:
            trainer.save(2, out / "checkpoint")
            trainer = Trainer()
            trainer.load(out / "checkpoint", given, checkpoint=True)
        metrics = trainer.train(step, encode_batch(make_batch(step)), out / str(step))
    assert metrics["loss"] == metrics["loss"] and metrics["lr"] > 0
    return out / "3" / "model.safetensors"


@pytest.mark.parametrize(
    "section",
    [
        {"packing": True},
        {"packing": False},
        {"packing": True, "optim": {"type": "muon", "lr": 1e-2}},
        {"optim": {"type": "sgd", "lr": 1e-1}},
        {"optim": {"type": "sgd", "lr": 1e-1, "momentum": 0.0}},
        {"optim": {"type": "signsgd", "lr": 1e-3}},
        {"scheduler": {"type": "linear", "warmup_steps": 1, "decay_steps": 2}},
        {"scheduler": {"type": "cosine", "warmup_steps": 1}, "loss": {"type": "ipo"}},
    ],
)
def test_resume_is_bitwise(tmp_path: Path, policy: Path, section: dict[str, Any]) -> None:
    given = config(**section)
    straight = load_file(trained(policy, tmp_path / "a", given, resume=False))
    resumed = load_file(trained(policy, tmp_path / "b", given, resume=True))
    start = load_file(policy / "model.safetensors")
    assert all(straight[name].equal(resumed[name]) for name in straight)
    assert not all(straight[name].equal(start[name]) for name in straight)


def test_a_step_has_the_threads_that_the_config_names(policy: Path) -> None:
    torch.set_num_threads(2)
    Trainer().load(policy, config(threads=1), checkpoint=False)
    assert torch.get_num_threads() == 1


def test_packed_and_padded_steps_agree(tmp_path: Path, policy: Path) -> None:
    metrics = {}
    for packing in (True, False):
        trainer = Trainer()
        trainer.load(policy, config(packing=packing), checkpoint=False)
        batch = encode_batch(make_batch(5, 20))
        metrics[packing] = trainer.train(1, batch, tmp_path / str(packing))
    assert metrics[True]["micro_batches"] < metrics[False]["micro_batches"]
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "is_masked", "tokens"):
        assert metrics[True][name] == pytest.approx(metrics[False][name], rel=1e-4)


def test_learning_rate_follows_the_schedule(tmp_path: Path, policy: Path) -> None:
    trainer = Trainer()
    schedule = {"type": "linear", "warmup_steps": 2, "decay_steps": 0, "min_lr": 1e-3}
    trainer.load(policy, config(scheduler=schedule), checkpoint=False)
    rates = [
        trainer.train(step, encode_batch(make_batch(step)), tmp_path / str(step))["lr"]
        for step in (1, 2, 3)
    ]
    assert rates == pytest.approx([1e-3, 5.5e-3, 1e-2])


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, policy: Path) -> None:
    trainer = Trainer()
    trainer.load(policy, config(), checkpoint=False)
    trainer.train(1, encode_batch(make_batch(0)), tmp_path / "1")
    trainer.save(1, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="'adamw'"):
        Trainer().load(tmp_path / "checkpoint", config(optim={"type": "muon"}), checkpoint=True)


def test_packing_leaves_no_mark_on_the_exported_model(tmp_path: Path, policy: Path) -> None:
    trainer = Trainer()
    trainer.load(policy, config(packing=True), checkpoint=False)
    trainer.train(1, encode_batch(make_batch(0)), tmp_path / "1")
    assert "ratchet_packed" not in (tmp_path / "1" / "config.json").read_text()


def test_muon_moves_the_matrices_of_the_layers(policy: Path) -> None:
    model = load_model(policy)
    ids = {id(parameter) for parameter in hidden_matrices(model)}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in ids]
    assert names and all(".layers." in name for name in names)
    optimizer = Optimizer(model, MuonConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    kinds = {key.partition("/")[0] for key in optimizer.state() if "layers.0.mlp" in key}
    assert kinds == {"momentum_buffer"}
    assert "exp_avg/lm_head.weight" in optimizer.state()


def test_sign_sgd() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    model.weight.grad = torch.tensor([[5.0, -0.1]])
    optimizer = Optimizer(model, SignSgdConfig(weight_decay=0.5))
    optimizer.step(0.1)
    torch.testing.assert_close(model.weight.data, torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]))


@pytest.mark.parametrize(
    ("trainer", "pointer", "says"),
    [
        ({"optim": {"type": "moun"}}, "/trainer/optim/type", "did you mean 'muon'"),
        ({"optim": {"type": "sgd", "betas": [0, 0]}}, "/trainer/optim/betas", "its options"),
        ({"optim": {"type": "sgd", "momentum": 0, "nesterov": True}}, "/trainer/optim", "momentum"),
        ({"scheduler": {}}, "/trainer/scheduler/type", "is required"),
        ({"scheduler": {"type": "cosine", "min_lr": 1.0}}, "/trainer", "min_lr"),
        ({"loss": {"type": "custom"}}, "/trainer/loss/function", "required"),
        ({"loss": {"type": "custom", "function": "f"}}, "/trainer/loss/function", "module:"),
        ({"packing": "sure"}, "/trainer/packing", "bool"),
    ],
)
def test_mistakes_are_named(trainer: dict[str, Any], pointer: str, says: str) -> None:
    data = {"max_steps": 30, "train": {"env": [{"id": "reverse-text"}]}, "trainer": trainer}
    with pytest.raises(ConfigError) as caught:
        validate(data)
    (problem,) = caught.value.problems
    assert problem.pointer == pointer and says in problem.message


def test_optimizers_that_begin_with_one_state_go_their_own_ways() -> None:
    def made() -> tuple[torch.nn.Linear, Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        return model, Optimizer(model, AdamWConfig())

    def step(model: torch.nn.Linear, optimizer: Optimizer, slope: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, slope)
        optimizer.step(1e-3)

    first = made()
    step(*first, 1.0)
    state = {name: value.clone() for name, value in first[1].state().items()}
    kept = {name: value.clone() for name, value in state.items()}
    second = made()
    second[1].restore(state)
    step(*second, -5.0)
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert not torch.equal(second[1].state()["exp_avg/weight"], kept["exp_avg/weight"])
