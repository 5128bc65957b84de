"""A role without a worker is one event of each run that needs one."""

import pytest

from ratchet.activities.storage.series import Series
from ratchet.api.app import create_app
from ratchet.api.services.absence import Absences
from tests.unit.api.conftest import Served, connection

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_missing_worker_is_one_event_however_many_look(served: Served) -> None:
    """No worker but the orchestrator's polls here."""
    run = (await served.start("forsaken"))["id"]
    await served.until(run, status="running")
    sample = {"time": 1000.0, "event_loop_lag": {"mean": 0.0, "max": 0.0, "p99": 0.0}}
    Series(run, "trainer-host-1").add(sample).write(served.store)
    # Two API processes, one of which is started anew.
    apps = [create_app(served.settings, connection(served.env)) for _ in range(3)]
    looks = [Absences(app.state.services) for app in apps]
    await looks[0].look()
    url = f"/v1/runs/{run}/events?types=run.health"
    assert (await served.http.get(url)).json()["data"] == [], "it may only have polled late"
    for look in looks:
        for _ in range(3):
            await look.look()
    events = (await served.http.get(url)).json()["data"]
    absent = {event["data"]["subject"]: event for event in events}
    assert set(absent) == {"rollout", "trainer", "inference", "env"} and len(events) == len(absent)
    event = absent["trainer"]
    assert event["level"] == "warning"
    assert event["message"] == "No worker for a role: no worker polls for trainer"
    assert event["data"]["rule"] == "no_worker"
    assert event["data"]["help"] == "docs/reading-a-run.md#no-worker"
    findings = (await served.http.get(f"/v1/runs/{run}/health")).json()["findings"]
    assert [finding["rule"] for finding in findings] == ["no_worker"], "the page says so, too"
