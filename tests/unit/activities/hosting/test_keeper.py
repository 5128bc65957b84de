"""No process of a hosted server survives its worker, its keeper or its server, however they go."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ratchet.activities.hosting import keeper, reaper
from ratchet.activities.hosting.process import ServerProcess, describe_exit
from ratchet.activities.hosting.spec import ServerSpec
from tests.unit.activities.hosting import servers

FAMILY = 4


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    tag = uuid.uuid4().hex
    monkeypatch.setenv(servers.TAG, tag)
    yield tag
    for process in servers.tagged(tag):
        with contextlib.suppress(psutil.Error):
            process.kill()


async def _healthy() -> bool:
    return True


def _spec(home: Path, *argv: str) -> ServerSpec:
    return ServerSpec(name="s", argv=list(argv), address="", cwd=home, probe=_healthy)


def _family(home: Path) -> ServerSpec:
    return _spec(home, sys.executable, servers.ME, "family", "0")


def _process(spec: ServerSpec, home: Path, host: str = "env/0", **kwargs: float) -> ServerProcess:
    return ServerProcess(spec, home=home, run="run-1", host=host, epoch=1, **kwargs)


async def _complete(process: ServerProcess) -> None:
    while "complete" not in process.log_tail():
        await asyncio.sleep(0.02)


def _complete_outside(tag: str, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + servers.WITHIN_S
    while time.monotonic() < deadline:
        found = servers.tagged(tag)
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"expected {count} processes, found {servers.tagged(tag)}")


async def test_stop_ends_a_family_that_ignores_sigterm(tmp_path: Path, tag: str) -> None:
    # The one that heeds SIGTERM needs a core in time for it.
    process = _process(_family(tmp_path), tmp_path, grace_s=10.0)
    await process.start()
    await _complete(process)
    _complete_outside(tag, FAMILY + 1)
    await process.stop()
    assert servers.tagged(tag) == []
    assert process.code == -signal.SIGTERM
    assert list((tmp_path / "hosts").iterdir()) == []
    await process.stop()


async def test_exit_code_and_last_words(tmp_path: Path, tag: str) -> None:
    spec = _spec(tmp_path, sys.executable, "-c", "print('last words'); raise SystemExit(3)")
    process = _process(spec, tmp_path)
    await process.start()
    await process.exited.wait()
    assert describe_exit(process.code) == "exit code 3"
    assert process.log_tail() == "last words"
    again = _process(_spec(tmp_path, "/no/such/program"), tmp_path)
    await again.start()
    await again.exited.wait()
    assert again.code == 127
    assert again.log_tail().startswith("cannot start /no/such/program")


async def test_last_words_begin_in_no_secret_and_end_with_the_newest(tmp_path: Path) -> None:
    process = _process(_spec(tmp_path, "unused"), tmp_path)
    process.log.parent.mkdir(parents=True)
    process.log.write_text(f"password={'hunter2' * 99}")
    assert process.log_tail(20) == ""
    process.log.write_text(f"password={'hunter2' * 40}\n{'y' * 200}\nlast words")
    assert process.log_tail(20) == f"{'y' * 9}\nlast words"
    process.log.write_text("password=1\n" * 40 + "last words")
    assert process.log_tail(40).endswith("\nlast words"), "marks are longer than what they hide"


TALKER = """
import sys
for line in sys.stdin: pass
print("a" * 60, flush=True)
while True:
    try:
        with open(sys.argv[1]) as file: print(file.read(), flush=True)
        break
    except FileNotFoundError: pass
