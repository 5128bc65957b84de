"""Pushes of weights: verified by their own bits alone, and rejected by labels of their own."""

from typing import Any

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import PolicyResult
from ratchet.workflows.protocol.state import HostState, ServersState
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.pushes import Pushes


def bits(name: str) -> ArtifactRef:
    """Weights of some bits."""
    return ArtifactRef("w", name, 1, name)


def engines(count: int = 2) -> list[HostState]:
    """Engines that are up and have no weights."""
    return [HostState("engine", k, f"engine-{k}", epoch=1, up=True) for k in range(count)]


def made(hosts: list[HostState]) -> tuple[Pushes, ServersState, list[str]]:
    """Version 0 is there; each wake leaves a mark."""
    part, woken = ServersState(hosts), list[str]()
    pushes = Pushes(part, Fleet(hosts), lambda: woken.append("woken"))
    pushes.begin(PolicyResult(bits("0"), 1, "origin"))
    return pushes, part, woken


def passed(pushes: Pushes, host: HostState) -> None:
    """The newest weights get to an engine."""
    push = pushes.start(host)
    pushes.on_verified(host, push, [])
    pushes.end(push)


def test_labels_of_a_push_that_failed_are_rejected() -> None:
    for refused in (True, False):
        pushes, part, woken = made(hosts := engines())
        push = pushes.start(hosts[0])
        pushes.on_failed(hosts[0], push, "gate", refused=refused)
        assert part.rejected_labels == ["0.1a", "0.1b"] == push.labels
        assert not hosts[0].up and hosts[0].gate_failures == refused and woken


def test_labels_of_tries_before_the_one_that_passed_are_rejected() -> None:
    pushes, part, woken = made(hosts := engines())
    push = pushes.start(hosts[0])
    woken.clear()
    pushes.on_verified(hosts[0], push, ["0.1a"])
    assert part.rejected_labels == ["0.1a"] and hosts[0].verified == 0 and woken


def test_no_two_pushes_have_a_label_in_common() -> None:
    pushes, _, _ = made(hosts := engines(3))
    order: list[Any] = [hosts[k] for k in (0, 1, 2, 1, 0, 0, 2)]
    labels = [label for host in order for label in pushes.start(host).labels]
    assert len(labels) == len(set(labels)) == 2 * len(order)


def test_other_bits_of_a_version_are_pushed_again() -> None:
    pushes, part, woken = made(hosts := engines())
    for host in hosts:
        passed(pushes, host)
    woken.clear()
    assert not pushes.offer(0, bits("0")) and not woken
    assert not any(pushes.is_due(host) for host in hosts)
    assert pushes.offer(0, bits("0'")) and woken
    assert all(pushes.is_due(host) for host in hosts)
    push = pushes.start(hosts[0])
    assert (push.weights, push.version) == (bits("0'"), 0) and part.weights == bits("0'")


def test_bits_that_were_replaced_on_their_way_verify_nothing() -> None:
    pushes, _, _ = made(hosts := engines())
    push = pushes.start(hosts[0])
    pushes.offer(0, bits("0'"))
    pushes.on_verified(hosts[0], push, [])
    pushes.end(push)
    assert hosts[0].verified == -1 and pushes.is_due(hosts[0])


def test_an_engine_that_came_back_is_not_verified_by_a_push_of_before() -> None:
    pushes, _, _ = made(hosts := engines())
    push = pushes.start(hosts[0])
    hosts[0].epoch += 1
    pushes.on_verified(hosts[0], push, [])
    assert hosts[0].verified == -1


def test_an_engine_that_had_traffic_counts_until_its_push_is_over() -> None:
    pushes, _, _ = made(hosts := engines())
    first = pushes.start(hosts[0])
    assert (pushes.in_flight, pushes.to_serving) == (1, 0), "it rolls nothing out yet"
    pushes.on_verified(hosts[0], first, [])
    pushes.end(first)
    assert not pushes.offer(1, bits("1"))
    push = pushes.start(hosts[0])
    assert (pushes.in_flight, pushes.to_serving) == (1, 1)
    pushes.on_verified(hosts[0], push, [])
    pushes.end(push)
    # Other bits take the traffic away, but not what is in flight.
    pushes.offer(1, bits("1'"))
    push = pushes.start(hosts[0])
    assert pushes.to_serving == 1
    pushes.end(push)
    assert (pushes.in_flight, pushes.to_serving) == (0, 0)


def test_labels_are_forgotten_once_no_group_can_bear_them() -> None:
    pushes, part, _ = made(engines())
    part.rejected_labels = ["0.1a", "7.3b", "100.9a"]
    pushes.forget_labels(100)
    assert part.rejected_labels == ["7.3b", "100.9a"]


def test_the_slowest_push_since_the_last_step_counts() -> None:
    pushes, _, _ = made(engines())
    pushes.on_timed({"load": 0.5, "pause": 0.6})
    pushes.on_timed({"load": 0.75})
    assert pushes.take_seconds() == {"load": 0.75, "pause": 0.6}
    assert pushes.take_seconds() == {}
    pushes.on_timed({"load": 0.5})
    pushes.offer(1, bits("1"))
    assert pushes.take_seconds() == {}, "that was another version"
