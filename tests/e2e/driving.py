"""What a user does to a stack from outside, and what a machine does to it: requests and kills."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from ratchet.configs.load import load
from ratchet.worker.stack import Addresses, Stack
from tests import ROOT

TEMPORAL = Path(sys.executable).parent / "temporal"
ENDED = ("succeeded", "failed", "cancelled")
ENGINE = "EngineCore"
"""What the command line of vLLM's computing process has."""


def belongs(process: psutil.Process, home: Path, command: str = "") -> bool:
    """Whether a process belongs to the stack under `home` and its command line has `command`."""
    try:
        ours = process.environ().get("RATCHET_HOME") == str(home)
        return ours and command in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def processes_of(home: Path, command: str = "") -> list[psutil.Process]:
    """Processes that belong to the stack under `home` and whose command line has `command`."""
    return [p for p in psutil.process_iter() if belongs(p, home, command)]


def kill(stack: Stack, name: str) -> None:
    """SIGKILL to one process of the stack, with the witness that it is gone."""
    pid = stack.record["processes"][name]["pid"]
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert name not in stack.running()


def kill_server(stack: Stack, command: str) -> None:
    """SIGKILL to the processes of a run's server that `command` names."""
    victims = processes_of(stack.home, command)
    assert victims, f"no process runs {command}"
    for victim in victims:
        victim.kill()
    gone, _ = psutil.wait_procs(victims, timeout=60)
    assert len(gone) == len(victims)


def get(where: Addresses, path: str, **params: Any) -> Any:
    """A JSON answer of the API."""
    return httpx.get(f"{where.api}{path}", params=params, timeout=30).raise_for_status().json()


def wait_until(where: Addresses, run_id: str, ready: Callable[[Any], bool]) -> Any:
    """The run's state once `ready` holds; a run that ended before that is an error."""
    while not ready(run := get(where, f"/v1/runs/{run_id}")):
        assert run["status"] not in ENDED, run
        time.sleep(0.3)
    return run


def cli_signal(where: Addresses, run_id: str, name: str, *arguments: str) -> None:
    """`temporal workflow signal`, as a user types it."""
    command = [str(TEMPORAL), "workflow", "signal", "--address", where.temporal]
    subprocess.run(
        [*command, "--workflow-id", run_id, "--name", name, *arguments],
        check=True,
        capture_output=True,
        timeout=30,
    )


def launch(where: Addresses, example: str, *overrides: str) -> str:
    """Starts the run of an example config with overrides; returns its id."""
    config = load(ROOT / "configs" / "examples" / f"{example}.toml", overrides)
    reply = httpx.post(f"{where.api}/v1/runs", json=config.model_dump(mode="json"), timeout=60)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])
