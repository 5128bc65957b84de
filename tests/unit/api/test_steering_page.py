"""The page on steering: its `temporal` commands, typed as they stand into a shell that knows the
stack.
"""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from ratchet.worker.shell import exports
from tests import ROOT
from tests.unit.api.conftest import Served
from tests.unit.api.routes.test_runs import signals

pytestmark = pytest.mark.asyncio(loop_scope="session")


def commands() -> list[str]:
    """Its lines that steer a run by `temporal`."""
    text = (ROOT / "docs" / "steering.md").read_text()
    steering = r"^temporal workflow (?:signal|update execute) .*--workflow-id RUN.*$"
    return re.findall(steering, text, re.MULTILINE)


async def test_temporal_is_usable_as_the_page_has_it(served: Served, tmp_path: Path) -> None:
    run_id = (await served.start("typed"))["id"]
    await served.until(run_id, status="running")
    port = int(served.env.client.service_client.config.target_host.rpartition(":")[2])
    ports = {"api": 1, "temporal": port}
    (tmp_path / "stack.json").write_text(json.dumps({"ports": ports, "processes": {}}))
    typed = [line.replace("RUN", run_id) for line in commands()]
    assert len(typed) >= 6
    typed.sort(key=lambda line: "--name stop" in line)
    script = "\n".join(["set -e", *exports(tmp_path, {}), *typed])
    done = await asyncio.to_thread(
        subprocess.run,
        ["sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    heard = [name for name, _ in await signals(served, run_id, 5)]
    assert heard == ["trigger_eval", "pause", "resume", "checkpoint", "stop"]
