"""Every verdict passes a good run, and fails for each way in which it can be broken."""

from collections.abc import Callable

import pytest

from ratchet.activities.contracts import names
from tests.chaos import checker
from tests.chaos.checker import ServedRollout, Verdict
from tests.chaos.history import Evidence
from tests.unit.chaos.evidence import (
    EPOCH,
    RUN,
    STEPS,
    activity,
    good_run,
    push,
    ref,
    report,
    result,
    rollouts,
)

Judge = Callable[[Evidence], Verdict]


def examples(found: Evidence) -> Verdict:
    return checker.examples(found, {"e": EPOCH})


def batches(found: Evidence) -> Verdict:
    return checker.batches(found, STEPS)


JUDGES: list[Judge] = [
    checker.delivery,
    checker.no_losses,
    examples,
    batches,
    checker.versions,
]


@pytest.mark.parametrize("judge", JUDGES)
def test_good_run_passes_and_an_empty_one_proves_nothing(judge: Judge) -> None:
    assert judge(good_run()).violations == []
    assert judge(good_run()).good
    assert not judge(Evidence(RUN)).good


def broken(judge: Judge, found: Evidence, words: str) -> None:
    violations = judge(found).violations
    assert violations and any(words in text for text in violations), violations


def test_report_that_comes_twice_counts_once() -> None:
    found = good_run()
    found.signals.append(found.signals[0])
    assert checker.delivery(found).good


def test_group_delivered_twice_under_new_numbers_is_a_violation() -> None:
    found = good_run()
    found.signals.append(report(99, result("train/0")))
    broken(checker.delivery, found, "train/0 was delivered 2 times")


def test_group_that_never_came_back_is_a_violation() -> None:
    found = good_run()
    found.activities.append(rollouts("train/4", 0))
    broken(checker.delivery, found, "train/4 was dispatched and never delivered")


def test_group_given_up_may_come_once_more_under_its_id() -> None:
    found = good_run()
    found.activities.append(rollouts("eval/0-0/e/1", 1))
    for seq, cancelled in ((10, "pause"), (11, "")):
        found.signals.append(report(seq, result("eval/0-0/e/1", cancelled=cancelled)))
    assert checker.delivery(found).good


@pytest.mark.parametrize("fields", [{"errored": 1}, {"error": "EngineLost: gone"}])
def test_rollout_that_erred_is_a_loss(fields: dict[str, object]) -> None:
    found = good_run()
    found.signals.append(report(10, result("train/4", **fields)))
    broken(checker.no_losses, found, "train/4")


def test_example_that_comes_twice_in_an_epoch_is_a_violation() -> None:
    found = good_run()
    next(a for a in found.activities if a.name == names.RUN_ROLLOUTS).input["work"]["example"] = 3
    broken(examples, found, "example 3 of e came twice in epoch 0")


def test_next_epoch_has_the_same_examples_again() -> None:
    found = good_run()
    found.activities += [rollouts(f"train/{EPOCH + k}", k) for k in range(EPOCH)]
    assert examples(found).good


def test_requeued_group_keeps_its_example() -> None:
    found = good_run()
    found.activities.append(rollouts("train/1.1", 1))
    assert examples(found).good
    found.activities.append(rollouts("train/1.2", 2))
    broken(examples, found, "counter 1 stood for")


def test_counter_that_was_skipped_is_a_violation() -> None:
    found = good_run()
    found.activities.append(rollouts("train/5", 1))
    broken(examples, found, "train counter 4 was never dispatched")


def test_example_in_two_batches_is_a_violation() -> None:
    found = good_run()
    ship = [a for a in found.activities if a.name == names.SHIP_BATCH][-1]
    ship.input["groups"] = ["train/0.1", "train/3"]
    broken(examples, found, "counter 0 is in batches 1 and 2")


def test_delivered_group_that_is_in_no_batch_is_a_violation_unless_it_came_last() -> None:
    found = good_run()
    found.signals.append(report(10, result("train/4")))
    found.activities.append(rollouts("train/4", 0))
    assert examples(found).good, "it waits for the next batch"
    found.signals.insert(0, found.signals.pop())
    found.signals[0].value["seq"] = 0
    broken(examples, found, "train/4 is in no batch")


