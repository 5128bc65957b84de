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


def test_algorithm_with_state(copy: Copy) -> None:
    change(copy, "an algorithm with state")
    script = """
import asyncio, json
from dataclasses import replace
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.activities.scoring.algorithms import RolloutView, before_filters, build
from ratchet.configs.load import validate
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sinks import Arrivals, TrainSink

algo = {"type": "record"}
config = validate({"max_steps": 1, "algo": algo, "train": {"env": [{"id": "e"}], "group_size": 2}})
algorithm = build(config.algo, seq_len=8)
state = RunState()
curriculum = Curriculum(config, {}, state.curriculum)
arrivals = Arrivals(config, state, TrainSink(config, state.train), curriculum)
advantages = []
for number, rewards in enumerate([(0.25, 0.5), (1.0, 0.0), (0.0, 0.0)]):
    views = [RolloutView(i, reward, 1) for i, reward in enumerate(rewards)]
    kept = state.baselines.get("e", {})
    credit = asyncio.run(before_filters(algorithm, views, kept))
    advantages.append([one.advantage for one in credit])
    group, ref = f"train/{number}", ArtifactRef("k", "0" * 64, 1, "p")
    told = GroupResult(group, "train", "e", ref, 2, 2, 0, 0.0, 2, 2, 0)
    arrivals.on_group(replace(told, observed=algorithm.observed(views)))
print(json.dumps([advantages, arrivals.metrics()]))
"""
    advantages, metrics = copy.run(script)
    assert advantages == [[0.25, 0.5], [0.5, -0.5], [-1.0, -1.0]]
    assert metrics == {"baseline/e/policy": 1.0}


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
