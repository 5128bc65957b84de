"""Heartbeats tell their time, so that a later attempt knows when the one before it was lost."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from ratchet.activities.runtime.heartbeat import heartbeats, last_beat


async def test_a_heartbeat_reports_when_it_was() -> None:
    beats: list[Any] = []
    heard = asyncio.Event()

    def on_heartbeat(*details: Any) -> None:
        beats.append(details)
        heard.set()

    async def work() -> None:
        async with heartbeats():
            await heard.wait()

    environment = ActivityEnvironment()
    environment.on_heartbeat = on_heartbeat
    began = datetime.now(UTC)
    await environment.run(work)
    (result,) = beats[0]
    # Told in whole milliseconds.
    assert -0.001 <= (datetime.fromisoformat(result) - began).total_seconds() < 60


async def test_what_is_short_sends_none() -> None:
    beats: list[Any] = []

    async def work() -> None:
        async with heartbeats():
            # The other task has its turn.
            await asyncio.sleep(0)

    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details)
    await environment.run(work)
    assert beats == []


@pytest.mark.parametrize(("details", "found"), [([], ""), (["2026-01-01T12:00:31+00:00"], None)])
async def test_the_last_heartbeat_is_that_of_the_attempt_before(
    details: list[str], found: str | None
) -> None:
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, heartbeat_details=details)

    async def work() -> str:
        return last_beat()

    assert await environment.run(work) == (details[0] if found is None else found)
