"""Helper processes end with the worker that started them, however it went."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ratchet.activities.runtime.children import PARENT, as_parent, child_env
from tests import ROOT
from tests.unit.activities.hosting import servers
from tests.unit.activities.rollouts.test_tasks import HANGS, library

CHILD = """
import os, time
from ratchet.activities.runtime.children import PARENT, end_with_parent
end_with_parent()
assert PARENT not in os.environ
print("up", flush=True)
time.sleep(60)
"""
WORKER = """
import asyncio, sys
from pathlib import Path
from temporalio.testing import ActivityEnvironment
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.contracts.training import PreparePolicyInput
from ratchet.activities.envs.check import EnvActivities
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.training.activities import TrainerActivities

home = Path(sys.argv[1])
ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="q")
run = ActivityEnvironment().run
work = {
    "prepare": lambda: run(TrainerActivities(ctx).prepare_policy, PreparePolicyInput("r")),
    "dump": lambda: run(TaskLibrary(ctx).task, "r", "train", "own-env", 0),
    "check": lambda: run(
        EnvActivities(ctx).check_envs, CheckInput(ctx.config("r").model_dump(mode="json"))
    ),
}
asyncio.run(work[sys.argv[2]]())
"""


def _child(code: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
    )


def test_children_get_no_door_to_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_API_KEY", "RATCHET_API_KEY", "RATCHET_API_KEYS"):
        monkeypatch.setenv(name, "door")
    monkeypatch.setenv("RATCHET_JUDGE_KEY", "mine")
    env = child_env({"TQDM_DISABLE": "1"}, as_parent())
    assert "door" not in env.values()
    assert (env["RATCHET_JUDGE_KEY"], env["TQDM_DISABLE"]) == ("mine", "1")
    assert PARENT in env and "PATH" in env


def test_no_process_is_started_but_with_that_environment() -> None:
    """A process that activities give an environment has it from `child_env`."""
    calls = [
        (file.name, keyword.value)
        for file in sorted((ROOT / "activities").rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(("create_subprocess_exec", ".run", "Popen"))
        for keyword in call.keywords
        if keyword.arg == "env"
    ]
    assert len(calls) >= 4
    for name, env in calls:
        assert ast.unparse(env).startswith("child_env("), (name, ast.unparse(env))


def test_a_helper_lives_with_its_parent() -> None:
    with _child(CHILD, **as_parent()) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert child.poll() is None
        child.kill()


def test_a_parent_that_went_first_is_noticed() -> None:
    with _child(CHILD, **{PARENT: str(os.getppid())}) as child:
        assert child.wait(servers.WITHIN_S) == -signal.SIGKILL
        assert child.stdout is not None and child.stdout.read() == b""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "helper", ["prepare", "dump", pytest.param("check", marks=pytest.mark.nightly)]
)
def test_a_killed_worker_leaves_no_helper(tmp_path: Path, helper: str) -> None:
    library(tmp_path, HANGS)
    module = {"prepare": "ratchet.activities.training.prepare"}.get(
        helper, f"ratchet.activities.envs.{helper}"
    )
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), helper], cwd=ROOT)
    found: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not found and time.monotonic() < deadline and worker.poll() is None:
            children = psutil.Process(worker.pid).children()
            found = [child for child in children if module in child.cmdline()]
            time.sleep(0.05)
        assert found
        # It has begun by then: what runs in main() is noticed, not only what comes after.
        while found[0].cpu_times().user < 1.0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found[0].is_running()
        worker.kill()
        worker.wait()
        gone, _ = psutil.wait_procs(found, timeout=servers.WITHIN_S)
        assert gone == found
    finally:
        worker.kill()
        worker.wait()
        for child in found:
            if child.is_running():
                child.kill()