def test_step_with_two_batches_is_a_violation() -> None:
    found = good_run()
    given = {"step": 2, "groups": ["train/8"]}
    found.activities.append(activity(names.SHIP_BATCH, given, {"ref": ref("other")}))
    broken(batches, found, "step 2 has 2 batches")


def test_catching_up_trains_the_same_batches_again() -> None:
    found = good_run()
    again = [a for a in found.activities if a.name == names.TRAIN_STEP]
    found.activities.append(activity(names.LOAD_TRAINER, {}, {"step": 0}))
    found.activities += again
    assert batches(found).good
    found.activities.append(activity(names.TRAIN_STEP, {"step": 2, "batch": ref("other")}))
    broken(batches, found, "step 2 was trained on another batch")


def test_catching_up_without_the_checkpoint_is_a_violation() -> None:
    found = good_run()
    found.activities.append(activity(names.LOAD_TRAINER, {}, {"step": 0}))
    found.activities.append(activity(names.TRAIN_STEP, {"step": 2, "batch": ref("batch-2")}))
    broken(batches, found, "step 2 was trained on a trainer at step 0")


def test_batch_that_was_never_trained_is_a_violation() -> None:
    found = good_run()
    found.activities = [
        a for a in found.activities if a.name != names.TRAIN_STEP or a.input["step"] == 1
    ]
    broken(batches, found, "1 steps were trained, the run tells 2")


def test_version_that_falls_is_a_violation() -> None:
    found = good_run()
    found.memos.append((9.0, {"policy_version": 1}))
    broken(checker.versions, found, "version 1 after 2")
    found = good_run()
    found.activities.append(rollouts("train/4", 0, version=0))
    broken(checker.versions, found, "sent rollouts to version 0 after 1")


def test_version_that_falls_for_clients_is_a_violation() -> None:
    assert checker.versions(good_run(), [-1, 0, 0, 2]).good
    assert checker.versions(good_run(), [2, -1, 2]).violations == ["clients saw version -1 after 2"]


def served(**fields: object) -> ServedRollout:
    good = {
        "group": "train/0",
        "index": 0,
        "engine": (0, 1),
        "labels": ("0.1a",),
        "versions": (0,),
    }
    return ServedRollout(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"labels": ()}, "does not say what sampled it"),
        ({"labels": ("0.9a",)}, "push 0.9a was never verified"),
        ({"labels": ("1.2a",), "versions": (0,)}, "tokens of versions (0,)"),
        ({"engine": (0, 2)}, "verified engine (0, 1), not (0, 2)"),
    ],
)
def test_token_of_an_unverified_push_is_a_violation(fields: dict[str, object], words: str) -> None:
    found = checker.pushes(good_run())
    assert checker.gate(found, [served()]).good
    assert not checker.gate(found, []).good
    assert any(words in text for text in checker.gate(found, [served(**fields)]).violations)


def test_batch_that_was_cut_before_a_label_was_accepted_is_a_violation() -> None:
    found = checker.pushes(good_run())
    at = found.at["0.1a"]
    assert checker.gate(found, [served(cut_at=at)]).good
    (text,) = checker.gate(found, [served(cut_at=at - 1)]).violations
    assert text == "rollout train/0/0: its batch was cut before push 0.1a was verified"


def test_labels_of_a_push_that_failed_are_refused() -> None:
    found = good_run()
    found.activities.append(push(3, 7, outcome="timed_out"))
    judged = checker.gate(checker.pushes(found), [served(labels=("3.7b",), versions=(3,))])
    assert judged.violations == ["rollout train/0/0: push 3.7b was never verified (it was refused)"]


def test_end_needs_success_and_a_checkpoint_of_the_last_step() -> None:
    good = {"status": "succeeded", "step": 2, "policy_version": 2, "checkpoint": {"step": 2}}
    assert checker.ended(good).good
    for fields in ({"status": "failed"}, {"policy_version": 1}, {"checkpoint": None}):
        assert not checker.ended({**good, **fields}).good


def test_fault_without_a_witness_fails_the_suite() -> None:
    assert checker.witnessed([("kill api", True, "gone")], planned=1).good
    assert not checker.witnessed([("kill api", True, "gone"), ("x", False, "none")], planned=2).good
    assert not checker.witnessed([], planned=2).good, "nothing was injected"