"""


async def test_a_long_log_goes_on_from_nothing(tmp_path: Path, tag: str) -> None:
    """What it held is kept once; the server goes on writing to the file that it has open."""
    spec = _spec(tmp_path, sys.executable, "-c", TALKER, str(tmp_path / "go"))
    process = _process(spec, tmp_path)
    await process.start()
    try:
        async with asyncio.timeout(servers.WITHIN_S):
            while "aaa" not in process.log_tail():
                await asyncio.sleep(0.02)
            process.trim_log(1000)
            assert "a" * 60 in process.log.read_text(), "it is not too long"
            process.trim_log(50)
            assert process.log.read_text() == process.log_tail() == ""
            assert "a" * 60 in process.log.with_name(f"{process.log.name}.1").read_text()
            # Whoever finds it finds all of it.
            (tmp_path / "going").write_text("more")
            (tmp_path / "going").rename(tmp_path / "go")
            await process.exited.wait()
    finally:
        await process.stop(grace_s=0)
    assert process.log.read_text() == "more\n" and process.log_tail() == "more"


async def test_killed_server_takes_its_family_along(tmp_path: Path, tag: str) -> None:
    process = _process(_family(tmp_path), tmp_path)
    await process.start()
    await _complete(process)
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(servers.WITHIN_S):
        await process.exited.wait()
    assert servers.tagged(tag) == []
    assert describe_exit(process.code) == "killed by SIGKILL"


async def test_stopped_server_is_killed(tmp_path: Path, tag: str) -> None:
    process = _process(_family(tmp_path), tmp_path, grace_s=0.3)
    await process.start()
    await _complete(process)
    os.kill(process.pid, signal.SIGSTOP)
    await process.stop(grace_s=0)
    assert servers.tagged(tag) == []


async def test_killed_keeper_is_noticed_and_swept_after(tmp_path: Path, tag: str) -> None:
    process = _process(_family(tmp_path), tmp_path)
    other = _process(_family(tmp_path), tmp_path, host="env/1", grace_s=0.3)
    await process.start()
    await other.start()
    await _complete(process)
    await _complete(other)
    (record,) = (r for r in reaper.records(tmp_path) if r.host == "env/0")
    os.kill(record.keeper[0], signal.SIGKILL)
    async with asyncio.timeout(servers.WITHIN_S):
        await process.exited.wait()
    assert process.code is None
    assert len(servers.tagged(tag)) == FAMILY + 1
    assert not other.exited.is_set()
    await other.stop()
    assert servers.tagged(tag) == []


def _worker(home: Path, *more: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, servers.ME, "worker", str(home), *more], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() and worker.stdout.readline()
    return worker


def test_killed_worker_leaves_nothing(tmp_path: Path, tag: str) -> None:
    worker = _worker(tmp_path)
    _complete_outside(tag, 1 + 2 * (FAMILY + 1))
    worker.kill()
    worker.wait()
    assert servers.gone(tag)
    assert list((tmp_path / "hosts").iterdir()) == []


def test_a_copy_of_a_killed_worker_keeps_no_server(tmp_path: Path, tag: str) -> None:
    """The copy holds the pipes to the keepers open, which so do not end."""
    worker = _worker(tmp_path, "copied")
    _complete_outside(tag, 2 + 2 * (FAMILY + 1))
    (copy,) = psutil.Process(worker.pid).children()[-1:]
    worker.kill()
    worker.wait()
    assert _complete_outside(tag, 1) == [copy]
    assert list((tmp_path / "hosts").iterdir()) == []


def test_sweep_reaps_after_worker_and_keepers_are_killed(tmp_path: Path, tag: str) -> None:
    worker = _worker(tmp_path)
    _complete_outside(tag, 1 + 2 * (FAMILY + 1))
    assert reaper.sweep(tmp_path) == []
    keepers = [record.keeper[0] for record in reaper.records(tmp_path)]
    # Stopped first, so that none can act between the kills.
    for pid in (worker.pid, *keepers):
        os.kill(pid, signal.SIGSTOP)
    for pid in (worker.pid, *keepers):
        os.kill(pid, signal.SIGKILL)
    worker.wait()
    # The leader of one group goes as well: its relatives must still be found.
    server = reaper.records(tmp_path)[0].server[0]
    os.kill(server, signal.SIGKILL)
    _complete_outside(tag, 2 * FAMILY - 1)
    assert [r.host for r in reaper.sweep(tmp_path, host="env/1")] == ["env/1"]
    assert [r.host for r in reaper.sweep(tmp_path)] == ["env/0"]
    assert servers.tagged(tag) == []
    assert reaper.records(tmp_path) == []


def test_sweep_of_everything_ends_kept_servers(tmp_path: Path, tag: str) -> None:
    worker = _worker(tmp_path)
    _complete_outside(tag, 1 + 2 * (FAMILY + 1))
    os.kill(reaper.records(tmp_path)[0].keeper[0], signal.SIGSTOP)
    cleared = reaper.sweep(tmp_path, everything=True)
    assert sorted(r.host for r in cleared) == ["env/0", "env/1"]
    assert [p.pid for p in servers.tagged(tag)] == [worker.pid]
    worker.kill()
    worker.wait()


def test_recycled_pid_is_spared(tmp_path: Path, tag: str) -> None:
    """A record whose pids now belong to strangers clears without a kill."""
    stranger = subprocess.Popen([sys.executable, servers.ME, "idle"])
    started = keeper.start_time(stranger.pid)
    assert started is not None
    (tmp_path / "hosts").mkdir()
    keeper.write_record(
        tmp_path / "hosts" / "old.json",
        {
            "run": "run-1",
            "host": "env/0",
            "epoch": 1,
            "machine": keeper.machine(),
            "keeper": [stranger.pid, started - 1],
            "server": [stranger.pid, started - 1],
            "mark": "nobody",
            "grace_s": 0.0,
        },
    )
    assert len(reaper.sweep(tmp_path)) == 1
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


async def test_record_that_cannot_be_written_is_a_failed_start(
    tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: name)
    process = _process(_family(tmp_path), tmp_path)
    part = tmp_path / "hosts" / f"run-1-env-0-e1-{name.hex[:8]}.part"
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as full:
        await process.start()
    assert full.value.errno == errno.ENOSPC
    assert servers.tagged(tag) == [] and list(part.parent.iterdir()) == []
    await process.stop()
