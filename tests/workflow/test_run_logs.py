"""What workflows hand over to the log of their run."""

import asyncio
import logging
import time
from pathlib import Path

import pytest
from temporalio.client import Client

from ratchet.activities.contracts.health import HEALTH_REPORT, Finding, HealthReport
from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.names import LOG_LINE
from ratchet.worker.run_logs import LOGGER, RunLogs, log_file
from tests.workflow.running import start, status, world_of


async def test_a_run_tells_its_pipeline_and_its_steps(
    temporal: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    logs = RunLogs(tmp_path)
    writing = asyncio.create_task(logs.run())
    async with world_of(temporal) as world:
        world.rollout_s = 1.5
        report = HealthReport(1, Finding("env_failing", "40 % of the rollouts fail"))
        told = (HEALTH_REPORT, report)
        handle = await start(world, told, max_steps=2, log={"interval": 1})
        assert (await handle.result())["status"] == "succeeded"
    logs.write(time.time())
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    text = log_file(tmp_path, handle.id).read_text().splitlines()
    steps = [line for line in text if " INFO step " in line]
    assert [line.split(" INFO ")[1].split(" | ")[0] for line in steps] == ["step 1", "step 2"]
    assert any("WARNING step 1: 40 % of the rollouts fail" in line for line in text)
    for part in ("time ", "reward ", "tokens ", "throughput "):
        assert part in steps[0]
    shown = [line for line in text if "INFO pipeline: " in line]
    assert any("rollouts in unfinished groups | in flight 8/8 (" in line for line in shown), shown
    assert shown[-1].count("| succeeded") == 1 and "step 2/2" in shown[-1]


async def test_an_ordinary_start_of_a_server_is_no_warning(
    temporal: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000)
        await status(handle, "running")
        await handle.signal("host_report", HostReport("engine", 0, 2, "starting"))
        await handle.signal("host_report", HostReport("env", 0, 2, "starting", detail="disk full"))
        await handle.signal("stop")
        await handle.result()
    lines = [vars(record).get(LOG_LINE, "") for record in caplog.records]
    told = [(r.levelname, text) for r, text in zip(caplog.records, lines, strict=True)]
    assert ("INFO", "engine 0 (epoch 2) is starting") in told
    assert ("WARNING", "env 0 (epoch 2) is starting: disk full") in told
