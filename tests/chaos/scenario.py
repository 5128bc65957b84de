"""One session of the fault suite on a stack of its own: a run, faults, the end, the verdicts.

Invariant: whatever happens, the stack is taken down, the disk unmounted and nothing is left.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from temporalio.client import Client

from ratchet.activities.contracts.statuses import ENDED
from ratchet.activities.contracts.wire import WIRE
from ratchet.activities.hosting import reaper
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.load import load
from ratchet.configs.run import RunConfig
from tests import ROOT
from tests.chaos import checker, disk, faults, history, report, stored, targets
from tests.chaos.observer import Look, Observer
from tests.chaos.schedule import Planned
from tests.chaos.supervisor import ChaosStack, Supervisor
from tests.chaos.world import Witness, World, as_json
from tests.warm import make_policy, put_policy

CONFIG = ROOT / "configs" / "examples" / "reverse_text.toml"
OVERRIDES = (
    "name=chaos",
    "max_steps=1000000",
    "train.batch_size=16",
    "train.group_size=4",
    "eval.interval=10",
    "eval.num_examples=8",
    "checkpoint.interval=3",
    "checkpoint.keep_last=1000000",
    "retention.weights=all",
    "retention.batches=all",
    "retention.rollouts=all",
    "dispatch.generation_events=600",
    "trainer.optim.lr=1e-4",
    "filters.post_batch=[]",
)
"""Small groups and short generations, so that hand-overs come often; and everything is kept, so
that all of it can be checked. The learning rate is one that small batches bear for an hour, and no
filter empties the batches of a policy that has learned all there is.
"""
STARTED_WITHIN_S = 240.0
SETTLED_WITHIN_S = 180.0
ENDED_WITHIN_S = 180.0
NO_SERVER_WITHIN_S = 40.0
GRACE_STEPS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a session does. Undisturbed steps are taken in the first `clean_steps` steps; kinds of
    faults that the machine cannot inject are `left_out`.
    """

    faults: Sequence[Planned]
    clean_steps: int
    seconds: float
    disk_mib: int
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class Base:
    """A stack that is up, and the disk of its store."""

    stack: ChaosStack
    disk: disk.Disk
    api: str


@contextlib.asynccontextmanager
async def base(folder: Path, disk_mib: int, config: RunConfig, say: Say) -> AsyncIterator[Base]:
    """A stack under `folder`, with its store on a small disk, which has the policy that a run of
    `config` starts from.
    """
    made = disk.mount(folder / "disk", disk_mib)
    os.environ.pop("TEMPORAL_ADDRESS", None)
    os.environ["RATCHET_STORE"] = f"file://{made.store}"
    # Engines that are killed leave files where temporary ones go.
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    stack = ChaosStack(folder / "home")
    try:
        say(f"store on {made.kind}, state in {folder}")
        policy = folder / "policy"
        # Awaited after the stack is up, so that its failure takes down no stack that still starts.
        making = asyncio.create_task(asyncio.to_thread(make_policy, config, policy))
        where = await asyncio.to_thread(stack.up)
        await making
        put_policy(ArtifactStore(f"file://{made.store}"), config, policy)
        yield Base(stack, made, where.api)
    finally:
        stack.down()
        made.unmount()
        os.environ.pop("RATCHET_STORE")


def launch(api: str, config: RunConfig) -> str:
    """Starts a run; returns its id."""
    reply = httpx.post(f"{api}/v1/runs", json=config.model_dump(mode="json"), timeout=120)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


