"""An optimizer whose moments are kept away from its parameters steps to the same bits.

On a CPU the moments are copied from memory to memory; what only a GPU can show is at the end.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ratchet.activities.runtime import machine
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training import memory
from ratchet.activities.training.bits import WEIGHTS, first_difference
from ratchet.activities.training.check import check_model, estimates
from ratchet.activities.training.memory import GIB, Shape, host_parts, trainer_parts
from ratchet.activities.training.optimizers import Optimizer
from ratchet.activities.training.trainer import OPTIMIZER_FILE, Trainer
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.trainer import AdamWConfig
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_check import config as check_config
from tests.unit.activities.training.test_settings import config

LARGE = Shape(layers=36, hidden=2560, heads=4096, kv_heads=1024, inner=9728, vocab=151936)
SECTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optim": {"type": "sgd", "lr": 1e-1}},
    "muon": {"optim": {"type": "muon", "lr": 1e-2}},
    "lora": {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}},
}


def trained(policy: Path, out: Path, given: dict[str, Any], other: dict[str, Any]) -> Path:
    """Three steps, the third by a trainer of the config `other` that loads what the first saved;
    the folder of a last checkpoint.
    """
    trainer = Trainer()
    trainer.load(policy, given, checkpoint=False)
    for step in (1, 2, 3):
        if step == 3:
            trainer.save(2, out / "checkpoint")
            base = policy if given["trainer"].get("lora") else None
            trainer = Trainer()
            trainer.load(out / "checkpoint", other, checkpoint=True, base=base)
        trainer.train(step, encode_batch(make_batch(step)), out / str(step))
    trainer.save(3, out / "end")
    return out


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_steps_and_checkpoints_have_the_bits_of_those_of_any_other(
    tmp_path: Path, policy: Path, section: dict[str, Any]
) -> None:
    plain, offloaded = config(**section), config(**section, offload_optimizer=True)
    expected = trained(policy, tmp_path / "plain", plain, plain)
    for name, pair in {"both": (offloaded, offloaded), "then": (plain, offloaded)}.items():
        out = trained(policy, tmp_path / name, *pair)
        for folder in ("checkpoint", "end"):
            ours, theirs = out / folder, expected / folder
            assert first_difference(ours, theirs, OPTIMIZER_FILE) is None
        assert first_difference(out / "3", expected / "3", WEIGHTS) is None
    assert first_difference(expected / "2", expected / "3", WEIGHTS) is not None


@pytest.fixture
def stepped() -> Iterator[list[dict[str, int]]]:
    """Where the moments of each torch optimizer lie, by name, when it has made a step."""
    seen: list[dict[str, int]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moments = [m for m in optimizer.state.values()]
        assert len(moments) == 1, "one parameter at a time"
        seen.append({name: value.data_ptr() for name, value in moments[0].items()})

    hook = register_optimizer_step_post_hook(look)
    yield seen
    hook.remove()


def test_moments_of_one_parameter_at_a_time_are_brought_and_go_home_again(
    stepped: list[dict[str, int]],
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, AdamWConfig(), offload=True)
    homes: list[dict[str, int]] = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-3)
        homes.append({name: value.data_ptr() for name, value in optimizer.state().items()})
    assert homes[0] == homes[1] == homes[2] and len(stepped) == 3 * 2
    for name, at_hand in zip(("weight", "bias"), stepped[2:4], strict=True):
        assert at_hand["step"] == homes[0][f"step/{name}"]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert at_hand[moment] != homes[0][f"{moment}/{name}"]


@pytest.mark.parametrize(
    "optim", [{"type": "signsgd"}, {"type": "sgd", "momentum": 0.0}], ids=["signsgd", "sgd"]
)
def test_an_optimizer_without_moments_has_none_to_offload(optim: dict[str, Any]) -> None:
    trainer = {"optim": optim, "offload_optimizer": True}
    data = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}, "trainer": trainer}
    with pytest.raises(ConfigError) as caught:
        validate(data)
    (problem,) = caught.value.problems
    assert problem.pointer == "/trainer" and "keeps none" in problem.message
    validate({**data, "trainer": {**trainer, "optim": {"type": "sgd"}}})


# -- the estimate, and what is refused ----------------------------------------------------------


def parts(*, gpu: bool = True, **trainer: Any) -> dict[str, int]:
    section = {"seq_len": 512, "micro_batch_tokens": 4096, **trainer}
    return trainer_parts(LARGE, check_config({}, **section), gpu=gpu)


def test_a_gpu_holds_the_moments_of_the_largest_parameter_alone() -> None:
    plain, offloaded = parts(), parts(offload_optimizer=True)
    one = 12 * LARGE.vocab * LARGE.hidden
    beside = plain["activations"] + plain["head"]
    assert plain["moments"] == 8 * LARGE.parameters
    assert offloaded["moments"] == max(one - beside, 0)
    less = {"micro_batch_tokens": 512, "activation_checkpointing": True}
    small = parts(offload_optimizer=True, **less)
    assert small["moments"] == one - small["activations"] - small["head"] > 0
    assert {**plain, "moments": 0} == {**offloaded, "moments": 0}
    assert parts(gpu=False) == parts(gpu=False, offload_optimizer=True)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_machine_holds_the_moments_of_all_ranks(ranks: int) -> None:
    section = {"seq_len": 512, "offload_optimizer": True, "ranks": ranks}
    run = check_config({}, **section)
    assert host_parts(LARGE, run)["moments"] == pytest.approx(8 * LARGE.parameters, rel=1e-9)
    needed = sum(host_parts(LARGE, run).values())
    assert memory.host_problem(LARGE, run, room=needed) is None
    text = memory.host_problem(LARGE, run, room=needed - 1)
    assert text is not None and f"{needed / GIB:.1f} GiB (moments" in text
    assert "set it to false" in text


def test_offloading_is_named_where_it_helps() -> None:
    run = check_config({}, seq_len=512, micro_batch_tokens=512)
    plain, offloaded = (
        sum(parts(micro_batch_tokens=512, **keys).values())
        for keys in ({}, {"offload_optimizer": True})
    )
    text = memory.problem(LARGE, run, room=plain - GIB, gpu=True)
    assert text is not None
    assert f"trainer.offload_optimizer = true ({offloaded / GIB:.1f} GiB)" in text
    text = memory.problem(LARGE, run, room=plain - GIB, gpu=False)
    assert text is not None and "offload" not in text
    text = memory.exhausted(LARGE, run, "boom", room=plain, gpu=True)
    assert "trainer.offload_optimizer = true" in text
    less = check_config({}, seq_len=512, optim={"type": "signsgd"})
    text = memory.problem(LARGE, less, room=GIB, gpu=True)
    assert text is not None and "offload" not in text


def test_without_a_gpu_it_is_refused(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = check_config({"name": str(policy)}, offload_optimizer=True)
    (problem,) = check_model(run)
    assert problem.key == "trainer.offload_optimizer" and problem.pointer[1:] in (
        "trainer/offload_optimizer"
    )
    assert "no GPU" in problem.message and "set it to false" in problem.message
    assert check_model(run, restored=True) == [], "it goes on wherever it can"
    monkeypatch.setattr(machine, "cpu_torch", lambda: False)
    monkeypatch.setattr(machine, "gpus", lambda: [80 * GIB])
    assert check_model(run) == []
    assert estimates(run, LARGE)["trainer memory beside the GPU"] == host_parts(LARGE, run)
    monkeypatch.setattr(machine, "memory", lambda: 2**20)
    (problem,) = check_model(run)
    assert problem.key == "trainer.offload_optimizer" and "beside its GPU" in problem.message
    assert check_model(run, restored=True) == []


# -- on a GPU -----------------------------------------------------------------------------------


class Layers(torch.nn.Sequential):
    """Says which of its layers embed. It refers to itself nowhere: its memory goes when it does."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self[0]

    get_output_embeddings = get_input_embeddings


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_on_a_gpu_it_takes_less_and_has_the_same_bits(kind: str) -> None:
    sections = {"adamw": {}, "sgd": {"type": "sgd"}, "muon": {"type": "muon"}}
    optim = check_config({}, optim=sections[kind]).trainer.optim

    def made(offload: bool) -> tuple[Any, int]:
        torch.manual_seed(0)
        model = Layers(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
        optimizer = Optimizer(model, optim, offload=offload)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(1e-3)
        held = torch.cuda.memory_allocated()
        return {**model.state_dict(), **optimizer.state()}, held

    plain, more = made(False)
    plain = {name: value.cpu() for name, value in plain.items()}
    offloaded, less = made(True)
    assert all(torch.equal(plain[name], offloaded[name].cpu()) for name in plain)
    assert more - less > 0.9 * 4 * 8 * 2048**2
