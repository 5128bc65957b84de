"""Servers of a run: offered only while up and verified, by the newest epoch."""

from dataclasses import replace
from typing import Any

import pytest

from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.roles import sections_of
from ratchet.workflows.protocol.messages import EnvTarget
from ratchet.workflows.rules.fleet import MAX_DOWNS, Fleet, held_hosts, hosts_of, shared
from tests.unit.workflows.support import config


def report(epoch: int, state: Any, role: Any = "engine") -> HostReport:
    """A report about host 0 of `role`."""
    return HostReport(role, 0, epoch, state, f"http://{epoch}", "q", f"m{epoch}")


def test_engine_is_offered_only_while_up_and_verified_in_its_epoch() -> None:
    fleet = Fleet(hosts_of(config()))
    assert not fleet.engines()
    assert fleet.on_report(report(1, "up")) and not fleet.engines()
    fleet.host("engine", 0).verified = 0
    assert [e.epoch for e in fleet.engines()] == [1] and fleet.synced(0)
    assert fleet.on_report(report(2, "up")), "a restart that was never seen going down"
    assert not fleet.engines() and not fleet.synced(0)
    assert not fleet.on_report(report(1, "down")), "an old epoch changes nothing"
    assert fleet.host("engine", 0).up


def test_a_pause_is_no_restart() -> None:
    fleet = Fleet(hosts_of(config()))
    fleet.on_report(report(1, "up"))
    fleet.on_report(report(2, "up"))
    host = fleet.host("engine", 0)
    assert fleet.restarts()["engine"] == 1
    fleet.put_away(host)
    assert not fleet.on_report(report(2, "down")), "it comes late, and changes nothing"
    fleet.on_report(report(3, "starting"))
    fleet.on_report(report(3, "up"))
    assert fleet.restarts()["engine"] == 1 and host.up and host.detail == ""
    fleet.on_report(report(4, "starting"))
    assert fleet.restarts()["engine"] == 2, "a loss after a pause is one"


def test_a_server_that_cannot_come_back_after_a_pause_is_known() -> None:
    fleet = Fleet(hosts_of(config()))
    fleet.on_report(report(1, "up"))
    fleet.put_away(fleet.host("engine", 0))
    assert fleet.on_report(report(1, "failed")) and fleet.broken() is not None


def test_server_that_never_comes_up_breaks_its_run() -> None:
    fleet = Fleet(hosts_of(config()))
    for epoch in range(1, MAX_DOWNS + 1):
        assert fleet.broken() is None
        fleet.on_report(report(epoch, "down"))
    broken = fleet.broken()
    assert broken is not None and broken.name == "engine-0"
    fleet.on_report(report(MAX_DOWNS + 1, "up"))
    assert fleet.broken() is None


def test_an_env_whose_server_is_lost_again_and_again_without_a_group() -> None:
    fleet = Fleet(hosts_of(config()))
    host = fleet.host("env", 0)
    for epoch in range(1, MAX_DOWNS + 1):
        assert not fleet.dies_in_vain(host)
        for state in ("up", "down"):
            fleet.on_report(replace(report(epoch, state), role="env"))
    assert fleet.dies_in_vain(host) and host.downs == 1
    fleet.on_group("another")
    assert fleet.dies_in_vain(host)
    fleet.on_group(host.name)
    assert not fleet.dies_in_vain(host)


def test_env_with_an_address_is_connected_to_and_not_started() -> None:
    envs = [{"id": "a", "address": "tcp://there:5000"}, {"id": "b"}]
    fleet = Fleet(hosts_of(config(train={"env": envs}, eval={})))
    assert fleet.envs() == {"a": EnvTarget(0, 0, "tcp://there:5000")}
    assert [(h.name, h.managed) for h in fleet.of("env")] == [("a", False), ("b", True)]


def test_an_evaluation_has_engines_and_eval_envs_alone() -> None:
    made = config(max_steps=0, train={"env": []}, eval={"env": [{"id": "a"}, {"id": "b"}]})
    assert [(h.role, h.name) for h in hosts_of(made)] == [
        ("engine", "engine-0"),
        ("env", "a"),
        ("env", "b"),
    ]


def test_train_and_eval_that_differ_get_a_server_each() -> None:
    """Of one env; what differs is what a server is started by."""
    train = [{"id": "a", "args": {"n": 1}}, {"id": "b"}, {"id": "c", "path": "/c"}]
    evals = [{"id": "b", "num_examples": 3}, {"id": "a"}, {"id": "c"}, {"id": "d"}]
    made = config(train={"env": train}, eval={"env": evals})
    hosts = hosts_of(made)
    servers = [(h.index, h.name) for h in hosts if h.role == "env"]
    names = ["train/a", "b", "train/c", "eval/a", "eval/c", "d"]
    assert servers == list(enumerate(names))
    served = {name: [kind for kind, _ in sections_of(made, name)] for name in names}
    assert served == {
        "train/a": ["train"],
        "b": ["train", "eval"],
        "train/c": ["train"],
        "eval/a": ["eval"],
        "eval/c": ["eval"],
        "d": ["eval"],
    }
    before = [(h.index, h.name) for h in shared(hosts) if h.role == "env"]
    assert before == [(0, "a"), (1, "b"), (2, "c"), (3, "d")], "as runs of older builds have them"


