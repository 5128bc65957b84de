"""The pure parts of the workflows: sources, sinks, scheduler, fleet and message parsing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.contracts.hosting import HostReport
from activities.contracts.rollouts import EngineTarget, GroupResult
from activities.storage.refs import ArtifactRef
from configs.load import validate
from configs.run import RunConfig
from workflows.fleet import MAX_DOWNS, Fleet, planned_hosts
from workflows.messages import (
    Control,
    EnvTarget,
    normal_signal_name,
    parse_stop,
    parse_trigger_eval,
)
from workflows.scheduler import Scheduler
from workflows.sinks import TrainSink, ship_input
from workflows.sources import (
    TrainSource,
    fired_evals,
    interleave,
    next_attempt,
    permute,
    train_counter,
    train_group,
)
from workflows.state import EvalEpoch, Lease, TrainProgress


def config(**overrides: Any) -> RunConfig:
    """Batches of 8 rollouts in groups of 2, over two envs."""
    data: dict[str, Any] = {
        "max_steps": 10,
        "train": {
            "env": [{"id": "a"}, {"id": "b"}],
            "batch_size": 8,
            "group_size": 2,
        },
        "eval": {"env": [{"id": "a"}], "interval": 4, "num_examples": 3, "group_size": 2},
    }
    return validate({**data, **overrides})


def delivered(group: str, survivors: int = 2, labels: list[str] | None = None) -> GroupResult:
    """A finalized train group of two rollouts."""
    ref = ArtifactRef(group, group.rjust(64, "0"), 1, group)
    counts = {"size": 2, "survivors": survivors, "errored": 2 - survivors}
    return GroupResult(
        group=group,
        kind="train",
        env="a",
        ref=ref,
        **counts,
        reward_mean=0.5,
        samples=survivors,
        tokens=8,
        version_start=0,
        labels=labels or ["0.1a"],
    )


# -- sources --------------------------------------------------------------------------------


@given(size=st.integers(1, 300), key=st.text(max_size=8))
def test_permute_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_depends_on_its_key_and_has_not_changed() -> None:
    orders = {key: [permute(i, 50, key) for i in range(50)] for key in ("0/a/0", "0/a/1", "1/a/0")}
    assert len({tuple(order) for order in orders.values()}) == 3
    # A run that goes on after an upgrade must find its examples where it left them.
    assert [permute(i, 10, "0/reverse-text/0") for i in range(10)] == PINNED_ORDER


PINNED_ORDER = [0, 1, 4, 3, 6, 5, 2, 7, 8, 9]


@given(sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)), epochs=st.integers(1, 3))
def test_train_source_serves_every_example_once_an_epoch(
    sizes: tuple[int, int], epochs: int
) -> None:
    source = TrainSource(config(), {"train/a": sizes[0], "train/b": sizes[1]})
    for place, (name, size) in enumerate(zip("ab", sizes, strict=True)):
        for epoch in range(epochs):
            drawn = range(epoch * size, (epoch + 1) * size)
            works = [source.work(train_group(n * 2 + place)) for n in drawn]
            assert {work.env for work in works} == {name}
            assert sorted(work.example for work in works) == list(range(size))


def test_put_back_group_is_the_same_example_under_a_new_id() -> None:
    source = TrainSource(config(), {"train/a": 9, "train/b": 9})
    again = next_attempt(next_attempt("train/7"))
    assert again == "train/7.2" and train_counter(again) == (7, 2)
    assert source.work(again).example == source.work("train/7").example


def test_evals_interleave_and_go_on_from_their_cursors() -> None:
    epochs = [EvalEpoch("0-0/a", "a", 0, 3, 1), EvalEpoch("0-1/b", "b", 0, 2, 1)]
    ids = [work.group for work in interleave(epochs, {"0-0/a": 1})]
    assert ids == ["eval/0-1/b/0", "eval/0-0/a/1", "eval/0-1/b/1", "eval/0-0/a/2"]


def test_evals_fire_at_start_at_their_interval_and_at_the_end() -> None:
    assert [step for step in range(11) if fired_evals(config(), step)] == [0, 4, 8, 10]
    skipping = config(eval={"env": [{"id": "a", "interval": 5}], "skip_first_step": True})
    assert [step for step in range(11) if fired_evals(skipping, step)] == [5, 10]


# -- sinks ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=200))
def test_admissions_suffice_for_every_allowed_batch_and_never_run_ahead(
    survivors: list[int],
) -> None:
    sink = TrainSink(config(), TrainProgress())
    version, counter, outcomes = 0, 0, iter(survivors)
    while version < 10:
        limit = sink.train_limit(version)
        assert counter <= limit
        while counter < limit:
            sink.add(delivered(f"train/{counter}", next(outcomes, 2)))
            counter += 1
            limit = sink.train_limit(version)
        batches = min(10, version + 2) - sink.progress.shipped_batches
        assert sink.collected >= 8 * batches, "a batch that may ship could never be filled"
        assert sink.collected < 8 * batches + 2 * 4, "rollouts beyond what may ship"
        cut = sink.cut()
        assert 8 <= sum(group.survivors for group in cut) < 10
        version += 1


def test_group_with_tokens_of_refused_weights_leaves_no_trace() -> None:
    sink = TrainSink(config(), TrainProgress())
    before = sink.train_limit(0)
    sink.add(delivered("train/0", labels=["1.2a", "1.2b"]))
    sink.add(delivered("train/1", survivors=1, labels=["1.2a"]))
    assert [g.group for g in sink.discard(["1.2a"])] == ["train/0", "train/1"]
    assert sink.collected == 0 and sink.train_limit(0) == before


def test_ship_input_names_the_batch_by_content() -> None:
    one, two = delivered("train/0"), delivered("train/1")
    assert ship_input("r", 1, [one, two]).digest != ship_input("r", 1, [two, one]).digest


# -- scheduler ------------------------------------------------------------------------------

ENGINES = [EngineTarget(k, 1, f"http://{k}", "m", 0) for k in range(2)]


ENVS = {name: EnvTarget(k, 1, f"tcp://{name}") for k, name in enumerate("ab")}


def control(seq: int, **changes: Any) -> Control:
    """Two engines, both envs up."""
    known: dict[str, Any] = {"permits": 8, "train_limit": 20, "engines": ENGINES}
    return Control(seq=seq, envs=ENVS, **{**known, **changes})


def scheduler(lease: Lease | None = None, **changes: Any) -> Scheduler:
    """A scheduler with 50 examples an env that has heard one control."""
    made = Scheduler(config(), {"train/a": 50, "train/b": 50}, lease or Lease())
    made.on_control(control(0, **changes))
    return made


def test_permits_are_one_pool_and_evals_go_first() -> None:
    epoch = EvalEpoch("0-0/a", "a", 0, 3, 2)
    s = scheduler(evals=[epoch])
    admitted = [s.admit() for _ in range(5)]
    groups = [a[0].group for a in admitted if a]
    assert groups == ["eval/0-0/a/0", "eval/0-0/a/1", "eval/0-0/a/2", "train/0"]
    assert s.waiting_for() == "a free permit"
    s.on_finished("eval/0-0/a/1")
    decision = s.admit()
    assert decision is not None and decision[0].group == "train/1"


def test_groups_go_to_the_least_loaded_usable_engine() -> None:
    s = scheduler()
    chosen = [decision[1].index for _ in range(4) if (decision := s.admit())]
    assert chosen == [0, 1, 0, 1]
    s.avoid_engine(ENGINES[0])
    s.on_finished("train/1")
    decision = s.admit()
    assert decision is not None and decision[1].index == 1
    s.on_finished("train/0")
    s.avoid_engine(ENGINES[1])
    assert s.admit() is None and s.waiting_for() == "an engine at a verified version"
    s.forgive_engine(ENGINES[1])
    assert s.admit() is not None


def test_older_control_is_ignored_and_stop_ends_admission() -> None:
    s = scheduler()
    assert s.on_control(control(5, stop=True))
    assert not s.on_control(control(4))
    assert s.admit() is None and s.waiting_for() == "the run is stopping"


@given(st.data())
def test_over_hand_overs_each_example_is_admitted_once(data: st.DataObject) -> None:
    epochs = [EvalEpoch("0-0/a", "a", 0, 5, 2)]
    put_backs = ["train/3.1", "train/8.1"]
    limit = 30
    seen: list[str] = []
    lease, seq = Lease(), 0
    while len(seen) < limit + 5 + 2:
        s = scheduler(lease, train_limit=0, evals=epochs)
        for _ in range(data.draw(st.integers(1, 12))):
            seq += 1
            permits = data.draw(st.integers(2, 10))
            s.on_control(
                control(seq, permits=permits, train_limit=limit, evals=epochs, put_backs=put_backs)
            )
            while (decision := s.admit()) is not None:
                seen.append(decision[0].group)
                assert s.inflight_train + s.inflight_eval <= permits
            for group in (
                data.draw(st.sets(st.sampled_from(sorted(s.flights)))) if s.flights else []
            ):
                s.on_finished(group)
        s.close()
        assert s.admit() is None
        lease = s.cursor()
    assert len(seen) == len(set(seen))
    expected = {f"train/{n}" for n in range(limit)} | set(put_backs)
    assert set(seen) == expected | {f"eval/0-0/a/{n}" for n in range(5)}


# -- fleet ----------------------------------------------------------------------------------


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


# -- messages -------------------------------------------------------------------------------


@given(
    st.one_of(st.none(), st.binary(), st.text(), st.integers(), st.lists(st.none()), st.floats())
)
def test_public_signals_never_raise(value: Any) -> None:
    assert parse_stop(value).reason
    request, _ = parse_trigger_eval(value, ["a", "b"])
    assert set(request.envs) <= {"a", "b"}


@pytest.mark.parametrize(
    ("value", "envs", "warned"),
    [
        (None, ["a", "b"], False),
        ("b", ["b"], False),
        ({"envs": ["b", "x"]}, ["b"], True),
        (b'{"env": "a"}', ["a"], False),
        ('["a"]', ["a"], False),
        ("x", [], True),
        ({}, ["a", "b"], False),
        (7, ["a", "b"], True),
    ],
)
def test_trigger_eval_reads_what_clis_send(value: Any, envs: list[str], warned: bool) -> None:
    request, warning = parse_trigger_eval(value, ["a", "b"])
    assert request.envs == envs and bool(warning) == warned


@pytest.mark.parametrize(
    "value",
    ["1" * 5000, "[" * 200_000, '"\\ud800"', b'"\\ud800"', {"reason": "\ud800"}, [["\ud800"] * 9]],
    ids=["huge number", "deep nest", "surrogate", "surrogate bytes", "in a dict", "in a list"],
)
def test_hostile_payloads_become_text_that_any_converter_carries(value: Any) -> None:
    parse_stop(value).reason.encode()
    _, warning = parse_trigger_eval(value, ["a"])
    warning.encode()


def test_signal_names_have_spellings() -> None:
    spellings = ["Stop", "stop-run", "trigger-eval", "TriggerEval", "reload"]
    known = [normal_signal_name(name) for name in spellings]
    assert known == ["stop", "stop", "trigger_eval", "trigger_eval", "reload"]
