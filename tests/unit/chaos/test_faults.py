"""Faults and their witnesses, on processes, connections and disks of the tests' own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from temporalio.api.common.v1 import ActivityType
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo

from ratchet.activities.hosting import keeper
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from tests.chaos import checkpoint_faults, disk, faults
from tests.chaos.checkpoint_faults import inside, strike, uncommitted
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import Spec, every_kind
from tests.chaos.supervisor import ChaosStack, Supervisor
from tests.chaos.targets import find, gone, kernel_state
from tests.chaos.world import World

SLEEP = ["sleep", "600"]
WITHIN_S = 60.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ChaosStack]:
    """A stack whose API is a process that sleeps."""
    made = ChaosStack(tmp_path)
    (tmp_path / "logs").mkdir()
    made._port("api", "api")
    made._start("api", SLEEP, dict(os.environ))
    yield made
    if process := find(made, "api"):
        process.kill()


def world(stack: ChaosStack, tmp_path: Path) -> World:
    client: Any = None
    store = ArtifactStore(f"file://{tmp_path}/store")
    return World(stack, disk.Disk(tmp_path, "none"), client, store, "run")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_kill_is_witnessed_and_the_supervisor_starts_the_service_again(
    stack: ChaosStack, tmp_path: Path
) -> None:
    process = find(stack, "api")
    assert process is not None
    witness = await faults.inject(world(stack, tmp_path), Spec("kill", "api"))
    assert witness.landed and gone(process.pid, process.create_time()), witness
    assert stack.dead() == ["api"]
    supervisor = Supervisor(stack)
    minding = asyncio.create_task(supervisor.run())
    while stack.dead():
        await asyncio.sleep(0.05)
    minding.cancel()
    again = find(stack, "api")
    assert again is not None and again.pid != process.pid
    assert [name for _, name in supervisor.restarts] == ["api"]


async def test_server_counts_as_up_once_its_host_has_said_so_of_its_epoch(
    stack: ChaosStack, tmp_path: Path
) -> None:
    stack._start("worker-env", SLEEP, dict(os.environ))
    server = stack.alive("worker-env")
    assert server is not None
    pids = [(pid, keeper.start_time(pid)) for pid in (os.getpid(), server.pid)]
    about = {"run": "run", "host": "env/0", "epoch": 2, "machine": keeper.machine(), "mark": ""}
    record = {**about, "keeper": pids[0], "server": pids[1], "grace_s": 1.0}
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "a.json").write_text(json.dumps(record))
    log = tmp_path / "logs" / "worker-env.log"
    log.write_text("run env/0 (epoch 1) is up after 3.0 s\n")
    try:
        found = find(stack, "env-server")
        assert found is not None and found.pid == server.pid
        assert find(stack, "env-server", up=True) is None, "it still starts"
        log.write_text("run env/0 (epoch 2) is up after 3.0 s\n")
        assert find(stack, "env-server", up=True) == found
    finally:
        server.kill()


async def test_stall_is_witnessed_by_the_kernel_and_ends(stack: ChaosStack, tmp_path: Path) -> None:
    process = find(stack, "api")
    assert process is not None
    stalled = asyncio.create_task(faults.inject(world(stack, tmp_path), Spec("stall", "api")))
    await until(lambda: kernel_state(process.pid) == "T")
    stalled.cancel()
    await asyncio.gather(stalled, return_exceptions=True)
    # An interrupted fault leaves nothing stopped.
    await until(lambda: kernel_state(process.pid) in ("S", "R"))


async def test_process_that_ends_while_it_is_stopped_was_replaced(
    stack: ChaosStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(faults.STALL_S, "api", 100.0)
    process, states = find(stack, "api"), [""]
    assert process is not None

    def state_of(pid: int) -> str:
        states.append(kernel_state(pid))
        return states[-1]

    monkeypatch.setattr(faults, "kernel_state", state_of)
    stalled = asyncio.create_task(faults.inject(world(stack, tmp_path), Spec("stall", "api")))
    await until(lambda: "T" in states)
    process.kill()
    witness = await stalled
    assert witness.landed and not witness.rode_out and witness.until - witness.at < 100


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set by whoever looks for something new, and so knows by then what was there before."""
    looked, seen = threading.Event(), checkpoint_faults._seen

    def seeing(*given: Any) -> Path | None:
        looked.set()
        return seen(*given)

    monkeypatch.setattr(checkpoint_faults, "_seen", seeing)
    return looked


def test_strike_stops_a_process_as_soon_as_something_appears(
    tmp_path: Path, looked: threading.Event
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").touch()
    process = subprocess.Popen(SLEEP)
    stop, found = threading.Event(), []
    watch = threading.Thread(
        target=lambda: found.append(strike(process.pid, tmp_path, "*/*", stop))
    )
    watch.start()
    # What is there before it looks for the first time does not count.
    assert looked.wait(WITHIN_S)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "x").touch()
    watch.join(timeout=WITHIN_S)
    stop.set()
    try:
        assert found == [tmp_path / "new" / "x"]
        # A signal was sent; the kernel acts on it a moment later.
        deadline = time.monotonic() + WITHIN_S
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_looking_for_a_commit_opens_no_folder_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old@a", "new@b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    listed, opened = os.scandir, []

    def scanning(path: Any = ".") -> Any:
        opened.append(Path(path).name)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scanning)
    found = checkpoint_faults._seen(tmp_path, "*@*/*", {"old@a"})
    assert found == tmp_path / "new@b" / "x"
    assert "new@b" in opened and "old@a" not in opened


