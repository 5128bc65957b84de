"""The pure parts of the workflows: sources, sinks, scheduler, fleet and message parsing."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.contracts.hosting import HostReport
from activities.contracts.rollouts import EngineTarget, FilterTally, GroupResult
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
from workflows.scheduler import Blocked, Part, Scheduler
from workflows.sinks import TrainSink, ship_input
from workflows.sources import (
    TrainSource,
    fired_evals,
    interleave,
    next_attempt,
    permute,
    smooth_cycle,
    train_counter,
    train_group,
)
from workflows.state import EvalEpoch, Lease, TrainProgress

EXAMPLES = {"train/a": 50, "train/b": 50}


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


@given(ratios=st.lists(st.floats(0.05, 20), min_size=1, max_size=5))
def test_smooth_cycle_never_strays_from_its_ratios(ratios: list[float]) -> None:
    order = smooth_cycle(ratios)
    counts = [order.count(k) for k in range(len(ratios))]
    assert min(counts) >= 1
    for length in range(1, len(order) + 1):
        for k, count in enumerate(counts):
            assert abs(order[:length].count(k) - length * count / len(order)) < len(ratios)


def test_smooth_cycle_interleaves_as_nginx_does() -> None:
    assert smooth_cycle([5, 1, 1]) == [0, 0, 1, 0, 2, 0, 0]
    assert smooth_cycle([1.0, 1.0]) == [0, 1] and smooth_cycle([0.5, 0.25, 0.25]) == [0, 1, 2, 0]


@given(rollouts=st.integers(0, 500), sizes=st.tuples(st.sampled_from([2, 4, 8]), st.just(4)))
def test_counter_for_is_the_first_that_has_enough_rollouts(
    rollouts: int, sizes: tuple[int, int]
) -> None:
    envs = [{"id": "a", "ratio": 3, "group_size": sizes[0]}, {"id": "b", "group_size": sizes[1]}]
    source = TrainSource(config(train={"env": envs, "batch_size": 8}), EXAMPLES)
    counter = source.counter_for(rollouts)
    assert source.rollouts_below(counter) >= rollouts
    assert counter == 0 or source.rollouts_below(counter - 1) < rollouts
    works = [source.work(train_group(n)) for n in range(counter)]
    assert sum(work.size for work in works) == source.rollouts_below(counter)


# -- sinks ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=200))
def test_admissions_suffice_for_every_allowed_batch_and_never_run_ahead(
    survivors: list[int],
) -> None:
    sink, source = TrainSink(config(), TrainProgress()), TrainSource(config(), EXAMPLES)
    version, counter, outcomes = 0, 0, iter(survivors)
    while version < 10:
        limit = source.counter_for(sink.rollouts_wanted(version))
        assert counter <= limit
        while counter < limit:
            sink.add(delivered(f"train/{counter}", next(outcomes, 2)))
            counter += 1
            limit = source.counter_for(sink.rollouts_wanted(version))
        batches = min(10, version + 2) - sink.progress.shipped_batches
        assert sink.collected >= 8 * batches, "a batch that may ship could never be filled"
        assert sink.collected < 8 * batches + 2 * 4, "rollouts beyond what may ship"
        cut = sink.cut()
        assert 8 <= sum(group.survivors for group in cut) < 10
        version += 1


def test_group_with_tokens_of_refused_weights_leaves_no_trace() -> None:
    sink = TrainSink(config(), TrainProgress())
    before = sink.rollouts_wanted(0)
    sink.add(delivered("train/0", labels=["1.2a", "1.2b"]))
    sink.add(delivered("train/1", survivors=1, labels=["1.2a"]))
    assert [g.group for g in sink.discard(["1.2a"])] == ["train/0", "train/1"]
    assert sink.collected == 0 and sink.rollouts_wanted(0) == before


@given(versions=st.lists(st.integers(0, 30), max_size=40), step=st.integers(1, 30))
def test_no_group_of_a_batch_is_staler_than_the_bound(versions: list[int], step: int) -> None:
    sink = TrainSink(config(), TrainProgress())
    for number, version in enumerate(versions):
        sink.add(replace(delivered(f"train/{number}"), version_start=version))
    swept = sink.sweep(step)
    assert all(step - 1 - group.version_start > 8 for group in swept)
    assert all(step - 1 - group.version_start <= 8 for group in sink.progress.ready)
    assert len(swept) + len(sink.progress.ready) == len(versions)


def test_empty_batch_makes_room_for_another() -> None:
    sink = TrainSink(config(), TrainProgress())
    for number in range(4):
        sink.add(delivered(f"train/{number}"))
    assert sink.rollouts_wanted(0) == 16
    sink.cut()
    sink.on_empty()
    assert sink.rollouts_wanted(0) == 24, "eight are spent and two batches are still to be filled"


def test_ship_input_names_the_batch_by_content() -> None:
    one, two, none = delivered("train/0"), delivered("train/1"), FilterTally()
    assert (
        ship_input("r", 1, [one, two], none).digest != ship_input("r", 1, [two, one], none).digest
    )


# -- scheduler ------------------------------------------------------------------------------

ENGINES = [EngineTarget(k, 1, f"http://{k}", "m", 0) for k in range(2)]
ENVS = {name: EnvTarget(k, 1, f"tcp://{name}") for k, name in enumerate("ab")}
EPOCH = EvalEpoch("0-0/a", "a", 0, 3, 2)


def control(seq: int, **changes: Any) -> Control:
    """Two engines, both envs up."""
    known: dict[str, Any] = {"permits": 8, "train_limit": 20, "engines": ENGINES}
    return Control(seq=seq, envs=ENVS, **{**known, **changes})


def scheduler(
    lease: Lease | None = None, dispatch: dict[str, Any] | None = None, **changes: Any
) -> Scheduler:
    """A scheduler that has heard one control."""
    made = Scheduler(config(dispatch=dispatch or {}), EXAMPLES, lease or Lease())
    made.on_control(control(0, **changes))
    return made


def admitted(s: Scheduler, now: float = 0.0) -> list[Part]:
    """Everything that may start now."""
    parts = []
    while isinstance(part := s.admit(now), Part):
        parts.append(part)
    return parts


def finish(s: Scheduler, part: Part) -> None:
    """All of a group's rollouts end with this part."""
    assert s.on_ended(part.work.group, part.last - part.first)
    s.on_finished(part.work.group)


