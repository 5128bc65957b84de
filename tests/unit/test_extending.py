"""The page about extensions does what it says: its blocks are written out, applied and run.

What is added to Ratchet itself is added to a copy of it, and tried in a process of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.checks import CheckInput, CheckResult
from ratchet.activities.envs.check import EnvActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring import filters
from ratchet.activities.scoring.algorithms import RolloutView, before_filters, build, lay_out
from ratchet.activities.scoring.check import check_algorithms
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training.check import check_model
from ratchet.activities.training.model import export
from ratchet.activities.training.policy import build_model
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.load import parse, validate
from tests.samples import LIMITS, SECTIONS, Copy, blocks, modules
from tests.unit.activities.training.conftest import SMALL, make_batch

USERS_FOLDER = "/home/me/code"
LONGEST, LONGEST_SEAM = 40, 50


def _write_users(section: str, folder: Path) -> None:
    for path, text in modules(SECTIONS[section]).items():
        if "/" not in path:
            (folder / path).write_text(text)


def _config(section: str, folder: Path) -> dict[str, Any]:
    """A run's config with the section's TOML, whose folder is `folder`."""
    (block,) = blocks(SECTIONS[section], "toml")
    base: dict[str, Any] = {
        "max_steps": 1,
        "train": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 16}},
        "trainer": {"threads": 1, "seq_len": 32, "micro_batch_tokens": 64},
    }
    for key, value in parse(block.replace(USERS_FOLDER, str(folder))).items():
        base[key] = {**base.get(key, {}), **value}
    return base


def _copy(section: str, root: Path) -> Copy:
    """A copy of Ratchet with what the section ships."""
    copy = Copy(root)
    copy.apply(SECTIONS[section])
    return copy


def test_every_section_is_short() -> None:
    assert set(SECTIONS) == {"an algorithm", "an env", "a filter", "a loss", *LIMITS}
    for name, text in SECTIONS.items():
        said = [line for line in text.splitlines() if line.strip() and not line.startswith("```")]
        assert 10 < len(said) + 1 < (LONGEST_SEAM if name in LIMITS else LONGEST), (
            f"{name} has {len(said) + 1} lines"
        )


# -- algorithms and filters -----------------------------------------------------------------


async def _users_credit(tmp_path: Path, rewards: list[float]) -> list[Any]:
    _write_users("an algorithm", tmp_path)
    config = validate(_config("an algorithm", tmp_path))
    assert check_algorithms(config) == []
    views = [RolloutView(i, reward, sampled_tokens=1) for i, reward in enumerate(rewards)]
    return list(await before_filters(build(config.algo, seq_len=32), views))


async def test_algorithm_of_the_user(tmp_path: Path) -> None:
    credit = await _users_credit(tmp_path, [0.25, 1.0, 1.0])
    assert [one.advantage for one in credit] == [0.0, 1.0, 1.0]


async def test_an_algorithm_does_the_work_of_a_filter(tmp_path: Path) -> None:
    slot = validate(_config("an algorithm", tmp_path)).filters.post_batch
    removed = []
    for credit in await _users_credit(tmp_path, [0.25, 1.0]):
        sample = {
            "token_ids": [7, 8],
            "loss_mask": [False, True],
            "logprobs": [0.0, -1.0],
            "versions": [-1, 0],
        }
        (streams,) = lay_out(credit, [[False, True]])
        removed.append(filters.judge(slot, [sample | streams], 1000).removed)
    assert removed == [True, False]


def test_built_in_algorithm(tmp_path: Path) -> None:
    copy = _copy("an algorithm", tmp_path)
    script = """
import asyncio, json
from ratchet.activities.scoring.algorithms import RolloutView, before_filters, build
from ratchet.configs.load import ConfigError, validate
data = {"max_steps": 1, "algo": {"type": "median"}, "train": {"env": [{"id": "e"}]}}
config = validate(data)
views = [RolloutView(i, reward, 1) for i, reward in enumerate([0.0, 0.25, 1.0])]
credit = asyncio.run(before_filters(build(config.algo, seq_len=8), views))
data["train"]["group_size"] = 1
try:
    validate(data)
    refused = ""
except ConfigError as error:
    refused = str(error)
