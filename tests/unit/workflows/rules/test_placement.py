"""A lost server is tried once more, then reported and left; what is not ours is only ever tried."""

from collections.abc import Mapping

import pytest

from ratchet.activities.contracts.names import ENGINE_LOST, ENV_LOST
from ratchet.activities.contracts.rollouts import GroupWork, Kind
from ratchet.workflows.protocol.messages import Control, EnvTarget, LostServer
from ratchet.workflows.rules.placement import Attempt, Places
from tests.unit.workflows.support import ENGINES, ENVS

WORK = GroupWork("train/0", "train", "a", 0, 2)
FIRST = LostServer("engine", 0, 1, "gone")


def places(**envs: EnvTarget) -> Places:
    """Two engines, and two envs or those given."""
    made = Places()
    listed(made, envs or ENVS)
    return made


def listed(made: Places, envs: Mapping[str, EnvTarget], engines: bool = True) -> None:
    """The run lists these env servers."""
    made.relist(Control(1, engines=list(ENGINES) if engines else [], envs=dict(envs)))


def of(env: str, kind: Kind = "train") -> GroupWork:
    """A group of an env."""
    return GroupWork(f"{kind}/0", kind, env, 0, 2)


def test_least_loaded_engine_is_used_and_of_two_the_first() -> None:
    p = places()
    assert p.engine({}) == p.engine({1: 4}) == ENGINES[0]
    assert p.engine({0: 4, 1: 2}) == ENGINES[1]
    listed(p, ENVS, engines=False)
    assert p.engine({}) is None


def test_engine_is_avoided_for_a_rest_then_reported_and_avoided_for_good() -> None:
    p, attempt = places(), Attempt(WORK, ENGINES[0], "tcp://a")
    assert p.leave(attempt, ENGINE_LOST, "gone") is None
    assert p.engine({}) == ENGINES[1]
    p.forgive(attempt)
    assert p.engine({}) == ENGINES[0]
    assert p.leave(attempt, ENGINE_LOST, "gone") == FIRST
    p.forgive(attempt)
    assert p.engine({}) == ENGINES[1], "a rest does not help any more"
    p.engines[0] = ENGINES[0].__class__(0, 2, "http://0", "m", 0)
    assert p.engine({}) == p.engines[0], "it was restarted"


def test_rollouts_try_every_place_twice_and_finalizing_only_the_first() -> None:
    p, rollouts = places(), Attempt(WORK, ENGINES[0], "tcp://a")
    seen = [p.leave(rollouts, ENGINE_LOST, "gone") for _ in range(4)]
    assert seen == [None, FIRST, None, FIRST]
    p, scoring = places(), Attempt(WORK, ENGINES[0], finalizing=True)
    seen = [p.leave(scoring, ENGINE_LOST, "gone") for _ in range(4)]
    assert seen == [None, FIRST, FIRST, FIRST]


def test_env_server_is_reported_by_its_epoch_and_found_again_at_another_address() -> None:
    p, attempt = places(), Attempt(WORK, ENGINES[0], "tcp://a")
    p.leave(attempt, ENV_LOST, "gone")
    assert p.address(of("a")) == "" and p.address(of("b")) == "tcp://b" and p.address(of("c")) == ""
    p.forgive(attempt)
    assert p.address(of("a")) == "tcp://a"
    assert p.leave(attempt, ENV_LOST, "gone") == LostServer("env", 0, 1, "gone")
    p.forgive(attempt)
    assert p.address(of("a")) == ""
    listed(p, {"a": EnvTarget(0, 2, "tcp://a2")})
    assert p.address(of("a")) == "tcp://a2"


def test_least_loaded_of_an_envs_servers_is_used_and_one_that_is_lost_leaves_the_others() -> None:
    envs = {
        "a": EnvTarget(0, 1, "tcp://a"),
        "a:3": EnvTarget(2, 1, "tcp://a3"),
        "b": EnvTarget(3, 1, "tcp://b"),
    }
    p = places(**envs)
    assert p.address(of("a")) == p.address(of("a"), {"tcp://a3": 1}) == "tcp://a"
    assert p.address(of("a"), {"tcp://a": 4, "tcp://a3": 2}) == "tcp://a3"
    assert p.address(of("b"), {"tcp://b": 9}) == "tcp://b"
    attempt = Attempt(WORK, ENGINES[0], "tcp://a3")
    p.leave(attempt, ENV_LOST, "gone")
    assert p.address(of("a"), {"tcp://a": 99}) == "tcp://a"
    p.forgive(attempt)
    assert p.leave(attempt, ENV_LOST, "gone") == LostServer("env", 2, 1, "gone")
    p.forgive(attempt)
    assert p.address(of("a"), {"tcp://a": 99}) == "tcp://a"
    listed(p, envs | {"a:3": EnvTarget(2, 2, "tcp://a3-again")})
    assert p.address(of("a"), {"tcp://a": 99}) == "tcp://a3-again"


@pytest.mark.parametrize("target", [EnvTarget(0, 0, "tcp://a"), EnvTarget(0, 2, "tcp://a2"), None])
def test_env_server_that_is_not_ours_or_not_the_present_one_is_never_reported(
    target: EnvTarget | None,
) -> None:
    p, attempt = places(), Attempt(WORK, ENGINES[0], "tcp://a")
    listed(p, {} if target is None else {"a": target})
    for _ in range(3):
        assert p.leave(attempt, ENV_LOST, "gone") is None
        p.forgive(attempt)
    listed(p, {"a": EnvTarget(0, 0, "tcp://a")})
    assert p.address(of("a")) == "tcp://a", "it can only be tried again"


def test_train_and_eval_with_a_server_each_use_their_own_alone() -> None:
    envs = {"train/a": EnvTarget(0, 1, "tcp://t"), "b": EnvTarget(1, 1, "tcp://b")}
    p = places(**envs)
    assert p.address(of("a")) == "tcp://t" and p.address(of("a", "eval")) == ""
    assert p.address(of("b")) == p.address(of("b", "eval")) == "tcp://b"
    listed(p, envs | {"eval/a": EnvTarget(2, 1, "tcp://e")})
    assert p.address(of("a", "eval")) == "tcp://e"
    attempt = Attempt(of("a", "eval"), ENGINES[0], "tcp://e")
    p.leave(attempt, ENV_LOST, "gone")
    assert p.address(of("a", "eval")) == "" and p.address(of("a")) == "tcp://t"
    assert p.leave(attempt, ENV_LOST, "gone") == LostServer("env", 2, 1, "gone")