def why(s: Scheduler, now: float = 0.0) -> str:
    """Why nothing more may start."""
    blocked = s.admit(now)
    assert isinstance(blocked, Blocked)
    return blocked.reason


def test_permits_are_one_pool_and_evals_go_first() -> None:
    s = scheduler(evals=[EPOCH])
    parts = admitted(s)
    expected = ["eval/0-0/a/0", "eval/0-0/a/1", "eval/0-0/a/2", "train/0"]
    assert [part.work.group for part in parts] == expected
    assert why(s) == "a free permit"
    finish(s, parts[1])
    assert [part.work.group for part in admitted(s)] == ["train/1"]


def test_parts_free_their_permits_and_a_begun_group_goes_first() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1, "max_inflight_rollouts": 3}, permits=3)
    parts = admitted(s)
    seen = [(part.work.group, part.first, part.last) for part in parts]
    assert seen == [("train/0", 0, 1), ("train/0", 1, 2), ("train/1", 0, 1)]
    assert parts[0].engine == parts[1].engine, "a group stays on one engine"
    s.on_control(control(1, permits=3, evals=[EPOCH]))
    assert not s.on_ended("train/0", 1)
    (part,) = admitted(s)
    assert part.work.kind == "eval", "an eval stops new train work, half a group included"
    assert s.on_ended("train/0", 1)
    s.on_finished("train/0")
    (part,) = admitted(s)
    assert (part.work.group, part.first) == ("eval/0-0/a/0", 1)


