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
from ratchet.workflows.protocol.state import ArrivalsState, CurriculumState, TrainProgress
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sinks import Arrivals, TrainSink

algo = {"type": "record"}
config = validate({"max_steps": 1, "algo": algo, "train": {"env": [{"id": "e"}], "group_size": 2}})
algorithm = build(config.algo, seq_len=8)
state = ArrivalsState()
curriculum = Curriculum(config, {}, CurriculumState())
arrivals = Arrivals(config, state, TrainSink(config, TrainProgress()), curriculum)
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
    kept = {name: value for name, value in metrics.items() if name.startswith("baseline/")}
    assert kept == {"baseline/e/policy": 1.0}


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
from ratchet.api.schemas.metrics import LagSample
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


def test_weight_transfer(copy: Copy) -> None:
    change(copy, "a weight transfer")
    script = """
import asyncio, json, shutil
from pathlib import Path
from ratchet.activities.contracts.weights import Tolerance
from ratchet.activities.inference import shm_transfer
from ratchet.activities.inference.transfers import transfer_of
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.load import validate

class Engine:
    model, posted = "m", []
    async def post(self, path, **body):
        self.posted.append([path, body["json"]])
        return {"prompt_logprobs": [None, {"6": {"logprob": -1.5}}]}

shm_transfer.MEMORY = Path("memory")
data = {"max_steps": 1, "train": {"env": [{"id": "e"}]}, "inference": {"transfer": "shm"}}
store, engine, out = ArtifactStore("store"), Engine(), Path("out")
transfer = transfer_of(validate(data), store)
out.mkdir()
(out / "canary.json").write_text(json.dumps({"token_ids": [5, 6], "logprobs": [-1.0]}))
ref = transfer.prepare("w", out, epoch=1, attempt="a")
again = transfer.prepare("w", out, epoch=1, attempt="b")
store.fetch_folder = None
weights = transfer.receive(ref)
asyncio.run(transfer.push(engine, weights))
verdict = asyncio.run(transfer.verify(engine, weights, Tolerance(largest=0.25)))
print(json.dumps([ref == again, engine.posted[0], verdict.diff, verdict.passed, ref.sha256]))
"""
    same, pushed, diff, passed, sha = copy.run(script)
    load = {"method": "reload_weights", "kwargs": {"weights_path": f"memory/{sha}"}}
    assert pushed == ["/collective_rpc", load]
    assert same and diff == 0.5 and not passed


def test_trainer_backend(copy: Copy) -> None:
    change(copy, "a trainer backend")
    script = """
import asyncio, json
from pathlib import Path
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import configs
from ratchet.activities.training.client import StateMismatch, TrainerClient
from ratchet.activities.training.server import trainer_spec
from ratchet.configs.load import validate
from ratchet.configs.upgrades import config_document

data = {"max_steps": 3, "train": {"env": [{"id": "e"}]}, "trainer": {"backend": "still"}}
config = validate(data)
ctx = WorkerContext(home=Path("home"), store_url="store", own_queue="own")
configs.save(ctx.store, "r", config, attempt="a")
start, batch, out, saved = (Path(name).resolve() for name in ("start", "batch", "out", "saved"))
start.mkdir()
(start / "canary.json").write_text("{}")
batch.write_bytes(b"")

async def use(client):
    document = config_document(config)
    told = [(await client.load(start, document, checkpoint=False)).step]
    told.append(await client.step(1, batch, out, config=document))
    try:
        await client.step(3, batch, out, config=document)
    except StateMismatch as error:
        told.append(str(error))
    await client.save(1, saved)
    told.append((await client.load(saved, document, checkpoint=True)).step)
    return [*told, await client.ping(), (out / "canary.json").exists()]

async def main():
    host = HostInput("r", "trainer", 0, "q")
    spec = await trainer_spec(ctx, host, 1)
    server = ServerProcess(spec, home=ctx.home, run="r", host=host.host_id, epoch=1)
    await server.start()
    while not server.exited.is_set() and not await spec.probe():
        await asyncio.sleep(0.05)
    assert not server.exited.is_set(), server.log_tail()
    try:
        return await use(TrainerClient(spec.address))
    finally:
        await server.stop()

print(json.dumps(asyncio.run(main())))
"""
    assert copy.run(script) == [0, {"loss": 0.0}, "the trainer is at 1", 1, 1, True]


def test_devices(copy: Copy) -> None:
    change(copy, "devices")
    script = """
import asyncio, json
from pathlib import Path
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.inference.engine import engine_spec
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import configs, keys
from ratchet.configs.load import validate

config = validate({"max_steps": 1, "train": {"env": [{"id": "e"}]}, "inference": {"engines": 2}})
ctx = WorkerContext(home=Path("home"), store_url="store", own_queue="own")
configs.save(ctx.store, "r", config, attempt="a")
Path("w").mkdir()
Path("w/file").write_text("x")
weights = ctx.store.put_folder(keys.weights("r", 0), Path("w"), attempt="a")
told = []
for k in (0, 1):
    host = HostInput("r", "engine", k, "q", weights=weights)
    spec = asyncio.run(engine_spec(ctx, host, 1))
    told.append([spec.env["CUDA_VISIBLE_DEVICES"], "--enforce-eager" in spec.argv])
print(json.dumps(told))
"""
    assert copy.run(script) == [["0", False], ["1", False]]
