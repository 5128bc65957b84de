"""What a crash of the machine leaves among the records of servers is in nobody's way."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.hosting import keeper, reaper
from tests.unit.activities.hosting import servers

EARLIER_BOOT = "0f0f0f0f-0000-4000-8000-000000000000/pid:[4026531836]"


@pytest.fixture
def stranger() -> Iterator[tuple[int, int]]:
    """A live process (pid, start time) that no record may end."""
    process = subprocess.Popen([sys.executable, servers.ME, "idle"])
    started = keeper.start_time(process.pid)
    assert started is not None
    yield process.pid, started
    assert process.poll() is None, "it was killed"
    process.kill()
    process.wait()


def _told(server: tuple[int, int], **other: Any) -> dict[str, Any]:
    return {
        "run": "run-1",
        "host": "env/0",
        "epoch": 1,
        "machine": keeper.machine(),
        "node": keeper.node(),
        "keeper": list(server),
        "server": list(server),
        "mark": "nobody",
        "grace_s": 0.0,
        **other,
    }


def _write(home: Path, name: str, result: dict[str, Any]) -> Path:
    (home / "hosts").mkdir(exist_ok=True)
    keeper.write_record(home / "hosts" / name, result)
    return home / "hosts" / name


@pytest.mark.parametrize("kept", [0, 1, 60, None])
def test_torn_records_are_dropped_and_whole_ones_still_serve(
    tmp_path: Path, stranger: tuple[int, int], kept: int | None
) -> None:
    whole = _write(tmp_path, "b.json", _told(stranger))
    torn = _write(tmp_path, "a.json", _told(stranger))
    # A file whose length reached the disk and whose content did not reads as zeros.
    data = torn.read_bytes()
    torn.write_bytes(bytes(len(data)) if kept is None else data[:kept])
    assert [record.path for record in reaper.records(tmp_path)] == [whole]
    assert torn.exists(), "who only looks removes nothing"
    assert reaper.sweep(tmp_path, run="another run") == []
    assert list((tmp_path / "hosts").iterdir()) == [whole]


@pytest.mark.parametrize("data", [b"[]", b"3", b"{}", b'{"keeper": [1, 2], "server": [1, 2]}'])
def test_what_is_no_record_is_dropped(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "a.json").write_bytes(data)
    assert reaper.records(tmp_path) == [] and reaper.sweep(tmp_path) == []
    assert list((tmp_path / "hosts").iterdir()) == []


def test_records_of_an_earlier_boot_are_dropped_and_those_of_other_machines_are_not(
    tmp_path: Path, stranger: tuple[int, int]
) -> None:
    _write(tmp_path, "a.json", _told(stranger, machine=EARLIER_BOOT))
    elsewhere = _write(tmp_path, "b.json", _told(stranger, machine=EARLIER_BOOT, node="another"))
    unknown = _told(stranger, machine=EARLIER_BOOT)
    del unknown["node"]
    before = _write(tmp_path, "c.json", unknown)
    space = _told(stranger, machine=keeper.machine().partition("/")[0] + "/pid:[1]")
    container = _write(tmp_path, "d.json", space)
    assert reaper.sweep(tmp_path, everything=True) == []
    assert sorted((tmp_path / "hosts").iterdir()) == [elsewhere, before, container]


def test_a_record_that_cannot_be_read_now_is_left(tmp_path: Path) -> None:
    (tmp_path / "hosts" / "a.json").mkdir(parents=True)
    assert reaper.sweep(tmp_path) == []
    assert (tmp_path / "hosts" / "a.json").exists()


def test_a_record_of_a_later_version_still_ends_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keeper.MARK, "later")
    server = subprocess.Popen([sys.executable, servers.ME, "idle"])
    _write(tmp_path, "a.json", _told((1, 0), mark="later", colour="red"))
    monkeypatch.delenv(keeper.MARK)
    # A process has no environment for a moment while it is started.
    while b"later" not in Path(f"/proc/{server.pid}/environ").read_bytes():
        time.sleep(0.01)
    assert [record.host for record in reaper.sweep(tmp_path)] == ["env/0"]
    assert server.wait(servers.WITHIN_S) == -9


def test_a_record_reaches_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append((path.name, path.read_text()))

    def replaced(source: Path, target: Path) -> None:
        done.append((source.name, "renamed"))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    keeper.write_record(tmp_path / "a.json", {"run": "r"})
    assert done == [("a.part", '{"run": "r"}'), ("a.part", "renamed")]


def test_a_record_for_which_there_is_no_room_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError):
            keeper.write_record(tmp_path / "a.json", {"run": "r" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