@dataclass
class Session:
    """A run under faults, up to its verdicts."""

    base: Base
    client: Client
    plan: Plan
    say: Say
    run_id: str = ""
    witnesses: list[Witness] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.witnesses = []

    async def perform(self, config: RunConfig) -> dict[str, Any]:
        """Everything from the run's start to the figures."""
        self.run_id = await asyncio.to_thread(launch, self.base.api, config)
        self.say(f"run {self.run_id}")
        store = ArtifactStore(f"file://{self.base.disk.store}")
        observer = Observer(self.client, self.base.api, self.run_id)
        supervisor = Supervisor(self.base.stack)
        watching = asyncio.create_task(observer.run())
        minding = asyncio.create_task(supervisor.run())
        problems = checker.Verdict("run goes on after every fault")
        try:
            clean, began = await self._undisturbed(observer)
            world = World(self.base.stack, self.base.disk, self.client, store, self.run_id)
            await self._disturb(world, observer, began)
            stopped = await self._end(observer, problems)
        finally:
            for task in (watching, minding):
                task.cancel()
            await asyncio.gather(watching, minding, return_exceptions=True)
        story = report.Story(
            self.witnesses, observer.looks, supervisor.restarts, observer.api_up, began, stopped
        )
        return await self._judge(store, story, clean, problems, observer.last)

    async def _undisturbed(self, observer: Observer) -> tuple[report.Clean, float]:
        await observer.until(_at_step(1), STARTED_WITHIN_S, "the first step")
        self.say("first step; undisturbed steps are timed")
        await observer.until(_at_step(1 + self.plan.clean_steps), STARTED_WITHIN_S, "clean steps")
        looks = [look for look in observer.looks if look.version >= 1]
        clean = report.Clean(report.median_step(looks), self.plan.clean_steps)
        self.say(f"undisturbed median step: {clean.median_step_s:.2f} s")
        return clean, time.time()

    async def _disturb(self, world: World, observer: Observer, began: float) -> None:
        for planned in self.plan.faults:
            if observer.last.status in ENDED:
                break
            await asyncio.sleep(max(began + planned.at_s - time.time(), 0.0))
            witness = await faults.inject(world, planned.spec)
            self.witnesses.append(witness)
            sign = "" if witness.landed else "NOT LANDED: "
            look = observer.last
            at = f"{witness.at - began:6.1f} s  step {look.step}"
            self.say(f"{at}  {planned.spec.name}: {sign}{witness.proof}")
        while time.time() < began + self.plan.seconds and observer.last.status not in ENDED:
            await asyncio.sleep(0.5)

    async def _end(self, observer: Observer, problems: checker.Verdict) -> float:
        """Waits for the run to go on after the last fault, and stops it; returns when."""
        try:
            await self._servers_back(observer)
            goal = observer.last.version + GRACE_STEPS
            await observer.until(
                lambda look: look.version >= goal or look.status in ENDED,
                SETTLED_WITHIN_S,
                f"version {goal} after the last fault",
            )
        except TimeoutError as error:
            problems.expect(False, str(error))
        problems.expect(observer.last.status not in ENDED, f"the run ended early: {observer.last}")
        stopped = time.time()
        if observer.last.status not in ENDED:
            handle = self.client.get_workflow_handle(self.run_id)
            await handle.signal("stop", "the faults are over")
        try:
            await observer.until(_has_ended, ENDED_WITHIN_S, "the run to end")
        except TimeoutError as error:
            problems.expect(False, str(error))
        self.say(f"run ended as {observer.last.status} at step {observer.last.step}")
        return stopped

    async def _servers_back(self, observer: Observer) -> None:
        def all_there(look: Look) -> bool:
            there = [targets.find(self.base.stack, role) for role in targets.SERVERS]
            return None not in there or look.status in ENDED

        await observer.until(all_there, SETTLED_WITHIN_S, "all servers after the last fault")

    async def _judge(
        self,
        store: ArtifactStore,
        story: report.Story,
        clean: report.Clean,
        problems: checker.Verdict,
        last: Look,
    ) -> dict[str, Any]:
        orphans = checker.Verdict("no orphan process")
        left = await self._servers_left()
        orphans.expect(not left, f"servers outlived their run: {left}")
        found = await history.read(self.client, self.run_id)
        self.say(f"{found.executions} executions, {len(found.activities)} activities to check")
        await asyncio.to_thread(self.base.stack.down)
        still = targets.of_home(self.base.stack.home)
        orphans.expect(not still, f"processes outlived the stack: {still}")
        self._keep(story, found)
        landed = [(w.spec.name, w.landed, w.proof) for w in self.witnesses]
        judged = [
            checker.witnessed(landed, planned=len(self.plan.faults)),
            report.went_on(story, found, problems),
            checker.ended(found.memos[-1][1] if found.memos else {}),
            checker.delivery(found),
            checker.no_losses(found),
            checker.examples(found, epoch_sizes(found)),
            checker.batches(found, last.step),
            checker.versions(found, [look.version for look in story.looks]),
            checker.gate(checker.pushes(found), stored.served(store, found)),
            stored.artifacts(store, found),
            stored.contents(store, found),
            orphans,
        ]
        numbers = await asyncio.to_thread(_recompute, store.url, self.run_id, last.step)
        judged += [checker.Verdict(**verdict) for verdict in numbers.pop("verdicts")]
        rewards = stored.rewards(store, self.run_id, last.step)
        about = {
            "run": self.run_id,
            **numbers,
            "disk": self.base.disk.kind,
            "steps_to_reward": report.steps_to_reward(rewards),
        }
        return report.report(story, found, clean, judged, about)

    def _keep(self, story: report.Story, found: history.Evidence) -> None:
        """Writes what was seen beside the logs, for whoever looks into a violation."""
        result = [vars(signal) for signal in found.signals]
        done = [vars(activity) for activity in found.activities]
        seen = {
            "faults": [as_json(witness) for witness in story.witnesses],
            "looks": [vars(look) for look in story.looks],
            "restarts": story.restarts,
            "signals": result,
            "activities": done,
        }
        (self.base.stack.home / "logs" / "evidence.json").write_text(json.dumps(seen))

    async def _servers_left(self) -> list[str]:
        deadline = time.monotonic() + NO_SERVER_WITHIN_S
        while left := [f"{r.run} {r.host}" for r in reaper.records(self.base.stack.home)]:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        return left


def _at_step(step: int) -> Callable[[Look], bool]:
    return lambda look: look.version >= step or look.status in ENDED


def _has_ended(look: Look) -> bool:
    return look.status in ENDED


def epoch_sizes(found: history.Evidence) -> dict[str, int]:
    """Numbers of train examples by env, as reported to dispatch."""
    for workflow, given in found.started.items():
        if "/dispatch/" in workflow:
            return {
                name.removeprefix("train/"): count
                for name, count in given["examples"].items()
                if name.startswith("train/")
            }
    return {}


def _recompute(url: str, run_id: str, step: int) -> dict[str, Any]:
    seq_len = load(CONFIG, list(OVERRIDES)).trainer.seq_len
    command = [sys.executable, "-m", "tests.chaos.numerics", url, run_id, str(seq_len), str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        text = done.stderr[-2000:]
        failed = {"name": "numbers can be recomputed", "checked": 1, "violations": [text]}
        return {"worst_nats": None, "verdicts": [failed]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def session(folder: Path, plan: Plan, overrides: Sequence[str], say: Say) -> dict[str, Any]:
    """Carries a plan out under `folder`; returns the figures."""
    config = load(CONFIG, [*OVERRIDES, *overrides])
    async with base(folder, plan.disk_mib, config, say) as ready:
        client = await Client.connect(ready.stack.direct, data_converter=WIRE)
        return await Session(ready, client, plan, say).perform(config)
