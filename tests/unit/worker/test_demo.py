"""A demo watches its run, through an API that listens, to its end or to where it rests; and what
it leaves of the stack that it started.
"""

import asyncio
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ratchet.activities.contracts.health import REWARD
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.client import Ratchet, printing
from ratchet.api.client.watch import Watch
from ratchet.api.schemas.metrics import EvalRecord, MetricsRow
from ratchet.api.schemas.run import Run
from ratchet.configs.load import validate
from ratchet.worker import demo
from ratchet.worker.stack import Addresses, Ended
from tests import ROOT
from tests.unit.api import conftest as api
from tests.unit.api.client.support import on_server, serving
from tests.unit.api.conftest import WITHIN_S, Served, config

temporal, served = api.temporal, api.served


@pytest.mark.parametrize("name", ["ends", "rests"])
@on_server
async def test_it_is_over_once_its_run_ends_or_rests(
    served: Served, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = printing.console(stderr=True)
    async with serving(served) as address:
        performing = asyncio.to_thread(demo.perform, address, validate(config(name)), console)
        outcome = await asyncio.wait_for(performing, WITHIN_S)
        if name == "rests":
            with Ratchet(address) as client:
                await asyncio.to_thread(client.runs.stop, outcome.run.id)
    assert demo.is_stuck(outcome.run) == (name == "rests")
    status = demo.report(outcome, console)
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and json.loads(said.out)["run_id"] == outcome.run.id
    assert status == (1 if name == "rests" else 0)
    assert ("paused itself: the disk is full" in said.err) == (name == "rests")


@pytest.mark.parametrize("kept", [False, True])
@on_server
async def test_an_interrupt_cancels_its_run_unless_the_stack_is_kept(
    served: Served, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def interrupted(watch: Watch) -> Run:
        seen.append(watch._view.run.id)
        raise Ended(signal.SIGTERM)

    monkeypatch.setattr(Watch, "follow", interrupted)
    monkeypatch.setenv("RATCHET_DEMO_KEEP", "1" if kept else "")
    console = printing.console(stderr=True)
    async with serving(served) as address:
        with pytest.raises(Ended):
            await asyncio.to_thread(demo.perform, address, validate(config("going")), console)
        with Ratchet(address) as client:
            run = await asyncio.to_thread(client.runs.retrieve, seen[0])
            if kept:
                assert run.status not in ENDED
                await asyncio.to_thread(client.runs.cancel, run.id)
            else:
                assert run.status == "cancelled"


@on_server
async def test_its_last_line_has_the_run_s_figures(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = (await served.start("ends"))["id"]
    async with serving(served) as address:
        with Ratchet(address) as client:
            run = await asyncio.to_thread(client.runs.retrieve, run_id)
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    steps = [
        MetricsRow(step=step, time=None, metrics={REWARD: reward})
        for step, reward in enumerate(rewards, 1)
    ]
    evals = [
        EvalRecord.model_validate({"epoch": f"{step}-1/e", "step": step, "reward_mean": mean})
        for step, mean in ((0, 0.2), (6, 0.7))
    ]
    demo.report(demo.Outcome(run, steps, evals, 12.34), printing.console(stderr=True))
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["train_reward_averaged_steps"] == 4
    assert result["train_reward_first"] == pytest.approx(0.25)
    assert result["train_reward_last"] == pytest.approx(0.65)
    assert "train reward: 0.25, then 0.65; means of the first and of the last 4 steps" in said.err
    assert (result["eval_reward_first"], result["eval_reward_last"]) == (0.2, 0.7)
    assert result["wall_s"] == 12.3


def test_both_ends_of_a_run_are_averaged_over_as_many_steps() -> None:
    rewards = [step / 10 for step in range(1, 21)]
    assert demo.ends(rewards) == (5, pytest.approx(0.3), pytest.approx(1.8))
    assert demo.ends(rewards[:3]) == (1, 0.1, pytest.approx(0.3))
    assert demo.ends(rewards[:1]) == (1, 0.1, 0.1)
    assert demo.ends([]) == (0, None, None)


@pytest.mark.parametrize(
    ("ran", "supervisor", "kept", "stops"),
    [
        ([], None, "", True),
        (["api"], None, "", False),
        ([], 42, "", False),
        ([], None, "1", False),
    ],
)
def test_a_demo_stops_only_a_stack_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ran: list[str],
    supervisor: int | None,
    kept: str,
    stops: bool,
) -> None:
    stopped = []

    class Double:
        home = tmp_path

        def running(self) -> list[str]:
            return ran

        def up(self) -> Addresses:
            return Addresses("localhost:7233", "", "http://127.0.0.1:8080")

        def down(self) -> None:
            stopped.append(True)

    def perform(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RATCHET_DEMO_KEEP", kept)
    monkeypatch.setattr(demo, "Stack", lambda home: Double())
    monkeypatch.setattr(demo, "perform", perform)
    monkeypatch.setattr(demo, "supervisor_of", lambda home: supervisor)
    console = Console(record=True, width=200)
    with pytest.raises(KeyboardInterrupt):
        demo.demo(str(ROOT / "configs/examples/reverse_text.toml"), [], console)
    assert bool(stopped) is stops
    assert ("`make up` keeps it" in console.export_text()) is (supervisor is not None)


def test_an_interrupt_while_the_run_is_created_cancels_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, cancelled = [], []

    def create(config: Any, *, idempotency_key: str) -> Any:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise KeyboardInterrupt
        return SimpleNamespace(id="late-1a2b3c")

    client: Any = SimpleNamespace(address="http://h", runs=SimpleNamespace(create=create))
    monkeypatch.delenv("RATCHET_DEMO_KEEP", raising=False)
    monkeypatch.setattr(demo, "give_up", lambda address, run, console: cancelled.append(run))
    config: Any = None
    with pytest.raises(KeyboardInterrupt):
        demo.requested(client, config, Console(record=True))
    assert cancelled == ["late-1a2b3c"] and len(keys) == 2 and len(set(keys)) == 1
