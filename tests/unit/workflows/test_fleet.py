"""Servers of a run: offered only while up and verified, by the newest epoch."""

from typing import Any

from activities.contracts.hosting import HostReport
from tests.unit.workflows.support import config
from workflows.fleet import MAX_DOWNS, Fleet, planned_hosts
from workflows.messages import EnvTarget


def report(epoch: int, state: Any, role: Any = "engine") -> HostReport:
    """A report about host 0 of `role`."""
    return HostReport(role, 0, epoch, state, f"http://{epoch}", "q", f"m{epoch}")


def test_engine_is_offered_only_while_up_and_verified_in_its_epoch() -> None:
    fleet = Fleet(planned_hosts(config()))
    assert not fleet.engines()
    assert fleet.on_report(report(1, "up")) and not fleet.engines()
    fleet.host("engine", 0).verified = 0
    assert [e.epoch for e in fleet.engines()] == [1] and fleet.synced(0)
    assert fleet.on_report(report(2, "up")), "a restart that was never seen going down"
    assert not fleet.engines() and not fleet.synced(0)
    assert not fleet.on_report(report(1, "down")), "an old epoch changes nothing"
    assert fleet.host("engine", 0).up


def test_server_that_never_comes_up_breaks_its_run() -> None:
    fleet = Fleet(planned_hosts(config()))
    for epoch in range(1, MAX_DOWNS + 1):
        assert fleet.broken() is None
        fleet.on_report(report(epoch, "down"))
    broken = fleet.broken()
    assert broken is not None and broken.name == "engine-0"
    fleet.on_report(report(MAX_DOWNS + 1, "up"))
    assert fleet.broken() is None


def test_env_with_an_address_is_connected_to_and_not_started() -> None:
    envs = [{"id": "a", "address": "tcp://there:5000"}, {"id": "b"}]
    fleet = Fleet(planned_hosts(config(train={"env": envs}, eval={})))
    assert fleet.envs() == {"a": EnvTarget(0, 0, "tcp://there:5000")}
    assert [(h.name, h.managed) for h in fleet.of("env")] == [("a", False), ("b", True)]
