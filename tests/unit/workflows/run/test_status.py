"""What a run says of itself: its status as people read it, reasons, and what waits to hold."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.state import (
    GenerationState,
    HostState,
    Lease,
    PermitsState,
    RunState,
    Waiting,
)
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.run.status import RunLog, details, memo, shown_status
from tests.unit.workflows.support import config

HALF_AN_HOUR = timedelta(minutes=30)


def at(status: str, pause: str = "", reason: str = "") -> RunState:
    """A run in a status."""
    state = RunState(permits=PermitsState(limits_of(config())))
    state.lifecycle.status = status
    state.requests.pause, state.requests.pause_reason = pause, reason  # type: ignore[assignment]
    return state


def test_what_nobody_pauses_is_not_paused() -> None:
    assert shown_status(at("paused", "drain")) == "paused"
    assert shown_status(at("paused")) == "starting", "as one that was just restored"
    held = at("running")
    assert shown_status(held) == "running"
    held.outages.holds["batch 3"] = "the disk is full"
    assert shown_status(held) == "paused"


def test_a_request_is_shown_before_it_is_carried_out() -> None:
    asked = at("running", "drain")
    assert shown_status(asked) == "pausing"
    asked.requests.stop = "enough"
    assert shown_status(asked) == "stopping"
    asked.lifecycle.status = "starting"
    assert shown_status(asked) == "starting"


def test_the_reason_of_a_pause_is_there_until_the_run_goes_on() -> None:
    for status in ("running", "pausing", "paused"):
        said = memo(config(), at(status, "drain", "a look at the rewards"), None)
        assert said["pause_reason"] == "a look at the rewards"
        assert said["paused_because"] is None, "it did not pause itself"
    assert memo(config(), at("starting", "drain", "soon"), None)["pause_reason"] is None


def test_changes_that_do_not_hold_yet_are_pending() -> None:
    state = at("running")
    state.live.overrides = {
        "max_steps": 9,
        "trainer": {"optim": {"lr": config().trainer.optim.lr}},
        "dispatch": {"tasks_per_minute": 7},
    }
    state.live.pending = True
    assert memo(config(), state, None)["config_pending"] == {"max_steps": 9}
    state.live.pending = False
    assert memo(config(), state, None)["config_pending"] == {}


def test_the_page_names_the_servers_that_are_down_and_why() -> None:
    state = at("running")
    state.servers.hosts = [
        HostState("engine", 0, "engine-0", up=True, detail="it was killed before"),
        HostState("engine", 1, "engine-1"),
        HostState("trainer", 0, "trainer-0", detail="CUDA error"),
    ]
    lines = details(config(), state, None, []).splitlines()
    down = [line for line in lines if ": down" in line]
    assert down == ["- engine-1: down", "- trainer-0: down (CUDA error)"]
    assert not any("engine-0" in line for line in lines)


def test_the_page_names_the_generations_that_dispatch() -> None:
    state = at("running")
    state.dispatch.generations = [
        GenerationState(1, Lease(), started=True, state="closed"),
        GenerationState(2, Lease(), started=True, inflight_train=8, waiting_for="permits"),
        GenerationState(3, Lease(), inflight_eval=4),
    ]
    lines = details(config(), state, None, []).splitlines()
    assert [line for line in lines if "generation" in line] == [
        "- dispatch generation 2: 8 train and 0 eval rollouts in flight, waits for permits",
        "- dispatch generation 3: 0 train and 4 eval rollouts in flight",
    ]


class Timed(RunLog):
    """A log outside a workflow, whose waits take no time: each is counted, calls `happens` with its
    number, and then looks for what is waited for.
    """

    def __init__(self, state: RunState, happens: Callable[[int], None]) -> None:
        super().__init__("run-1", config(), state)
        self.looks, self._happens = 0, happens

    async def _within(
        self,
        at_most: timedelta,
        name: Callable[[], str],
        predicate: Callable[[], bool],
        stoppable: bool,
    ) -> bool:
        self.looks += 1
        self._happens(self.looks)
        return predicate()

    def _name_wait(self, before: Waiting | None, name: str, at_most: timedelta) -> Waiting:
        self._waits = [waiting := Waiting(name, "", "")]
        return waiting

    def publish(self) -> None:
        """Nobody looks."""


def stalling(happens: Callable[[int], None] = lambda look: None) -> tuple[Timed, list[int]]:
    """A run that waits, and the progress that it sees."""
    return Timed(at("running"), happens), [0]


async def wait(log: Timed, progress: list[int], looks: int) -> None:
    await log.wait(
        lambda: "batch 1", lambda: log.looks >= looks, HALF_AN_HOUR, progress=lambda: progress[0]
    )


@pytest.mark.asyncio
async def test_a_run_that_waits_in_vain_is_stalled() -> None:
    log, progress = stalling()
    with pytest.raises(RunFailed, match=r"waited 0:30:00 for batch 1") as failed:
        await wait(log, progress, looks=5)
    assert failed.value.code == "stalled" and log.looks == 2 and log.waiting is None


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["progress", "a hold", "a hold that is over"])
async def test_a_wait_goes_on_by_progress_and_for_holds(by: str) -> None:
    def happens(look: int) -> None:
        if look == 2 and by == "progress":
            progress[0] += 1
        elif look == 2 and by == "a hold":
            log._state.outages.holds["batch 1"] = "the disk is full"
        elif look == 2:
            log.recoveries += 1

    log, progress = stalling(happens)
    await wait(log, progress, looks=3)
    assert log.looks == 3


@pytest.mark.asyncio
async def test_a_wait_that_only_progressed_once_is_stalled_in_the_end() -> None:
    def happens(look: int) -> None:
        progress[0] += look == 2

    log, progress = stalling(happens)
    with pytest.raises(RunFailed):
        await wait(log, progress, looks=5)
    assert log.looks == 4
