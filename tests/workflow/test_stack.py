"""The local stack against a Temporal server that is somebody else's."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from temporalio.client import Client

from ratchet.activities.contracts.roles import WORKER_ROLES
from tests import ROOT

# The stack gives each of its processes two minutes.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


def stack(home: Path, address: str, command: str) -> str:
    """`python -m ratchet.worker.stack COMMAND` at TEMPORAL_ADDRESS; returns what it printed."""
    env = {**os.environ, "RATCHET_HOME": str(home), "TEMPORAL_ADDRESS": address}
    env["RATCHET_QUEUE_PREFIX"] = "other-stack"
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.worker.stack", command],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
async def test_up_uses_the_server_that_the_environment_names(
    temporal: Client, tmp_path: Path
) -> None:
    address = temporal.service_client.config.target_host
    try:
        printed = stack(tmp_path, address, "up")
        assert address in printed
        api = printed.split()[1]
        assert httpx.get(f"{api}/readyz", timeout=60).status_code == 200
        expected = ["api", *(f"worker-{role}" for role in WORKER_ROLES)]
        _, *rows = (line.split() for line in stack(tmp_path, address, "status").splitlines())
        assert [row[:2] for row in rows] == [[name, "running"] for name in expected]
        assert stack(tmp_path, address, "up") == printed, "a second up changes nothing"
    finally:
        stack(tmp_path, address, "down")
    assert stack(tmp_path, address, "status").strip() == "nothing is running"