def test_groups_go_to_the_least_loaded_usable_engine() -> None:
    s = scheduler()
    parts = admitted(s)
    assert [part.engine.index for part in parts] == [0, 1, 0, 1]
    s.avoid_engine(ENGINES[0])
    finish(s, parts[1])
    assert [part.engine.index for part in admitted(s)] == [1]
    finish(s, parts[0])
    s.avoid_engine(ENGINES[1])
    assert why(s) == "an engine at a verified version"
    s.forgive_engine(ENGINES[1])
    assert admitted(s)


def test_older_control_is_ignored_and_stop_ends_admission() -> None:
    s = scheduler()
    assert s.on_control(control(5, stop=True))
    assert not s.on_control(control(4))
    assert why(s) == "the run is stopping"


def test_rate_limit_holds_over_hand_overs_and_spends_a_burst_at_most() -> None:
    limit = {"tasks_per_minute": 60}
    s = scheduler(dispatch=limit, permits=1000, train_limit=1000)
    assert not admitted(s, now=0.0), "the bucket starts empty"
    started = sum(part.last - part.first for part in admitted(s, now=60.0))
    assert started == 4, "five seconds' worth, in whole groups of two"
    blocked = s.admit(60.0)
    assert isinstance(blocked, Blocked) and blocked.retry_s == pytest.approx(1.0)
    s.close()
    t = scheduler(s.cursor(), dispatch=limit, permits=1000, train_limit=1000)
    count = 0
    for second in range(61, 121):
        count += sum(part.last - part.first for part in admitted(t, float(second)))
    assert 58 <= count <= 60


def test_stale_groups_in_flight_are_named_and_evals_never() -> None:
    s = scheduler(evals=[EvalEpoch("0-0/a", "a", 0, 1, 2)])
    admitted(s)
    assert s.oldest == 0
    s.on_control(control(1, version=8, next_version=8))
    assert s.stale() == []
    s.on_control(control(2, version=8, next_version=9))
    assert s.stale() == ["train/0", "train/1", "train/2"]


@given(st.data())
def test_whatever_happens_each_example_is_admitted_once_and_permits_hold(
    data: st.DataObject,
) -> None:
    part_size = data.draw(st.sampled_from([None, 1]))
    dispatch = {"rollouts_per_activity": part_size, "max_inflight_rollouts": 10}
    epochs = [EvalEpoch("0-0/a", "a", 0, 5, 2)]
    put_backs = ["train/3.1", "train/8.1"]
    limit, seq, lease = 30, 0, Lease()
    rolled: Counter[str] = Counter()
    for _ in range(40):
        s = scheduler(lease, dispatch, train_limit=0, evals=epochs, put_backs=[])
        running: list[Part] = []
        for _ in range(data.draw(st.integers(1, 6))):
            seq += 1
            permits = data.draw(st.integers(2, 10))
            known = {"train_limit": limit, "evals": epochs, "put_backs": put_backs}
            s.on_control(control(seq, permits=permits, **known))
            before = s.inflight_train + s.inflight_eval
            running += (new := admitted(s))
            for part in new:
                rolled[part.work.group] += part.last - part.first
            assert s.inflight_train + s.inflight_eval <= max(permits, before)
            for _ in range(data.draw(st.integers(0, len(running)))):
                part = running.pop(data.draw(st.integers(0, len(running) - 1)))
                if s.on_ended(part.work.group, part.last - part.first):
                    s.on_finished(part.work.group)
        s.close()
        # The tail: nothing new is admitted, what has begun is carried through.
        begun = set(s.flights)
        while running or s.flights:
            new = admitted(s)
            assert {part.work.group for part in new} <= begun
            running += new
            for part in new:
                rolled[part.work.group] += part.last - part.first
            assert running, "deadlock: a group in flight that nothing finishes"
            part = running.pop()
            if s.on_ended(part.work.group, part.last - part.first):
                s.on_finished(part.work.group)
        assert s.inflight_train == s.inflight_eval == 0
        lease = s.cursor()
        if len(rolled) == limit + 5 + 2:
            break
    expected = {f"train/{n}" for n in range(limit)} | set(put_backs)
    expected |= {f"eval/0-0/a/{n}" for n in range(5)}
    assert set(rolled) <= expected and set(rolled.values()) == {2}


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
