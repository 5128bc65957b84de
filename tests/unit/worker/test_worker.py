"""Start-up checks of workers and of the local stack: each says what, where and how to fix it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ratchet.worker.health import STALLED_AFTER_S, Pulse, serve_health
from ratchet.worker.settings import WorkerSettings, parse_roles
from ratchet.worker.stack import Stack, StackError
from tests import ROOT


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on until the test ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def test_roles_are_checked() -> None:
    assert parse_roles("rollout, env,rollout") == ["rollout", "env"]
    with pytest.raises(ValueError, match=r"unknown role 'gpu'; allowed: orchestrator, rollout"):
        parse_roles("rollout,gpu")
    with pytest.raises(ValueError, match="no role specified"):
        parse_roles(" , ")


def test_settings_name_the_variable_that_is_wrong() -> None:
    settings = WorkerSettings.from_env({"RATCHET_HOME": "/tmp/h", "RATCHET_QUEUE_PREFIX": "q"})
    assert settings.store_url == "file:///tmp/h/store" and settings.queues.env == "q-env"
    with pytest.raises(ValueError, match="RATCHET_HEALTH_PORT='http'"):
        WorkerSettings.from_env({"RATCHET_HEALTH_PORT": "http"})


def test_worker_without_temporal_says_how_to_get_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.worker", "--roles", "orchestrator"],
        env={**os.environ, "TEMPORAL_ADDRESS": address, "RATCHET_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    assert f"Temporal does not answer at {address}" in done.stderr and "make up" in done.stderr
    assert "Traceback" not in done.stderr


def test_stack_refuses_a_taken_port_by_name(
    tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RATCHET_API_PORT", str(taken_port))
    stack = Stack(tmp_path)
    with pytest.raises(StackError, match=f"RATCHET_API_PORT={taken_port}: the port is in use"):
        stack.up()
    assert stack.running() == []


def test_stack_refuses_a_full_disk_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**20))
    stack = Stack(tmp_path)
    with pytest.raises(StackError, match=r"1 MiB left .* set RATCHET_HOME"):
        stack.up()
    assert stack.running() == []


def test_recorded_pid_of_another_process_is_not_ours(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.record["processes"]["api"] = {"pid": os.getpid(), "started": 1.0}
    assert stack.running() == []
    stack.down()


def test_health_is_reported_only_while_ready_and_turning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pulse = Pulse(["rollout"])
    with serve_health(pulse, port):
        url = f"http://127.0.0.1:{port}/healthz"
        assert httpx.get(url).status_code == 503
        pulse.ready = True
        assert httpx.get(url).json()["healthy"] is True
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + STALLED_AFTER_S + 5)
        assert httpx.get(url).status_code == 503
        assert httpx.get(url.replace("healthz", "x")).status_code == 404