async def test_worker_is_killed_inside_a_commit_and_not_after_one(
    stack: ChaosStack, tmp_path: Path, looked: threading.Event
) -> None:
    stack._start("worker-trainer", SLEEP, dict(os.environ))
    given = world(stack, tmp_path)
    folder = Path(given.store.path(keys.checkpoints(given.run_id)))
    (folder / "step-1@a").mkdir(parents=True)
    (folder / "step-1@a" / "old").touch()
    spec = Spec("kill-in-checkpoint", "trainer-worker")
    fault = asyncio.create_task(faults.inject(given, spec))
    await until(looked.is_set)
    # This one is committed before anybody can look: the worker dies, and it does not count.
    (folder / "step-2.commit").touch()
    (folder / "step-2@b").mkdir()
    (folder / "step-2@b" / "x").touch()
    while not stack.dead():
        await asyncio.sleep(0.02)
    assert not fault.done()
    looked.clear()
    stack.revive("worker-trainer")
    await until(looked.is_set)
    (folder / "step-3@c").mkdir()
    (folder / "step-3@c" / "x").touch()
    witness = await fault
    assert witness.landed and "1 files of step-3 in the store and no marker" in witness.proof
    assert stack.dead() == ["worker-trainer"]


class Pending:
    """A run's handle, whose answers say one after the other what is in progress."""

    def __init__(self, *answers: set[str]) -> None:
        self.answers = list(answers)

    def get_workflow_handle(self, run_id: str) -> "Pending":
        return self

    async def describe(self) -> Any:
        started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        found = [
            PendingActivityInfo(activity_type=ActivityType(name=name), state=started)
            for name in self.answers.pop(0)
        ]
        return SimpleNamespace(raw_description=SimpleNamespace(pending_activities=found))


async def test_trainer_is_killed_only_while_it_trains_and_weights_are_pushed(
    stack: ChaosStack, tmp_path: Path
) -> None:
    stack._start("worker-trainer", SLEEP, dict(os.environ))
    push, both = {"sync_weights"}, {"sync_weights", "train_step"}
    client: Any = Pending(set(), push, both, push, both, {"train_step"})
    given = replace(world(stack, tmp_path), client=client)
    witness = await faults.inject(given, Spec("kill-in-push", "trainer-worker"))
    assert witness.landed and "from amid sync_weights and train_step" in witness.proof
    assert client.answers == [], "a step that had ended when the victim stood still did not count"
    assert stack.dead() == ["worker-trainer"]


def test_checkpoint_counts_as_cut_off_only_without_its_last_file(tmp_path: Path) -> None:
    stack = ChaosStack(tmp_path)
    (tmp_path / "a").touch()
    assert inside(world(stack, tmp_path), tmp_path / "a")
    (tmp_path / "trainer.json").touch()
    assert not inside(world(stack, tmp_path), tmp_path / "a")
    folder = tmp_path / "step-1@x"
    folder.mkdir()
    (folder / "a").touch()
    assert uncommitted(world(stack, tmp_path), folder / "a")
    (tmp_path / "step-1.commit").touch()
    assert not uncommitted(world(stack, tmp_path), folder / "a")


def test_proxy_forwards_cuts_and_takes_connections_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname()[1])
        proxy.start()
        address = ("127.0.0.1", proxy.port)
        with socket.create_connection(address) as ours:
            theirs, _ = server.accept()
            ours.sendall(b"there")
            assert theirs.recv(5) == b"there"
            theirs.sendall(b"back")
            assert ours.recv(4) == b"back"
            assert proxy.cut() == 1
            with pytest.raises(ConnectionResetError):
                ours.recv(1)
            theirs.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        proxy.restore()
        with socket.create_connection(address):
            server.accept()[0].close()
        proxy.close()


def test_disk_meets_each_fault_with_its_own_error(tmp_path: Path) -> None:
    made = disk.mount(tmp_path / "disk", 32)
    try:
        if made.kind == "none":
            lacking = {"full-disk", "failing-store", "slow-store"}
            left = {spec.what for spec in faults.possible(made, every_kind())}
            assert not left & lacking
            pytest.skip("nothing may be mounted here")
        assert made.refusal(size=1) == ""
        assert made.fill() == "ENOSPC"
        made.empty()
        assert made.refusal(size=1000) == ""
        assert made.read_only() == "EROFS"
        made.writable()
        assert made.refusal(size=1) == ""
    finally:
        made.unmount()
    assert not list(made.folder.iterdir()) and not (tmp_path / "disk.img").exists()
