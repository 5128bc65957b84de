"""The whole machine goes down in the middle of a run, and `make up` brings it back.

Everything is ended at one moment, as by a power cut: the supervisor, Temporal, the API, every
worker, every keeper and the servers that they keep, so that nothing can clean up after anything
else. What such a moment
may leave on the disk is put there as well: a torn stack.json, a torn record of a server, and the
record of a server under a boot that is over. This stack has a home of its own, since the others'
must stay up.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.hosting import reaper
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT
from tests.e2e.driving import ENDED, ENGINE, get, launch, processes_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

STEPS = 12
GROUPS = 4
"""In a batch."""
CUT_AT = 3
BACK_WITHIN_S = 10.0
EARLIER_BOOT = "0f0f0f0f-0000-4000-8000-000000000000/pid:[4026531836]"
PARTS = {
    "supervisor": "-m ratchet.worker.supervisor",
    "Temporal": "server start-dev",
    "API": "-m ratchet.api",
    **{f"{role} worker": f"-m ratchet.worker --roles {role}" for role in WORKER_ROLES},
    "keeper": "hosting/keeper.py",
    "engine": ENGINE,
    "env server": "ratchet.activities.envs.server",
    "trainer": "ratchet.activities.training.process",
}
"""What the command line of each part of the machine has."""


@dataclass(frozen=True)
class Survived:
    """A run that outlived its machine."""

    home: Path
    where: Addresses
    run_id: str
    before: Any
    """What the API last reported of the run before the cut."""
    after: Any
    """What it first reported once the machine was back."""
    run: Any
    """How the run ended."""


def make_up(home: Path) -> Addresses:
    """What `make up` does."""
    command = [sys.executable, "-m", "ratchet.worker.stack", "up"]
    env = {**os.environ, "RATCHET_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return Stack(home).addresses()


def _over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def cut_the_power(home: Path) -> None:
    """SIGKILL to every process of the stack, with the witness that all are gone."""
    missing = [part for part, command in PARTS.items() if not processes_of(home, command)]
    assert not missing, f"{missing} do not run"
    # Stopped first, so that none can act between the kills; until nothing new is found, since
    # what is not stopped yet may still start something.
    victims: set[psutil.Process] = set()
    while fresh := set(processes_of(home)) - victims:
        for process in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        victims |= fresh
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 20
    while left := [process for process in victims if not _over(process)]:
        assert time.monotonic() < deadline, f"{left} cannot be killed"
        time.sleep(0.05)
    assert processes_of(home) == []


def tear(file: Path) -> None:
    """Leaves half of a file, as a crash does whose file system had not written the rest."""
    data = file.read_bytes()
    assert len(data) > 1
    file.write_bytes(data[: len(data) // 2])


def damage(home: Path) -> list[Path]:
    """Does to the records what a crash and a boot do; returns those that are worth nothing now."""
    records = {record.host.partition("/")[0]: record.path for record in reaper.records(home)}
    assert set(records) >= {"engine", "env", "trainer"}, records
    tear(home / "stack.json")
    tear(records["engine"])
    written = json.loads(records["trainer"].read_bytes())
    records["trainer"].write_text(json.dumps({**written, "machine": EARLIER_BOOT}))
    # That of the env server stays whole: a boot may also be as quick as a container's restart.
    return [records["engine"], records["trainer"]]


def shown(
    where: Addresses, run_id: str, statuses: tuple[str, ...] = (), within_s: float = 60
) -> Any:
    """What the API tells of a run, once its status is one of `statuses` if any are given."""
    deadline = time.monotonic() + within_s
    last: Any = None
    while time.monotonic() < deadline:
        # Temporal may need a moment to find its feet, and the API says so.
        with contextlib.suppress(httpx.HTTPError):
            last = get(where, f"/v1/runs/{run_id}")
            if not statuses or last["status"] in statuses:
                return last
        time.sleep(0.3)
    raise AssertionError(f"within {within_s} s the run came no further than {last}")


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    """A small run whose machine went down at CUT_AT and came back."""
    os.environ.pop("TEMPORAL_ADDRESS", None)
    home = tmp_path_factory.mktemp("machine")
    try:
        where = make_up(home)
        small = ["train.batch_size=16", f"train.group_size={16 // GROUPS}", "eval.env=[]"]
        kept = ["retention.batches=all", "checkpoint.interval=2"]
        run_id = launch(where, "reverse_text", f"max_steps={STEPS}", *small, *kept)
        before = wait_until(where, run_id, lambda run: run["step"] >= CUT_AT)
        cut_the_power(home)
        worthless = damage(home)
        assert Stack(home).running() == []
        where = make_up(home)
        fresh = Stack(home)
        assert set(fresh.running()) == {
            "temporal",
            "api",
            *(f"worker-{role}" for role in WORKER_ROLES),
        }
        assert not any(path.exists() for path in worthless), "swept before any worker is healthy"
        after = shown(where, run_id)
        yield Survived(home, where, run_id, before, after, shown(where, run_id, ENDED, 360))
    finally:
        Stack(home).down()
        for process in processes_of(home):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_the_run_goes_on_by_itself_and_succeeds(survived: Survived) -> None:
    before, after, run = survived.before, survived.after, survived.run
    assert CUT_AT <= before["step"] < STEPS, "the cut came too late to say anything"
    assert after["step"] >= before["step"], "what was reported is not taken back"
    assert run["status"] == "succeeded" and run["step"] == run["policy_version"] == STEPS
    assert run["attempt"] == 1 and run["error"] is None
    restarts = run["restarts"]
    assert all(restarts[role] >= 1 for role in ("engine", "env", "trainer")), restarts


def test_every_step_is_there_once_and_none_is_missing(survived: Survived) -> None:
    records = get(survived.where, f"/v1/runs/{survived.run_id}/metrics")["data"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    rates = [record["metrics"]["lr"] for record in records]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates)), (
        "the trainer went on where it was in its schedule"
    )


def test_every_example_trains_once(survived: Survived) -> None:
    store = ArtifactStore(f"file://{survived.home}/store")
    groups: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        samples = decode_batch(store.get(store.require(keys.batch(survived.run_id, step))))
        assert samples, f"step {step} trained nothing"
        for group in {sample.group for sample in samples}:
            groups[group.split(".")[0]] += 1
    assert set(groups.values()) == {1} and len(groups) <= STEPS * GROUPS
    counters = sorted(int(group.removeprefix("train/")) for group in groups)
    # Groups without a contrast in their rewards have no sample to train on.
    assert counters[-1] < STEPS * GROUPS + 16


def back_after(home: Path, name: str) -> float:
    """Kills a service of a stack; seconds until another process is there and answers."""
    process = Stack(home).alive(name)
    assert process is not None, f"{name} does not run"
    process.kill()
    began = time.monotonic()
    while time.monotonic() < began + 60:
        stack = Stack(home)
        again = stack.alive(name)
        with contextlib.suppress(httpx.HTTPError):
            if again is not None and again.pid != process.pid:
                answer = httpx.get(stack.health_url(name), timeout=1, trust_env=False)
                # A worker is ready once it polls.
                if answer.is_success and 'ready":false' not in answer.text.replace(" ", ""):
                    return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"{name} did not come back")


@pytest.mark.parametrize("name", ["api", "worker-rollout", "temporal"])
def test_a_killed_service_is_back_in_time(survived: Survived, name: str) -> None:
    assert back_after(survived.home, name) < BACK_WITHIN_S
    assert shown(survived.where, survived.run_id)["status"] == "succeeded"


def test_nothing_is_left_when_the_machine_is_shut_down(survived: Survived) -> None:
    Stack(survived.home).down()
    assert processes_of(survived.home) == []
    assert list((survived.home / "hosts").iterdir()) == []
