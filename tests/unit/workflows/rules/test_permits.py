"""Permits follow the load of all engines, of their present epochs, and of nothing less."""

from dataclasses import replace

from ratchet.activities.contracts.hosting import EngineLoad
from ratchet.workflows.protocol.state import GenerationState, HostState, Lease, RunState
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.permits import Permits
from tests.unit.workflows.support import config

CONFIG = config(dispatch={"max_inflight_rollouts": "auto"}, inference={"engines": 2})


def made() -> tuple[Permits, RunState]:
    """Two engines are up, and 40 rollouts in flight."""
    state = RunState()
    state.servers.hosts = [
        HostState("engine", k, f"engine-{k}", epoch=2, up=True, verified=0) for k in range(2)
    ]
    state.dispatch.generations = [GenerationState(0, Lease(), inflight_train=40)]
    permits = Permits(CONFIG, state, Fleet(state.servers.hosts))
    permits.change(CONFIG)
    state.permits.limits.permits = 40
    return permits, state


LOAD = EngineLoad(
    index=0, epoch=2, running=20, waiting=0, kv_usage=0.95, preemptions=0, kv_tokens=4000,
    max_model_len=100,
)  # fmt: skip


def test_nothing_is_decided_before_every_engine_has_reported() -> None:
    permits, state = made()
    assert permits.on_load(0.0, LOAD) == "" and permits.on_load(10.0, LOAD) == ""
    assert state.permits.limits.permits == 40 and state.permits.controller.polled_at is None
    assert permits.on_load(11.0, replace(LOAD, index=1)) != ""
    assert state.permits.limits.permits < 40 and state.permits.limits.trim


def test_engines_that_are_down_are_not_waited_for() -> None:
    permits, state = made()
    state.servers.hosts[1].up = False
    assert permits.on_load(0.0, LOAD) != ""


def test_loads_of_earlier_epochs_count_for_nothing() -> None:
    permits, state = made()
    assert permits.on_load(0.0, replace(LOAD, index=1)) == ""
    state.servers.hosts[1].epoch = 3
    assert permits.on_load(5.0, replace(LOAD, index=1)) == "" and permits.on_load(5.0, LOAD) == ""
    assert permits.on_load(6.0, replace(LOAD, index=1, epoch=3)) != ""


def test_the_load_of_an_engine_that_is_down_says_nothing_of_the_others() -> None:
    permits, state = made()
    state.servers.hosts[0].up = False
    assert permits.on_load(0.0, replace(LOAD, index=1)) != ""
    before = replace(state.permits.limits)
    assert permits.on_load(30.0, LOAD) == "" and state.permits.limits == before
    assert state.permits.controller.polled_at == 0.0


def test_permits_that_are_configured_stay_whatever_the_load() -> None:
    permits, state = made()
    permits.change(config(dispatch={"max_inflight_rollouts": 40}))
    for index in range(2):
        assert permits.on_load(0.0, replace(LOAD, index=index)) == ""
    assert state.permits.limits.permits == 40 and state.permits.controller.polled_at is None
