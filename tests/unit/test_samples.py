"""Each seam takes its sample change, which `docs/extending.md` shows, in few product files."""

from pathlib import Path

import pytest

from tests.samples import LIMITS, SECTIONS, Copy


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Ratchet as it is."""
    return Copy(tmp_path)


def change(copy: Copy, seam: str) -> None:
    """Makes the sample change of a seam."""
    copy.apply(SECTIONS[seam])
    assert len(copy.touches) <= LIMITS[seam], copy.touches


def test_role(copy: Copy) -> None:
    change(copy, "a role")
    script = """
import asyncio, json
from pathlib import Path
from types import SimpleNamespace
from ratchet.activities.contracts.hosting import HostInput, HostReport, planned_hosts
from ratchet.activities.contracts.names import Queues
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.runtime.context import WorkerContext
from ratchet.api.schemas.gauges import LagSample
from ratchet.configs.load import validate
from ratchet.worker import roles
from ratchet.worker.settings import parse_roles
from ratchet.workflows.rules.fleet import Fleet, hosts_of

(role,) = parse_roles("judge")
LagSample(time=0.0, source="judge-here-1", role=role)
config = validate({"max_steps": 1, "train": {"env": [{"id": "e"}]}})
planned = [f"{host.role}/{host.name}" for host in planned_hosts(config)]
fleet = Fleet(hosts_of(config))
fleet.on_report(HostReport("judge", 0, epoch=1, state="up", address="http://j"))
# What a run holds was written before there was this role.
queues = Queues.prefixed("mine")
ctx = WorkerContext(home=Path("home"), store_url="store", own_queue="own")
roles.Worker = lambda client, **options: SimpleNamespace(**options)
(worker,) = roles.BUILDERS[role](None, ctx, queues, ())
(host_server,) = worker.activities

async def serve():
    host = HostInput("r", "judge", 0, worker.task_queue)
    spec = await host_server.__self__.builders["judge"](ctx, host, 1)
    server = ServerProcess(spec, home=ctx.home, run="r", host=host.host_id, epoch=1)
    await server.start()
    while not server.exited.is_set() and not await spec.probe():
        await asyncio.sleep(0.05)
    answered = await spec.probe()
    await server.stop()
    return answered

print(json.dumps([planned, fleet.missing(), worker.task_queue, asyncio.run(serve())]))
"""
    planned, missing, queue, answered = copy.run(script)
    assert planned == ["trainer/trainer", "engine/engine-0", "env/e", "judge/judge"]
    assert missing == ["trainer", "engine-0", "e"]
    assert queue == "mine-judge"
    assert answered
