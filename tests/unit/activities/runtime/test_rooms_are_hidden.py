"""No process that runs users' code finds our rooms by their bare names.

The worker is started in the worst place: in the checkout, with the checkout on PYTHONPATH. Users'
code that is imported in each process says which of the names it finds.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.training import PreparePolicyInput
from ratchet.activities.envs.check import EnvActivities
from ratchet.activities.envs.host import env_spec
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.runtime.children import hide_rooms
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.algorithms.custom import load_function
from ratchet.activities.storage import keys
from ratchet.activities.training.activities import TrainerActivities
from ratchet.activities.training.client import TrainerClient, TrainerFailed
from ratchet.activities.training.model import export
from ratchet.activities.training.policy import build_model
from ratchet.activities.training.server import trainer_spec
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.configs.algorithm import CustomConfig
from ratchet.configs.load import validate
from tests import ROOT
from tests.unit.activities.training.conftest import SMALL

pytestmark = pytest.mark.nightly

FIND = """
import importlib.util
ROOMS = ("activities", "api", "configs", "worker", "workflows")
found = [name for name in ROOMS if importlib.util.find_spec(name)]
"""
RAISES = FIND + "raise LookupError(f'finds {found}')"
AT_EXIT = f"""
import atexit, json
@atexit.register
def report():
    scope = {{}}
    exec({FIND!r}, scope)
    print(json.dumps({{"problem": f"finds {{scope['found']}}"}}), flush=True)
"""
"""`prepare` imports nothing of a user's, but Python does. The path is complete after its start."""
NOTHING = "finds []"
CONFIG: dict[str, Any] = {
    "max_steps": 1,
    "model": {"name": "/no/such/model"},
    "train": {"env": [{"id": "finds-rooms"}]},
    "trainer": {"loss": {"type": "custom", "function": "finds_rooms:loss"}},
}


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerContext:
    """A worker's, after it has hidden the rooms; users' code is in a folder on PYTHONPATH."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "finds_rooms.py").write_text(RAISES)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), "", str(code)]))
    monkeypatch.setattr(sys, "path", [str(ROOT), str(code), *sys.path])
    assert importlib.util.find_spec("worker") is not None, "hiding it is what is tested"
    hide_rooms()
    assert os.environ["PYTHONPATH"] == str(code)
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config("r"), validate(CONFIG).model_dump(mode="json"))
    return ctx


async def _refused(work: Awaitable[object]) -> str:
    with pytest.raises(ApplicationError) as caught:
        await work
    return str(caught.value)


def _start(spec: ServerSpec) -> subprocess.Popen[bytes]:
    env = {**os.environ, **spec.env}
    return subprocess.Popen(spec.argv, cwd=spec.cwd, env=env, stderr=subprocess.PIPE)


async def test_check(ctx: WorkerContext) -> None:
    given = CheckInput(ctx.config("r").model_dump(mode="json"))
    found = await ActivityEnvironment().run(EnvActivities(ctx).check_envs, given)
    assert [NOTHING in problem.message for problem in found.problems] == [True], found


async def test_dump(ctx: WorkerContext) -> None:
    assert NOTHING in await _refused(TaskLibrary(ctx).task("r", "train", "finds-rooms", 0))


async def test_env_server(ctx: WorkerContext) -> None:
    host = HostInput("r", "env", 0, "q", name="finds-rooms")
    with _start(await env_spec(ctx, host, 1)) as process:
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 2 and NOTHING in said.decode()


async def test_trainer(ctx: WorkerContext, tmp_path: Path) -> None:
    policy = tmp_path / "v0"
    export(build_model(SMALL, seed=3), build_tokenizer(SMALL.max_positions), policy)
    spec = await trainer_spec(ctx, HostInput("r", "trainer", 0, "q"), 1)
    with _start(spec) as process:
        try:
            async with asyncio.timeout(60):
                while not await spec.probe():
                    assert process.poll() is None
                    await asyncio.sleep(0.1)
            with pytest.raises(TrainerFailed) as caught:
                config = ctx.config("r").model_dump(mode="json")
                await TrainerClient(spec.address).load(policy, config, checkpoint=False)
        finally:
            process.kill()
    assert NOTHING in str(caught.value)


async def test_prepare(ctx: WorkerContext, tmp_path: Path) -> None:
    (tmp_path / "code" / "sitecustomize.py").write_text(AT_EXIT)
    prepare = TrainerActivities(ctx).prepare_policy
    assert NOTHING in await _refused(ActivityEnvironment().run(prepare, PreparePolicyInput("r")))


def test_scoring(ctx: WorkerContext) -> None:
    with pytest.raises(CreditError, match="LookupError") as caught:
        load_function(CustomConfig(type="custom", function="finds_rooms:credit"))
    assert NOTHING in str(caught.value)