def test_workers_of_an_env_are_servers_each() -> None:
    """Sections that share servers share as many as the larger number."""
    train = [{"id": "a", "workers": 3}, {"id": "b"}, {"id": "c", "args": {"n": 1}, "workers": 2}]
    evals = [{"id": "a"}, {"id": "b", "workers": 2}, {"id": "c"}]
    made = config(train={"env": train}, eval={"env": evals})
    hosts = [h for h in hosts_of(made) if h.role == "env"]
    names = ["a", "a:2", "a:3", "b", "b:2", "train/c", "train/c:2", "eval/c"]
    assert [(h.index, h.name) for h in hosts] == list(enumerate(names))
    served = [[(kind, env.name) for kind, env in sections_of(made, name)] for name in names]
    both = [("train", "a"), ("eval", "a")]
    assert served[:3] == [both] * 3 and served[3:5] == [[("train", "b"), ("eval", "b")]] * 2
    assert served[5:] == [[("train", "c")]] * 2 + [[("eval", "c")]]


def envs_of(cores: int, **sections: Any) -> list[str]:
    """Names of the env servers of a run of 600 permits on a machine with so many cores."""
    made = config(**{"dispatch": {"max_inflight_rollouts": 600}, **sections})
    return [host.name for host in hosts_of(made, cores) if host.role == "env"]


def test_an_env_has_a_server_for_each_256_permits_on_half_of_the_cores() -> None:
    one = {"env": [{"id": "a"}]}
    assert envs_of(16, train=one) == ["a", "a:2", "a:3"]
    assert envs_of(16, train=one, dispatch={"max_inflight_rollouts": 512}) == ["a", "a:2"]
    assert len(envs_of(16, train=one, dispatch={"max_inflight_rollouts": "auto"})) == 4
    assert envs_of(4, train=one) == ["a", "a:2"]
    assert envs_of(0, train=one) == envs_of(2, train=one) == ["a"], "the first needs no core"
    assert len(envs_of(999, train=one, dispatch={"max_inflight_rollouts": 100_000})) == 64


def test_envs_share_the_cores_and_a_number_or_an_address_of_one_stands() -> None:
    both = {"env": [{"id": "a"}, {"id": "b", "workers": 3}]}
    assert envs_of(8, train=both, eval={"env": [{"id": "a"}]}) == ["a", "a:2", "b", "b:2", "b:3"]
    there = {"env": [{"id": "a", "address": "tcp://there:5000"}]}
    assert envs_of(64, train=there, eval={}) == ["a"]


@pytest.mark.parametrize(
    "over",
    [
        report(2, "starting"),
        report(2, "up"),
        report(2, "down"),
        report(2, "failed"),
        report(3, "starting"),
    ],
    ids=lambda over: f"{over.state}-{over.epoch}",
)
def test_host_waits_for_the_store_until_it_starts_comes_up_or_goes_down(over: HostReport) -> None:
    fleet = Fleet(hosts_of(config()))
    waits = replace(report(2, "starting"), detail="No space left on device")
    assert fleet.on_report(report(2, "starting")) and held_hosts(fleet.hosts) == {}
    assert fleet.on_report(waits)
    assert held_hosts(fleet.hosts) == {"host engine/0": "No space left on device"}
    assert fleet.on_report(over) and held_hosts(fleet.hosts) == {}


def test_a_start_keeps_why_the_last_epoch_ended_unless_it_has_a_reason_of_its_own() -> None:
    fleet = Fleet(hosts_of(config()))
    fleet.on_report(replace(report(1, "down"), detail="killed by signal 9"))
    fleet.on_report(report(2, "starting"))
    assert fleet.host("engine", 0).detail == "killed by signal 9"
    fleet.on_report(replace(report(2, "starting"), detail="No space left on device"))
    assert fleet.host("engine", 0).detail == "No space left on device"


def test_late_word_of_a_wait_changes_nothing_once_the_server_is_up() -> None:
    fleet = Fleet(hosts_of(config()))
    fleet.on_report(report(2, "up"))
    assert not fleet.on_report(replace(report(2, "starting"), detail="No space left on device"))
    assert held_hosts(fleet.hosts) == {} and fleet.host("engine", 0).up
