"""Users' code may have modules that are named like our rooms.

A run trains a user's env, with an algorithm and a loss of theirs, on a whole stack. Next to the env
lie modules with the names of all rooms, and others of the same names next to algorithm and loss;
each is used, so that one import of the wrong module ends the run. The stack is started once from
the checkout, where our own rooms lie in the working folder and on PYTHONPATH, and once from an
installed wheel.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.configs.load import load
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT
from tests.e2e.driving import ENDED, TEMPORAL, get, processes_of, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.stack]

STEPS = 2
ENV = {
    "activities/__init__.py": "def answer(word): return word[::-1]",
    "api.py": "def prompt(word): return f'reverse {word}'",
    "configs/__init__.py": "from configs.words import WORDS",
    "configs/words.py": "WORDS = ['ratchet', 'pawl', 'gear', 'tooth', 'wheel', 'spring', 'lever']",
    "worker.py": """
from difflib import SequenceMatcher
def alike(reply, answer): return SequenceMatcher(None, reply, answer).ratio()
""",
    "workflows.py": "CUT_OFF = 0.0",
    "machine.py": """
import verifiers.v1 as vf
from activities import answer
from api import prompt
from configs import WORDS
from worker import alike
from workflows import CUT_OFF

class MachineData(vf.TaskData):
    word: str

class MachineTask(vf.Task[MachineData]):
    @vf.reward(weight=1.0)
    async def reversed(self, trace: vf.Trace) -> float:
        if trace.is_truncated:
            return CUT_OFF
        return alike(trace.last_reply, answer(self.data.word))

class MachineTaskset(vf.Taskset[MachineTask, vf.TasksetConfig]):
    def load(self):
        for word in WORDS:
            data = MachineData(id=word, prompt=prompt(word), word=word)
            yield MachineTask(data, self.config.task)

__all__ = ["MachineTaskset"]
""",
}
CODE = {
    "activities/__init__.py": "LEAST = 1e-6",
    "api.py": "def mean(numbers): return sum(numbers) / len(numbers)",
    "configs/__init__.py": "MOST = 5.0",
    "worker.py": "def bounded(tensor, most): return tensor.clamp(-most, most)",
    "workflows.py": "def shifted(numbers, middle): return [n - middle for n in numbers]",
    "my_credit.py": """
from activities import LEAST
from api import mean
from workflows import shifted
def above_mean(rollouts):
    rewards = [rollout.reward for rollout in rollouts]
    return [one + LEAST for one in shifted(rewards, mean(rewards))]
""",
    "my_loss.py": """
from configs import MOST
from worker import bounded
def clipped(inputs): return -bounded(inputs.advantages, MOST) * inputs.trainer_logprobs
""",
}


@dataclass(frozen=True)
class Installed:
    """An interpreter that has Ratchet, where it is started, and what PYTHONPATH it is given."""

    python: Path
    folder: Path
    pythonpath: list[Path]


def _write(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def _wheel(folder: Path) -> Installed:
    """A fresh virtual environment with a wheel of the checkout, and the packages of this one."""
    venv, here = folder / "venv", Path(sys.executable).parent
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = [str(here / "uv"), "pip", "install", "-q", "--offline", "--no-deps"]
    subprocess.run([*install, "--python", str(python), str(wheel)], check=True, timeout=60)
    (site,) = venv.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder, and runs no .pth files there: no editable install.
    (site / "others.pth").write_text(sysconfig.get_path("platlib") + "\n")
    (venv / "bin" / "temporal").symlink_to(TEMPORAL)
    asked = "import ratchet.worker; print(ratchet.worker.__file__)"
    done = subprocess.run([python, "-P", "-c", asked], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == site / "ratchet" / "worker" / "__init__.py"
    importable = {path.name for path in site.iterdir() if path.suffix not in (".pth", ".dist-info")}
    assert importable == {"ratchet"}
    return Installed(python, folder, [])


@pytest.fixture(params=["checkout", "wheel"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Installed:
    if request.param == "wheel":
        return _wheel(tmp_path)
    return Installed(Path(sys.executable), ROOT, [ROOT])


@pytest.fixture
def place(installed: Installed, stack: Stack, tmp_path: Path) -> Iterator[tuple[Stack, Addresses]]:
    """A stack that `installed` started, with the users' code on its PYTHONPATH."""
    home = tmp_path / "home"
    code = _write(CODE, tmp_path / "code")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*installed.pythonpath, code])),
        "RATCHET_HOME": str(home),
        # With the store of other tests it finds its policy there.
        "RATCHET_STORE": f"file://{stack.home}/store",
    }

    def command(verb: str) -> None:
        subprocess.run(
            [installed.python, "-m", "ratchet.worker.stack", verb],
            cwd=installed.folder,
            env=environment,
            check=True,
            timeout=180,
        )

    try:
        command("up")
        own = Stack(home)
        yield own, own.addresses()
    finally:
        command("down")
        assert not processes_of(home)


def test_a_users_modules_have_the_names_of_rooms(
    place: tuple[Stack, Addresses], tmp_path: Path
) -> None:
    _, where = place
    env = {"id": "machine", "path": str(_write(ENV, tmp_path / "envs"))}
    small = [f"max_steps={STEPS}", "train.batch_size=16", "train.group_size=4"]
    example = load(ROOT / "configs" / "examples" / "reverse_text.toml", small)
    config: dict[str, Any] = example.model_dump(mode="json", exclude={"eval"}, exclude_unset=True)
    config["train"]["env"] = [env]
    config["algo"] = {"type": "custom", "function": "my_credit:above_mean"}
    config.setdefault("trainer", {})["loss"] = {"type": "custom", "function": "my_loss:clipped"}
    reply = httpx.post(f"{where.api}/v1/runs", json=config, timeout=120)
    assert reply.status_code == 201, reply.text
    run = wait_until(where, reply.json()["id"], lambda run: run["status"] in ENDED)
    assert run["status"] == "succeeded" and run["step"] == STEPS, run
    steps = get(where, f"/v1/runs/{run['id']}/metrics")["data"]
    assert all(0 < step["metrics"]["reward/all/mean"] < 1 for step in steps), steps
