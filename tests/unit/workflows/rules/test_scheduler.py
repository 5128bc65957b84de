"""What starts next: one permit pool, evals first, put-backs before fresh groups, every group once.

The scheduler as part of a whole run is tested in test_pipeline.py.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.names import ENGINE_LOST, ENV_LOST
from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.workflows.protocol.state import EvalEpoch, Lease
from ratchet.workflows.rules.flights import Flight
from ratchet.workflows.rules.placement import Attempt
from ratchet.workflows.rules.scheduler import Blocked, Part, Scheduler
from tests.unit.workflows.support import (
    ENGINES,
    ENVS,
    EPOCH,
    EXAMPLES,
    admitted,
    config,
    control,
    finish,
    names,
    scheduler,
    why,
)

# -- permits --------------------------------------------------------------------------------


def test_permits_are_one_pool_and_evals_go_first() -> None:
    s = scheduler(evals=[EPOCH])
    parts = admitted(s)
    expected = ["eval/0-0/a/0", "eval/0-0/a/1", "eval/0-0/a/2", "train/0"]
    assert names(parts) == expected
    assert why(s) == s.gauges().waiting_for == "a free permit"
    finish(s, parts[1])
    assert isinstance(s.admit(0.0), Part) and s.gauges().waiting_for == ""


def test_parts_free_their_permits_and_a_begun_group_goes_first() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=3)
    parts = admitted(s)
    seen = [(part.work.group, part.first, part.last) for part in parts]
    assert seen == [("train/0", 0, 1), ("train/0", 1, 2), ("train/1", 0, 1)]
    assert parts[0].engine == parts[1].engine, "a group stays on one engine"
    s.on_control(control(1, permits=3, evals=[EPOCH]))
    assert not s.on_ended("train/0", 0)
    (part,) = admitted(s)
    assert part.work.kind == "eval", "an eval stops new train work, half a group included"
    assert s.on_ended("train/0", 1)
    s.flights.remove(s.flights["train/0"])
    (part,) = admitted(s)
    assert (part.work.group, part.first) == ("eval/0-0/a/0", 1)


def test_part_ends_once() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=2)
    admitted(s)
    assert not s.on_ended("train/0", 1)
    with pytest.raises(AssertionError):
        s.on_ended("train/0", 1)
    assert s.on_ended("train/0", 0), "in whatever order its parts end"


def test_rollouts_that_end_inside_a_part_free_their_permits_once() -> None:
    s = scheduler(permits=4)
    assert names(admitted(s)) == ["train/0", "train/1"]
    assert s.on_released({"train/0/0": 1}) and s.flights.executing("train") == 3
    assert not s.on_released({"train/0/0": 1}), "a signal that came twice"
    assert not s.on_released({"train/0/0": 3}), "more than the part has"
    assert not s.on_released({"train/0/1": 1, "train/9/0": 1, "train/0": 1, "": 1, "x/y": 1})
    assert s.on_released({"train/1/0": 1}) and s.flights.executing("train") == 2
    assert names(admitted(s)) == ["train/2"]
    assert s.on_ended("train/0", 0), "the part ends with all of its rollouts, told or not"
    assert not s.on_released({"train/0/0": 2}), "a signal that came too late"
    s.flights.remove(s.flights["train/0"])
    assert not s.on_released({"train/0/0": 2})
    assert s.flights.executing("train") == 3


def test_lowered_permits_stop_admission_alone() -> None:
    s = scheduler(permits=4)
    first, second = admitted(s)
    s.on_control(control(1, permits=2))
    assert s.flights.executing("train") == 4 and why(s) == "a free permit"
    finish(s, first)
    assert why(s) == "a free permit"
    finish(s, second)
    assert len(admitted(s)) == 1


# -- places ---------------------------------------------------------------------------------


def lose(s: Scheduler, part: Part) -> Attempt:
    """The part finds its engine gone."""
    attempt = Attempt(part.work, part.engine)
    s.places.leave(attempt, ENGINE_LOST, "gone")
    return attempt


def test_groups_go_to_the_least_loaded_usable_engine() -> None:
    s = scheduler()
    parts = admitted(s)
    assert [part.engine.index for part in parts] == [0, 1, 0, 1]
    lose(s, parts[0])
    finish(s, parts[1])
    assert [part.engine.index for part in admitted(s)] == [1]
    finish(s, parts[0])
    lost = lose(s, parts[3])
    assert why(s) == "an engine at a verified version"
    s.places.forgive(lost)
    assert admitted(s)


def test_env_that_is_away_holds_back_its_own_evals_only() -> None:
    other = EvalEpoch("0-1/b", "b", 0, 1, 2)
    s = scheduler(evals=[EPOCH, other])
    work = GroupWork("eval/0-0/a/9", "eval", "a", 9, 2)
    lost = Attempt(work, ENGINES[0], ENVS["a"].address)
    s.places.leave(lost, ENV_LOST, "gone")
    assert names(admitted(s)) == ["eval/0-1/b/0"]
    assert why(s) == "the env server of a", "train counters go in order"
    s.places.forgive(lost)
    assert names(admitted(s))[0] == "eval/0-0/a/0"


# -- control --------------------------------------------------------------------------------


def test_older_control_is_ignored_and_stop_ends_admission() -> None:
    s = scheduler()
    assert s.on_control(control(5, stop=True))
    assert not s.on_control(control(4))
    assert why(s) == "the run is stopping"


def test_pause_carries_through_what_has_begun_and_says_so() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=1)
    admitted(s)
    s.close()
    s.on_control(control(1, pause="drain"))
    (part,) = admitted(s)
    assert (part.work.group, part.first) == ("train/0", 1) and why(s) == "the run is paused"


def test_queued_evals_are_counted_to_the_last_rollout() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=1, evals=[EPOCH])
    assert s.queued_eval == 6
    admitted(s)
    assert s.queued_eval == 5, "half a group was handed out"


def test_cursor_is_what_was_not_admitted() -> None:
    s = scheduler(permits=4, evals=[EPOCH], put_backs=["train/90.1"], put_backs_before=0)
    admitted(s)
    s.on_control(control(1, permits=10, evals=[EPOCH], put_backs=["train/90.1"]))
    admitted(s)
    lease = s.cursor()
    assert (lease.next_train, lease.put_backs, lease.evals) == (1, 1, {"0-0/a": 3})
    s.on_control(control(2, evals=[]))
    assert s.cursor().evals == {}, "an epoch that is over leaves the lease"


def test_closed_generation_carries_through_what_has_begun_and_nothing_else() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=1, put_backs=["train/90.1"])
    assert names(admitted(s)) == ["train/90.1"]
    s.close()
    s.on_control(control(1, put_backs=["train/90.1", "train/91.1"], evals=[EPOCH]))
    assert names(admitted(s)) == ["train/90.1"]
    assert s.cursor().put_backs == 1 and s.cursor().next_train == 0


def test_generations_that_overlap_stay_within_one_pool() -> None:
    parts: dict[str, Any] = {"dispatch": {"rollouts_per_activity": 1}}
    old = scheduler(permits=3, **parts)
    assert names(admitted(old)) == ["train/0", "train/0", "train/1"]
    assert not old.on_ended("train/0", 0)
    old.close()
    told = old.reserved
    young = scheduler(old.cursor(), permits=3 - told, older=told, **parts)
    admitted(young)
    admitted(old)
    flights = [*old.flights.values(), *young.flights.values()]
    assert sum(flight.executing for flight in flights) == 3


# -- limits ---------------------------------------------------------------------------------


def test_rate_limit_holds_over_hand_overs_and_spends_a_burst_at_most() -> None:
    limit: dict[str, Any] = {"tasks_per_minute": 60, "permits": 1000, "train_limit": 1000}
    s = scheduler(**limit)
    assert not admitted(s, now=0.0), "the bucket starts empty"
    started = sum(part.last - part.first for part in admitted(s, now=60.0))
    assert started == 4, "five seconds' worth, in whole groups of two"
    blocked = s.admit(60.0)
    assert isinstance(blocked, Blocked) and blocked.retry_s == pytest.approx(1.0)
    s.close()
    t = scheduler(s.cursor(), **limit)
    count = 0
    for second in range(61, 121):
        count += sum(part.last - part.first for part in admitted(t, float(second)))
    assert 58 <= count <= 60


def test_rate_limit_follows_control() -> None:
    s = scheduler(permits=1000, train_limit=1000, tasks_per_minute=60)
    assert not admitted(s, now=0.0)
    s.on_control(control(1, permits=8, train_limit=1000))
    assert len(admitted(s)) == 4, "no limit: as many as there are permits"
    s.on_control(control(2, permits=1000, train_limit=1000, tasks_per_minute=120))
    assert why(s) == "the rate limit (tasks_per_minute)"
    assert len(admitted(s, now=3.0)) == 3


def test_what_is_left_of_a_begun_group_is_paid_for_at_the_hand_over() -> None:
    limits: dict[str, Any] = {"tasks_per_minute": 60, "dispatch": {"rollouts_per_activity": 1}}
    s = scheduler(permits=1, **limits)
    s.admit(0.0)
    assert names(admitted(s, now=3.0)) == ["train/0"]
    before = s.cursor().tokens
    s.close()
    assert s.cursor().tokens == before - 1
    assert not s.on_ended("train/0", 0)
    assert names(admitted(s, now=3.0)) == ["train/0"] and s.cursor().tokens == before - 1


def test_burst_cap_lets_executing_rollouts_grow_by_a_burst_a_window() -> None:
    s = scheduler(dispatch={"burst": 4}, permits=100, train_limit=100)
    parts = admitted(s, now=0.0)
    assert len(parts) == 2 and why(s, now=1.0) == "the burst cap"
    blocked = s.admit(1.0)
    assert isinstance(blocked, Blocked) and blocked.retry_s == pytest.approx(4.0)
    finish(s, parts[0])
    assert len(admitted(s, now=2.0)) == 1, "what ends makes room at once"
    assert len(admitted(s, now=5.0)) == 2


def test_burst_cap_goes_on_over_a_hand_over() -> None:
    limits: dict[str, Any] = {"dispatch": {"burst": 4}, "train_limit": 100}
    s = scheduler(permits=100, **limits)
    assert len(admitted(s, now=10.0)) == 2
    s.close()
    t = scheduler(s.cursor(), permits=96, older=4, **limits)
    assert why(t, now=11.0) == "the burst cap"
    t.on_control(control(1, permits=98, older=2, train_limit=100))
    assert len(admitted(t, now=12.0)) == 1, "a group of the older generation has ended"


def test_burst_that_is_less_than_a_part_still_lets_one_start() -> None:
    s = scheduler(dispatch={"burst": 1})
    assert len(admitted(s, now=10.0)) == 1, "groups have two rollouts"


def test_automatic_burst_cap_is_a_tenth_of_all_permits() -> None:
    auto: dict[str, Any] = {"dispatch": {"burst": "auto"}, "train_limit": 100}
    assert len(admitted(scheduler(permits=100, **auto), now=10.0)) == 5
    assert len(admitted(scheduler(permits=60, older=40, **auto), now=10.0)) == 5
    assert len(admitted(scheduler(permits=20, **auto), now=10.0)) == 4, "but 8 rollouts at least"


# -- put-backs ------------------------------------------------------------------------------


def test_put_back_groups_go_before_fresh_ones_and_no_limit_holds_them() -> None:
    s = scheduler(train_limit=1, put_backs=["train/3.1", "train/8.2"])
    assert names(admitted(s)) == ["train/3.1", "train/8.2", "train/0"]
    assert s.cursor().put_backs == 2


def test_put_backs_are_counted_since_the_run_began() -> None:
    s = scheduler(Lease(put_backs=3), put_backs=["train/7.1", "train/8.1"], put_backs_before=2)
    assert names(admitted(s))[0] == "train/8.1", "train/7.1 was admitted before"
    s.on_control(control(1, permits=100, put_backs=["train/9.1"], put_backs_before=4))
    assert names(admitted(s))[0] == "train/9.1"


def test_put_back_evals_go_first_and_those_of_finished_evals_are_passed_by() -> None:
    put_backs = ["eval/0-9/a/0", "eval/0-0/a/1", "train/3.1"]
    s = scheduler(Lease(evals={"0-0/a": 2}), evals=[EPOCH], put_backs=put_backs)
    assert names(admitted(s))[:3] == ["eval/0-0/a/1", "eval/0-0/a/2", "train/3.1"]
    assert s.cursor().put_backs == 3


def test_put_back_evals_do_not_wait_for_train_groups_put_back_before_them() -> None:
    put_backs = ["train/3.1", "eval/0-0/a/1"]
    s = scheduler(Lease(evals={"0-0/a": 3}), permits=2, evals=[EPOCH], put_backs=put_backs)
    assert names(admitted(s)) == ["eval/0-0/a/1"]


def test_draws_of_a_curriculum_replace_the_turn() -> None:
    s = scheduler(train_limit=3, draws={"1": 41, "3": 42}, put_backs=["train/3.1"])
    assert {p.work.group: p.work.example for p in admitted(s)}.items() >= {
        ("train/1", 41),
        ("train/3.1", 42),
    }


# -- giving up ------------------------------------------------------------------------------


def test_stale_groups_in_flight_are_named_and_evals_never() -> None:
    s = scheduler(evals=[EvalEpoch("0-0/a", "a", 0, 1, 2)])
    admitted(s)
    assert s.oldest == 0
    s.on_control(control(1, version=8, next_version=8))
    assert s.stale() == []
    s.on_control(control(2, version=8, next_version=9))
    assert s.stale() == ["train/0", "train/1", "train/2"]


def test_given_up_group_is_handed_out_no_further() -> None:
    s = scheduler(dispatch={"rollouts_per_activity": 1}, permits=1)
    assert names(admitted(s)) == ["train/0"]
    s.flights.cancel(s.flights["train/0"], "stale")
    assert s.reserved == 1, "it needs no permit for what is never handed out"
    assert not s.on_ended("train/0", 0)
    assert names(admitted(s)) == ["train/1"]


def test_overload_names_the_youngest_train_groups_and_evals_never() -> None:
    s = scheduler(evals=[EvalEpoch("0-0/a", "a", 0, 1, 2)])
    assert names(admitted(s)) == ["eval/0-0/a/0", "train/0", "train/1", "train/2"]
    s.on_control(control(1, permits=5))
    assert s.overload() == [], "fewer permits alone cancel nothing"
    s.on_control(control(2, permits=5, trim=True))
    assert s.overload() == ["train/2", "train/1"]
    s.on_control(control(3, permits=0, trim=True))
    assert s.overload() == ["train/2", "train/1", "train/0"]


def crowded(permits: int, groups: list[tuple[str, str, int]]) -> Scheduler:
    """A scheduler that is to trim groups in flight: name, kind, rollouts that execute."""
    s = scheduler(permits=permits, trim=True)
    for name, kind, executing in groups:
        work = GroupWork(name, kind, "a", 0, 16)  # type: ignore[arg-type]
        s.flights.enter(flight := Flight(work, ENGINES[0], 0))
        s.flights.hand_out(flight, executing)
    return s


@pytest.mark.parametrize(
    ("permits", "chosen"), [(27, 0), (26, 1), (19, 1), (18, 2), (0, 3), (-5, 3)]
)
def test_the_youngest_train_groups_go_and_never_an_eval(permits: int, chosen: int) -> None:
    train = [("train/1", 8), ("train/2", 3), ("train/3", 0), ("train/4", 8)]
    groups = [(name, "train", executing) for name, executing in train]
    s = crowded(permits, [*groups, ("eval/1", "eval", 8)])
    assert s.overload() == ["train/4", "train/2", "train/1"][:chosen]
    s.flights.cancel(s.flights["train/4"], "overload")
    assert s.overload() == ["train/2", "train/1"][: max(chosen - 1, 0)], "none goes in its place"


@given(
    st.lists(st.tuples(st.integers(0, 16), st.sampled_from(["train", "eval"]))), st.integers(-9, 99)
)
def test_no_more_goes_than_must(kinds: list[tuple[int, str]], permits: int) -> None:
    groups = [(f"{kind}/{n}", kind, executing) for n, (executing, kind) in enumerate(kinds)]
    s = crowded(permits, groups)
    chosen = s.overload()
    left = [f for name, f in s.flights.items() if name not in chosen]
    remaining = sum(flight.executing for flight in left)
    order = [flight.work.group for flight in left if flight.work.kind == "train" and flight.begun]
    assert remaining <= max(permits, 0) or not order
    assert all(s.flights[name].work.kind == "train" for name in chosen)
    if chosen:
        assert remaining + s.flights[chosen[-1]].executing > permits
        ages = list(s.flights)
        assert all(ages.index(name) < ages.index(chosen[-1]) for name in order)


# -- all together ---------------------------------------------------------------------------


@given(st.data())
def test_whatever_happens_each_example_is_admitted_once_and_permits_hold(
    data: st.DataObject,
) -> None:
    part_size = data.draw(st.sampled_from([None, 1]))
    dispatch = {"rollouts_per_activity": part_size}
    epochs = [EvalEpoch("0-0/a", "a", 0, 5, 2)]
    put_backs = ["train/3.1", "train/8.1"]
    limit, seq, lease = 30, 0, Lease()
    rolled: Counter[str] = Counter()
    for _ in range(40):
        s = Scheduler(config(dispatch=dispatch), EXAMPLES, lease)
        running: list[Part] = []

        def admit_all(s: Scheduler = s, running: list[Part] = running) -> list[Part]:
            running += (new := admitted(s))
            for part in new:
                rolled[part.work.group] += part.last - part.first
            return new

        def end(place: int, s: Scheduler = s, running: list[Part] = running) -> None:
            part = running.pop(place)
            if s.on_ended(part.work.group, part.first):
                s.flights.remove(s.flights[part.work.group])

        for _ in range(data.draw(st.integers(1, 6))):
            seq += 1
            permits = data.draw(st.integers(2, 10))
            known = {"train_limit": limit, "evals": epochs, "put_backs": put_backs}
            s.on_control(control(seq, permits=permits, **known))
            before = s.flights.executing()
            admit_all()
            assert s.flights.executing() <= max(permits, before)
            for _ in range(data.draw(st.integers(0, len(running)))):
                end(data.draw(st.integers(0, len(running) - 1)))
        s.close()
        # The tail: nothing new is admitted, what has begun is carried through.
        begun = set(s.flights)
        while running or s.flights:
            assert {part.work.group for part in admit_all()} <= begun
            assert running, "deadlock: a group in flight that nothing finishes"
            end(-1)
        assert s.flights.executing() == 0
        lease = s.cursor()
        if len(rolled) == limit + 5 + 2:
            break
    expected = {f"train/{n}" for n in range(limit)} | set(put_backs)
    expected |= {f"eval/0-0/a/{n}" for n in range(5)}
    assert set(rolled) <= expected and set(rolled.values()) == {2}
