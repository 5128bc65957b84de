"""A role without a worker is one event of each run that needs one."""

from typing import Any

import pytest

from ratchet.activities.storage.series import Series
from ratchet.activities.storage.store import StoreUnavailable
from ratchet.api.app import create_app
from ratchet.api.services import absence
from ratchet.api.services.absence import Absences
from tests.unit.api.conftest import Served, connection, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_missing_worker_is_one_event_however_many_look(served: Served) -> None:
    """No worker but the orchestrator's polls here."""
    run = (await served.start("forsaken"))["id"]
    await served.until(run, status="running")
    sample = {"time": 1000.0, "event_loop_lag": {"mean": 0.0, "max": 0.0, "p99": 0.0}}
    Series(run, "trainer-host-1").add(sample).write(served.store)
    # Two API processes, one of which restarts.
    apps = [create_app(served.settings, connection(served.env)) for _ in range(3)]
    looks = [Absences(app.state.services) for app in apps]
    await looks[0].look()
    url = f"/v1/runs/{run}/events?types=run.health"
    assert (await served.http.get(url)).json()["data"] == [], "it may only have polled late"
    for look in looks:
        for _ in range(3):
            await look.look()

    async def reported() -> list[Any]:
        return list((await served.http.get(url)).json()["data"])

    events = await eventually(reported, lambda events: len(events) >= 3)
    absent = {event["data"]["subject"]: event for event in events}
    # Tests before this one may have polled for rollouts.
    assert (
        {"trainer", "inference", "env"} <= set(absent) <= {"rollout", "trainer", "inference", "env"}
    )
    assert len(events) == len(absent)
    event = absent["trainer"]
    assert event["level"] == "warning"
    assert event["message"] == "No worker for a role: no worker polls for trainer"
    assert event["data"]["rule"] == "no_worker"
    assert event["data"]["help"] == "docs/reading-a-run.md#no-worker"
    findings = (await served.http.get(f"/v1/runs/{run}/health")).json()["findings"]
    assert [finding["rule"] for finding in findings] == ["no_worker"], "the page says so, too"


async def test_a_run_that_cannot_be_looked_at_keeps_no_other_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [(await served.start(name))["id"] for name in ("unread", "read")]
    for run in runs:
        await served.until(run, status="running")
    app = create_app(served.settings, connection(served.env))
    look = Absences(app.state.services)
    await look.look()
    found = absence.missing_roles

    async def missing_roles(services: Any, execution: Any) -> Any:
        if execution.id == runs[0]:
            raise StoreUnavailable("read", "away")
        return await found(services, execution)

    monkeypatch.setattr(absence, "missing_roles", missing_roles)
    await look.look()
    monkeypatch.setattr(absence, "missing_roles", found)

    async def events(run: str) -> list[Any]:
        answer = await served.http.get(f"/v1/runs/{run}/events?types=run.health")
        return list(answer.json()["data"])

    await eventually(lambda: events(runs[1]), bool)
    assert not await events(runs[0])
    await look.look()
    await eventually(lambda: events(runs[0]), bool)