print(json.dumps([[one.advantage for one in credit], refused]))
"""
    advantages, refused = copy.run(script)
    assert advantages == [-0.25, 0.0, 0.75]
    assert "'median'" in refused and "size 1" in refused


def test_built_in_filter(tmp_path: Path) -> None:
    copy = _copy("a filter", tmp_path)
    script = """
import json, sys
from ratchet.activities.scoring.filters import judge
from ratchet.configs.load import validate
slot = validate(json.loads(sys.argv[1])).filters.pre_batch
found = []
for mask in ([False, True, False], [False, True, True]):
    sample = {"token_ids": [1, 2, 3], "loss_mask": mask, "logprobs": [0.0, -1.0, -1.0],
                  "versions": [-1, 0, 0]}
    verdict = judge(slot, [sample], None)
    found.append([list(verdict.hits), verdict.removed])
print(json.dumps(found))
"""
    data = json.dumps(_config("a filter", tmp_path))
    assert copy.run(script, data) == [[["short"], True], [[], False]]


# -- envs -----------------------------------------------------------------------------------


@pytest.mark.nightly
async def test_env_of_the_user(tmp_path: Path) -> None:
    _write_users("an env", tmp_path)
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    given = CheckInput(_config("an env", tmp_path))
    found: CheckResult = await ActivityEnvironment().run(EnvActivities(ctx).check_envs, given)
    assert (found.problems, found.examples) == ([], {"train/spell": 3})


@pytest.mark.nightly
def test_built_in_env(tmp_path: Path) -> None:
    copy = _copy("an env", tmp_path)
    _write_users("an env", tmp_path / "activities" / "envs" / "shipped")
    script = """
import asyncio, json, sys
from pathlib import Path
from temporalio.testing import ActivityEnvironment
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.envs.check import EnvActivities
from ratchet.activities.envs.datasets import demonstrations
ctx = WorkerContext(home=Path("home"), store_url="store", own_queue="q")
given = CheckInput({"max_steps": 1, "train": {"env": [{"id": "spell"}, {"id": "spel"}]}})
found = asyncio.run(ActivityEnvironment().run(EnvActivities(ctx).check_envs, given))
said = [problem.message for problem in found.problems]
print(json.dumps([said, found.examples, demonstrations("spell", 1, 0)]))
"""
    (problem,), examples, ((asked, reply),) = copy.run(script)
    assert "did you mean 'spell'?" in problem
    assert examples == {"train/spell": 2}
    assert asked["content"] == f"spell {reply['content'].replace(' ', '')}"


# -- losses ---------------------------------------------------------------------------------


def test_loss_of_the_user(tmp_path: Path) -> None:
    _write_users("a loss", tmp_path)
    data = _config("a loss", tmp_path)
    assert check_model(validate(data)) == []
    torch.set_num_threads(1)
    policy = tmp_path / "v0"
    export(build_model(SMALL, seed=3), build_tokenizer(SMALL.max_positions), policy)
    samples = make_batch(0)
    losses = []
    for most in (0.5, 0.25):
        data["trainer"]["loss"]["kwargs"]["most"] = most
        trainer = Trainer()
        trainer.load(policy, validate(data).model_dump(mode="json"), checkpoint=False)
        metrics = trainer.train(1, encode_batch(samples), tmp_path / str(most))
        losses.append(metrics["loss"])
    # Its advantages are 0.5 and -0.5 throughout, so that half the bound is half the loss.
    assert losses[0] != 0 and losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)


def test_built_in_loss(tmp_path: Path) -> None:
    copy = _copy("a loss", tmp_path)
    script = """
import json
import torch
from ratchet.activities.training.loss import LossInputs
from ratchet.activities.training.rl_loss import build
from ratchet.configs.load import validate
loss = {"type": "reinforce"}
data = {"max_steps": 1, "train": {"env": [{"id": "e"}]}, "trainer": {"loss": loss}}
t = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
mask = torch.tensor([[True, True, False]])
inputs = LossInputs(t, t.detach(), torch.tensor([[0.5, -1.0, 9.0]]), mask)
terms = build(validate(data).trainer.loss)(inputs, [(0, 0, 3)])
terms.loss.sum().backward()
print(json.dumps([terms.loss.tolist(), t.grad.tolist()]))
"""
    assert copy.run(script) == [[[0.5, -2.0, 0.0]], [[-0.5, 1.0, 0.0]]]
