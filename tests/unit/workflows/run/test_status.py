"""What a run says of itself: its status as people read it, reasons, and what waits to hold."""

from ratchet.workflows.protocol.state import HostState, PermitsState, RunState
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.run.status import details, memo, shown_status
from tests.unit.workflows.support import config


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
