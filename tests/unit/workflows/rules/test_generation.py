"""What becomes of a generation's groups: one delivery each, the first cause, reports in order.

The generation as part of a whole run is tested in test_pipeline.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.workflows.protocol.messages import DispatchInput, EnvTarget, LostServer
from ratchet.workflows.protocol.state import Lease
from ratchet.workflows.rules.generation import (
    GROUPS_PER_REPORT,
    SHORT_S,
    TOGETHER,
    Generation,
)
from ratchet.workflows.rules.placement import MAX_RELOCATIONS, Attempt
from ratchet.workflows.rules.scheduler import Part
from tests.unit.workflows.support import ENGINES, EPOCH, EXAMPLES, admitted, config, control
from tests.unit.workflows.support import names as names_of


def generation(dispatch: dict[str, Any] | None = None, **changes: Any) -> Generation:
    """A generation that has taken its first turn."""
    made = config(dispatch=dispatch or {})
    plain = made.model_dump(mode="json")
    first = control(0, **changes)
    arg = DispatchInput("run", 7, plain, EXAMPLES, Queues(), Lease(), first)
    g = Generation(made, arg)
    assert not g.has_news and not g.begin_turn(long=False)
    return g


def result(part: Part) -> GroupResult:
    """The group, finalized."""
    work = part.work
    return GroupResult(work.group, work.kind, work.env, None, work.size, 2, 0, 0.5, 2, 8, 0)


def finish(g: Generation, part: Part) -> None:
    """The part ends well, and its group with it."""
    assert g.on_part_ended(part, "")
    g.on_finalized(part.work.group, result(part), "")


def delivered(g: Generation) -> list[tuple[str, str, str]]:
    """Groups of the next report: name, cause of cancellation, error."""
    return [(group.group, group.cancelled, group.error) for group in g.report().groups]


# -- who finalizes ----------------------------------------------------------------------------


def test_a_group_in_one_part_is_finalized_with_its_rollouts() -> None:
    g = generation(version=3)
    assert {g.finalize_from(part) for part in admitted(g.scheduler)} == {3}
    g = generation({"rollouts_per_activity": 1})
    assert {g.finalize_from(part) for part in admitted(g.scheduler)} == {None}


def evals(size: int, *, dispatch: dict[str, Any] | None = None, **changes: Any) -> Generation:
    """A generation with an eval of 40 examples, `size` rollouts each."""
    epoch = replace(EPOCH, num_examples=40, group_size=size)
    known: dict[str, Any] = {"evals": [epoch], "train_limit": 2, "permits": 700}
    return generation(dispatch, **{**known, "engines": ENGINES[:1], **changes})


def test_small_eval_groups_share_an_activity() -> None:
    for size, sizes in ((1, [16, 16, 8]), (5, [3] * 13 + [1]), (8, [2] * 20), (16, [1] * 40)):
        g = evals(size)
        parts = admitted(g.scheduler)
        activities = g.together(parts)
        mine = [[part.work for part in one] for one in activities if one[0].work.kind == "eval"]
        assert [len(works) for works in mine] == sizes
        assert sorted(part.work.group for one in activities for part in one) == sorted(
            part.work.group for part in parts
        )
        train = [one for one in activities if one[0].work.kind == "train"]
        assert all(len(one) == 1 for one in train)


def test_train_groups_share_an_activity_while_they_are_short() -> None:
    g = evals(1, evals=[], train_limit=64, permits=64)
    parts = admitted(g.scheduler)
    work = parts[0].work
    size = TOGETHER // work.size

    def shared() -> set[int]:
        return {len(one) for one in g.together(parts)}

    g.on_played(work, 0.1)
    assert len(parts) > size and shared() == {1}, "a history that begins without it stays so"
    g.may_share = True
    assert max(shared()) == size > 1
    g.on_played(work, SHORT_S + 0.1)
    assert shared() == {1}, "who ends first would wait for long"
    g.on_played(replace(work, kind="eval"), 0.1)
    assert shared() == {1}, "evals have other lengths"
    g.on_played(work, SHORT_S)
    assert max(shared()) == size
    g = evals(1, evals=[], train_limit=64, permits=64)
    g.may_share = True
    assert {len(one) for one in g.together(admitted(g.scheduler))} == {1}, "not known yet"


def test_what_differs_shares_no_activity() -> None:
    g = evals(2, engines=ENGINES)
    together = g.together(admitted(g.scheduler))
    assert any(len(one) == 8 for one in together)
    for one in together:
        assert len({(part.engine, part.work.env, part.work.kind) for part in one}) == 1
    # Groups in parts: an activity runs no more than the config lets it.
    g = evals(4, dispatch={"rollouts_per_activity": 2})
    assert all(len(one) == 1 for one in g.together(admitted(g.scheduler)))
    g = evals(1, dispatch={"rollouts_per_activity": 2})
    evaluated = [one for one in g.together(admitted(g.scheduler)) if one[0].work.kind == "eval"]
    assert {len(one) for one in evaluated} == {2}


def test_while_the_store_fails_each_group_has_its_own_activity() -> None:
    g = evals(1)
    parts = admitted(g.scheduler)
    g.on_held("train/0/0", "disk full", 0.0)
    assert all(len(one) == 1 for one in g.together(parts))


def test_parts_in_one_activity_are_served_from_one_place_and_may_go_on_alone() -> None:
    g = evals(1, envs={"a": EnvTarget(0, 1, "tcp://1"), "a:2": EnvTarget(1, 1, "tcp://2")})
    (first, *_) = g.together(admitted(g.scheduler))
    attempt = g.attempt_together(first)
    assert g.flights.served == {attempt.address: 16}
    for part in first:
        g.attempt(part)
    assert sorted(g.flights.served.values()) == [8, 8]


@pytest.mark.parametrize(("epoch", "version"), [(1, 7), (2, 0)])
def test_what_goes_on_alone_takes_its_engine_as_it_is_now(epoch: int, version: int) -> None:
    g = evals(1)
    (first, *_) = g.together(admitted(g.scheduler))
    g.attempt_together(first)
    before, load = first[0].engine, dict(g.flights.load)
    assert (before.index, before.epoch, before.version) == (0, 1, 0)
    now = replace(before, epoch=epoch, version=7)
    g.on_control(replace(g.scheduler.control, seq=2, version=7, next_version=7, engines=[now]))
    parts = [g.alone(part) for part in first]
    assert {part.engine.version for part in parts} == {version}
    assert {g.flights[part.work.group].engine.version for part in parts} == {version}
    assert dict(g.flights.load) == load


# -- reports --------------------------------------------------------------------------------


def test_report_carries_a_hundred_groups_and_the_rest_stays_outstanding() -> None:
    g = generation(permits=500, train_limit=250)
    parts = admitted(g.scheduler)
    for part in parts[:230]:
        finish(g, part)
    groups = [part.work.group for part in parts]
    assert GROUPS_PER_REPORT == 100 and len(groups) == 250
    for seq, start in enumerate((0, 100, 200)):
        assert g.must_report and g.has_news
        report = g.report()
        end = min(start + 100, 230)
        assert [group.group for group in report.groups] == groups[start:end]
        assert sorted(report.outstanding) == sorted(groups[end:])
        assert (report.seq, report.generation, report.run_id) == (seq, 7, "run")
    assert not g.must_report


def test_report_names_what_is_lost_once_and_what_is_held_until_it_is_not() -> None:
    g = generation()
    part = admitted(g.scheduler)[0]
    for attempt in (g.attempt(part), g.attempt(part)):
        attempt.here = 1
        assert g.on_failed(attempt, names.ENGINE_LOST, "gone")
    assert g.must_report and g.changed
    assert g.report().lost == [LostServer("engine", 0, 1, "gone")]
    assert not g.must_report and g.report().lost == []
    g.on_held("train/0", "disk full", 1.0)
    assert g.must_report and g.has_news and g.report().trouble == "disk full"
    g.on_held("train/1", "no quota", 2.0)
    g.on_held("train/0", "disk full", 3.0)
    assert not g.must_report, "the run knows"
    g.on_work_ended("train/0")
    assert not g.must_report and g.report().trouble == "no quota"
    g.on_work_ended("train/1")
    assert g.must_report and g.report().trouble == ""
    g.on_work_ended("train/1")
    assert not g.must_report


# -- turns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"stop": True}, {"pause": "drain"}, {"revision": 1}])
def test_generation_hands_over_once_when_it_is_told_to(change: dict[str, Any]) -> None:
    g = generation()
    admitted(g.scheduler)
    g.on_control(control(1, **change))
    assert g.has_news and g.must_hand_over(long=False)
    assert g.begin_turn(long=False) and not g.changed
    assert g.report().state == "tail"
    assert not g.begin_turn(long=True) and not g.is_over


def test_long_generation_hands_over_and_is_over_when_all_is_delivered() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    assert g.report().state == "open"
    assert g.begin_turn(long=True) and not g.is_over
    finish(g, part)
    assert g.has_news and not g.is_over
    assert delivered(g) == [("train/0", "", "")]
    assert g.is_over and g.report(closed=True).state == "closed"


def test_permits_that_a_tail_frees_are_reported_and_others_only_used() -> None:
    g = generation(permits=2)
    admitted(g.scheduler)
    g.on_released({"train/0/0": 1})
    assert g.changed and not g.must_report
    g.begin_turn(long=True)
    g.report()
    g.on_released({"train/0/0": 1})
    assert not g.changed and not g.must_report, "it came twice"
    g.on_released({"train/0/0": 2})
    assert g.changed and g.must_report


def test_older_control_wakes_nobody() -> None:
    g = generation()
    g.on_control(control(0, stop=True))
    assert not g.has_news and not g.scheduler.control.stop


# -- giving up ------------------------------------------------------------------------------


def test_first_cause_counts_and_one_cancellation_follows_when_all_parts_have_ended() -> None:
    g = generation({"rollouts_per_activity": 1}, permits=4)
    first, second = admitted(g.scheduler)[2:]
    g.on_control(control(1, permits=2, trim=True))
    assert g.review() == ["train/1"]
    g.on_control(control(2, permits=2, version=20, next_version=20, stop=True))
    assert g.review() == ["train/0", "train/1"] * 2, "both stopped and stale"
    assert not g.on_part_ended(first, "cancelled") and not g.outbox
    assert not g.on_part_ended(second, "") and list(g.flights) == ["train/0"]
    assert g.flights["train/0"].cancelled == "stop"
    assert delivered(g) == [("train/1", "overload", "Cancelled: overload")]


def test_group_between_two_parts_is_given_up_at_once() -> None:
    g = generation({"rollouts_per_activity": 1}, permits=1)
    (part,) = admitted(g.scheduler)
    assert not g.on_part_ended(part, "") and not g.outbox
    g.on_control(control(1, permits=1, pause="cancel"))
    g.review()
    assert delivered(g) == [("train/0", "pause", "Cancelled: pause")]


def test_group_that_is_given_up_while_it_is_finalized_is_cancelled() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    assert g.on_part_ended(part, "")
    assert g.give_up(["train/0"], "stale") and not g.outbox, "an activity works on it"
    g.on_finalized("train/0", result(part), "")
    assert delivered(g) == [("train/0", "stale", "Cancelled: stale")]


def test_pause_that_drains_gives_nothing_up() -> None:
    g = generation()
    admitted(g.scheduler)
    g.on_control(control(1, pause="drain"))
    assert g.review() == []


def test_once_train_is_over_its_groups_in_flight_begun_or_waiting_are_given_up() -> None:
    g = generation({"rollouts_per_activity": 1}, permits=7, evals=[EPOCH], train_limit=3)
    parts = admitted(g.scheduler)
    assert names_of(parts).count("train/0") == 1, "half of it waits for a permit"
    assert [g.on_part_ended(part, "") for part in parts[:2]] == [False, True]
    g.on_finalized("eval/0-0/a/0", None, "its engine was lost")
    assert [group for group, *_ in delivered(g)] == ["eval/0-0/a/0"]
    over = {"train_over": True, "train_limit": 0, "put_backs": ["train/9.1", "eval/0-0/a/0"]}
    g.on_control(control(1, permits=100, evals=[EPOCH], **over))
    assert g.review() == ["train/0"] and g.flights["train/0"].cancelled == "pause"
    assert not g.on_part_ended(parts[-1], "cancelled")
    assert delivered(g) == [("train/0", "pause", "Cancelled: pause")]
    assert {work.kind for work in (part.work for part in admitted(g.scheduler))} == {"eval"}
    assert not any(group.startswith("train/") for group in g.flights)


def test_overload_is_a_cause_of_its_own() -> None:
    g = generation(permits=4)
    admitted(g.scheduler)
    g.on_control(control(1, permits=2, trim=True))
    assert g.review() == ["train/1"]
    assert g.flights["train/1"].cancelled == "overload"


def test_group_that_finds_no_place_says_so_and_goes_back_to_the_queue() -> None:
    g = generation({"rollouts_per_activity": 1}, permits=4)
    first, second = admitted(g.scheduler)[:2]
    attempts = [g.attempt(first), g.attempt(second)]
    for attempt in attempts:
        g.on_waits(attempt)
    assert g.must_report
    assert g.report().waiting_for == "an engine and an env server for train/0 and 1 more"
    g.on_waited(attempts[0])
    assert g.report().waiting_for == "an engine and an env server for train/0"
    g.on_unplaced(attempts[1])
    g.on_waited(attempts[1])
    assert g.has_news and g.review() == ["train/0"] and g.review() == []
    assert not g.on_part_ended(first, "") and not g.on_part_ended(second, "cancelled")
    assert ("train/0", "pause", "Cancelled: pause") in delivered(g), "it keeps its name"


# -- failures -------------------------------------------------------------------------------


def test_lost_group_is_finalized_with_the_last_reason() -> None:
    g = generation({"rollouts_per_activity": 1}, permits=2)
    first, second = admitted(g.scheduler)
    assert not g.on_part_ended(first, "broken reward")
    assert g.on_part_ended(second, "")
    assert g.flights["train/0"].lost == "broken reward"
    g.on_finalized("train/0", None, "no scorer")
    assert delivered(g) == [("train/0", "", "no scorer")]


def test_users_mistake_is_delivered_as_such_and_never_finalized() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    attempt = g.attempt(part)
    assert not g.on_failed(attempt, names.BAD_INPUT, "no such key")
    assert not g.on_part_ended(part, attempt.failure)
    (group,) = g.report().groups
    assert group.user_error and group.error == "no such key" and not group.cancelled


def test_users_mistake_found_while_scoring_is_delivered_as_such() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    assert g.on_part_ended(part, "")
    attempt = Attempt(part.work, part.engine, finalizing=True)
    assert not g.on_failed(attempt, names.BAD_INPUT, "no such function")
    g.on_finalized("train/0", None, attempt.failure)
    (group,) = g.report().groups
    assert group.user_error and group.error == "no such function"


def test_damaged_train_group_is_cancelled_and_an_eval_or_anothers_damage_is_an_error() -> None:
    g = generation(evals=[replace(EPOCH, num_examples=1)], permits=6)
    parts = {part.work.group: part for part in admitted(g.scheduler)}
    for group, reason in [
        ("train/0", "runs/r/groups/train/0.json"),
        ("train/1", "runs/r/weights/v3"),
        ("eval/0-0/a/0", "runs/r/groups/eval/0-0/a/0.json"),
    ]:
        attempt = g.attempt(parts[group])
        assert not g.on_failed(attempt, names.CORRUPT, reason) and attempt.failure == reason
        assert g.on_part_ended(parts[group], reason) == (group != "train/0")
    assert delivered(g) == [("train/0", "damaged", "Cancelled: damaged")]


def test_activity_that_finds_no_server_for_good_is_given_up() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    attempt = g.attempt(part)
    for number in range(1, MAX_RELOCATIONS + 1):
        assert not attempt.failure and g.on_failed(attempt, names.ENV_LOST, "gone")
        assert attempt.losses == number
    assert attempt.failure == f"abandoned after {MAX_RELOCATIONS} relocations: gone"


def test_killing_one_of_an_envs_servers_loses_no_rollout() -> None:
    """Rollouts are spread over three; those of the one that goes end on the others."""
    made = config(train={"env": [{"id": "a", "workers": 3}], "batch_size": 8, "group_size": 2})
    names_of_a = ("a", "a:2", "a:3")
    servers = {name: EnvTarget(k, 1, f"tcp://{name}") for k, name in enumerate(names_of_a)}
    first = control(0, permits=18, train_limit=9, envs=servers)
    arg = DispatchInput("run", 7, made.model_dump(mode="json"), EXAMPLES, Queues(), Lease(), first)
    g = Generation(made, arg)
    parts = admitted_and_placed(g)
    addresses = [attempt.address for _, attempt in parts]
    assert addresses == [target.address for target in servers.values()] * 3, "spread evenly"
    gone = [(part, attempt) for part, attempt in parts if attempt.address == "tcp://a:2"]
    for _, attempt in gone:
        assert g.on_failed(attempt, names.ENV_LOST, "gone") and g.has_place(attempt)
    del servers["a:2"]
    g.on_control(control(1, permits=18, train_limit=9, envs=servers))
    for _, attempt in gone:
        g.on_rested(attempt)
        g.place(attempt)
    assert [attempt.address for _, attempt in gone] == ["tcp://a", "tcp://a:3", "tcp://a"]
    for part, _ in parts:
        finish(g, part)
    assert [(name, "", "") for name in names_of([part for part, _ in parts])] == delivered(g)
    assert not g.flights.served and g.report().lost == []


def admitted_and_placed(g: Generation) -> list[tuple[Part, Attempt]]:
    """Every part that may start, and where it is tried."""
    result = []
    while isinstance(part := g.scheduler.admit(0.0), Part):
        result.append((part, g.attempt(part)))
    return result


def test_env_that_is_lost_while_a_group_is_finalized_is_a_failure_like_any_other() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    attempt = Attempt(part.work, part.engine, finalizing=True)
    assert not g.on_failed(attempt, names.ENV_LOST, "gone") and attempt.failure == "gone"


def test_group_follows_its_attempt_to_another_engine() -> None:
    g = generation(permits=2)
    (part,) = admitted(g.scheduler)
    attempt = g.attempt(part)
    assert attempt.engine == ENGINES[0] and attempt.address == "tcp://a"
    assert g.on_failed(attempt, names.ENGINE_LOST, "gone") and g.has_place(attempt)
    g.place(attempt)
    assert attempt.engine == ENGINES[1] and g.flights["train/0"].engine == ENGINES[1]
    assert g.on_failed(attempt, names.ENGINE_LOST, "gone")
    g.on_rested(attempt)
    assert g.scheduler.engine() is None and not g.has_place(attempt)


# -- reports that wait ------------------------------------------------------------------------


def holding(**changes: Any) -> tuple[Generation, list[Part]]:
    """A generation that may hold back, with eight train groups of two rollouts in flight."""
    g = generation(**{"permits": 16, "missing": 8, **changes})
    g.may_hold_back = True
    return g, admitted(g.scheduler)


def end(g: Generation, part: Part, **changes: Any) -> None:
    """A group ends, well if nothing else is said, and the generation takes its turn."""
    assert g.on_part_ended(part, "")
    plain: dict[str, Any] = {"trainable": 2}
    g.on_finalized(part.work.group, replace(result(part), **{**plain, **changes}), "")
    g.begin_turn(long=False)


def test_groups_are_reported_together_once_they_fill_a_batch() -> None:
    g, parts = holding()
    for part in parts[:3]:
        end(g, part)
        assert g.holds_back and not g.must_report and not g.has_news and not g.is_over
    end(g, parts[3])
    assert not g.holds_back and g.must_report and g.has_news
    report = g.report()
    assert [group.group for group in report.groups] == names_of(parts[:4])
    assert report.outstanding == names_of(parts[4:])
    # The batch after that, before the run has said anything.
    for part in parts[4:7]:
        end(g, part)
        assert g.holds_back
    end(g, parts[7])
    assert len(g.report().groups) == 4 and not g.has_news


def test_what_the_run_has_not_heard_of_counts() -> None:
    g, parts = holding(missing=8)
    for part in parts[:4]:
        end(g, part)
    assert g.report().seq == 0 > control(1).heard, "it has heard of none unless it says so"
    # Written before that report arrived: 8 are missing, and 8 are on their way.
    g.on_control(control(1, permits=16, missing=8))
    for part in parts[4:7]:
        end(g, part)
    assert g.holds_back
    # It has arrived, and the run lacks 4 for the next batch, since it has dropped a group.
    g.on_control(control(2, permits=16, missing=4, heard=0))
    assert g.must_report and len(g.report().groups) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"survivors": 1},
        {"errored": 1},
        {"error": "none of it survived"},
        {"observed": {"a": [0.5]}},
    ],
)
def test_a_group_that_changes_what_comes_next_is_reported_at_once(changes: dict[str, Any]) -> None:
    g, parts = holding()
    end(g, parts[0])
    assert not g.must_report
    end(g, parts[1], **changes)
    assert g.must_report and len(g.report().groups) == 2


@pytest.mark.parametrize("backfill", [False, True])
def test_what_filters_remove_is_replaced_only_with_backfill(backfill: bool) -> None:
    train = {"env": [{"id": "a"}], "batch_size": 8, "group_size": 2, "backfill": backfill}
    made, first = config(train=train), control(0, missing=8)
    arg = DispatchInput("run", 7, made.model_dump(mode="json"), EXAMPLES, Queues(), Lease(), first)
    g = Generation(made, arg)
    g.may_hold_back = True
    end(g, admitted(g.scheduler)[0], trainable=0)
    assert g.must_report == backfill


def test_nothing_waits_for_groups_that_nobody_admits() -> None:
    g, parts = holding()
    end(g, parts[0])
    assert g.holds_back
    g.on_control(control(1, permits=16, missing=8, pause="drain"))
    assert g.begin_turn(long=False)
    assert g.must_report and g.report().state == "tail"
    end(g, parts[1])
    assert g.must_report, "nor in a tail"


def test_a_run_that_needs_each_group_gets_it() -> None:
    for changes in ({"missing": 0}, {"missing": 2}):
        g, parts = holding(**changes)
        end(g, parts[0])
        assert g.must_report and not g.holds_back
    g, parts = holding()
    g.may_hold_back = False
    end(g, parts[0])
    assert g.must_report
    g, parts = holding()
    end(g, parts[0])
    g.report_due = True
    assert g.must_report and g.has_news, "a sign of life carries what there is"


def test_evals_do_not_wait() -> None:
    g = evals(2, missing=8)
    g.may_hold_back = True
    part = next(part for part in admitted(g.scheduler) if part.work.kind == "eval")
    end(g, part)
    assert g.must_report
