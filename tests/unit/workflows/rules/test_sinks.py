"""Where groups end: full batches, nothing stale or refused in them, every rollout counted once."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from docs.step_metrics import undescribed
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult
from ratchet.workflows.protocol.state import EvalEpoch, EvalProgress, RunState, TrainProgress
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sinks import (
    FIRST_GROUPS,
    Arrivals,
    TrainSink,
    eval_arrival,
    ship_input,
)
from ratchet.workflows.rules.sources import TrainSource
from tests.unit.workflows.support import EXAMPLES, config, delivered


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
    sink.on_empty(FilterTally())
    assert sink.rollouts_wanted(0) == 24, "eight are spent and two batches are still to be filled"


# -- token batches --------------------------------------------------------------------------

TOKENS = {"env": [{"id": "a"}, {"id": "b"}], "token_batch_size": 40, "group_size": 2}
PERMITS = {"max_inflight_rollouts": 8}
groups_of_two = st.lists(
    st.integers(0, 2).flatmap(
        lambda survivors: st.tuples(st.just(survivors), st.integers(0, survivors))
    ),
    max_size=40,
)


def arrivals(outcomes: list[tuple[int, int]]) -> list[GroupResult]:
    """Groups with so many survivors and trainable rollouts, of five tokens each."""
    return [
        delivered(f"train/{n}", survivors, trainable=trainable, tokens=5 * trainable)
        for n, (survivors, trainable) in enumerate(outcomes)
    ]


@given(groups_of_two)
def test_token_batch_is_the_shortest_prefix_that_ships_its_tokens(
    outcomes: list[tuple[int, int]],
) -> None:
    sink = TrainSink(config(train=TOKENS, dispatch=PERMITS), TrainProgress())
    for group in arrivals(outcomes):
        sink.add(group)
    order = list(sink.progress.ready)
    assert [g.group for g in order] == [
        f"train/{n}" for n, (_, trainable) in enumerate(outcomes) if trainable
    ]
    while sink.full():
        cut = sink.cut()
        assert cut == order[: len(cut)]
        del order[: len(cut)]
        assert sum(g.tokens for g in cut) >= 40 > sum(g.tokens for g in cut[:-1])
    assert sink.collected_tokens == sum(g.tokens for g in order) < 40


def test_tokens_are_turned_into_rollouts_by_the_mean_so_far() -> None:
    sink = TrainSink(config(train=TOKENS, dispatch=PERMITS), TrainProgress())
    assert sink.rollouts_wanted(-2) == 0, "none before there may be a batch"
    assert sink.rollouts_wanted(0) == 2, "before the first there is a bound alone"
    sink.add(delivered("train/0", tokens=8))
    assert sink.rollouts_wanted(0) == 2 + 18, "two batches less eight tokens, four a rollout"
    sink.add(delivered("train/1", trainable=1, tokens=6))
    assert sink.rollouts_wanted(0) == 4 + 15, "66 tokens at 14 for three rollouts; one is lost"


@given(groups_of_two, st.booleans())
def test_a_token_or_backfilled_batch_is_never_short_of_admissions(
    outcomes: list[tuple[int, int]], tokens: bool
) -> None:
    train = TOKENS if tokens else {**BACKFILL, "batch_size": 8}
    sink = TrainSink(config(train=train, dispatch=PERMITS), TrainProgress())
    source, rest = TrainSource(config(), EXAMPLES), arrivals(outcomes)
    counter = 0
    for version in range(10):
        while not sink.full():
            assert counter < source.counter_for(sink.rollouts_wanted(version)), "a deadlock"
            more = rest.pop(0) if rest else delivered(f"train/{100 + counter}", tokens=10)
            sink.add(more)
            counter += 1
        sink.cut()


# -- backfill -------------------------------------------------------------------------------

BACKFILL = {
    "env": [{"id": "a"}, {"id": "b"}],
    "batch_size": 8,
    "group_size": 2,
    "backfill": True,
}


@given(groups_of_two)
def test_backfilled_batch_is_full_of_rollouts_that_train(outcomes: list[tuple[int, int]]) -> None:
    sink = TrainSink(config(train=BACKFILL), TrainProgress())
    for group in arrivals(outcomes):
        sink.add(group)
    while sink.full():
        cut = sink.cut()
        assert sum(g.trainable for g in cut) >= 8 > sum(g.trainable for g in cut[:-1])
    assert sink.collected == sum(g.trainable for g in sink.progress.ready) < 8


def test_without_backfill_what_filters_remove_counts() -> None:
    sink = TrainSink(config(), TrainProgress())
    for number in range(4):
        sink.add(delivered(f"train/{number}", trainable=0))
    assert len(sink.cut()) == 4 and sink.progress.lost == 0


@given(groups_of_two, st.sets(st.integers(0, 39)), st.sampled_from(["rollouts", "fill", "tokens"]))
def test_what_is_taken_out_leaves_no_trace(
    outcomes: list[tuple[int, int]], stale: set[int], kind: str
) -> None:
    made = {
        "rollouts": config(),
        "fill": config(train=BACKFILL),
        "tokens": config(train=TOKENS, dispatch=PERMITS),
    }[kind]
    swept, never = TrainSink(made, TrainProgress()), TrainSink(made, TrainProgress())
    for number, group in enumerate(arrivals(outcomes)):
        old = number in stale and swept._counted(group) > 0
        swept.add(replace(group, version_start=0 if old else 9))
        if not old:
            never.add(replace(group, version_start=9))
    swept.sweep(18)
    assert swept.progress.ready == never.progress.ready
    assert swept.rollouts_wanted(9) == never.rollouts_wanted(9)
    assert swept.collected == never.collected and swept.progress.lost == never.progress.lost


# -- groups that leave nothing --------------------------------------------------------------


def test_empty_groups_are_counted_in_a_row_and_tell_why() -> None:
    sink = TrainSink(config(), TrainProgress())
    for number in range(4):
        assert not sink.add(delivered(f"train/{number}", 0, error="Boom: x"))
    assert sink.empty_batches == 1 and sink.progress.last_error == "Boom: x"
    assert sink.progress.lost == 8 and sink.collected == 0
    assert sink.rollouts_wanted(0) == 16 + 8, "they are made up for"
    assert sink.add(delivered("train/4", 1))
    assert sink.empty_batches == 0 and sink.progress.lost == 9
    assert not sink.add(delivered("train/5"), admitted=False)
    assert sink.empty_batches == 0.25 and "gates" in sink.progress.last_error
    assert sink.progress.delivered == 6


def test_filters_of_empty_groups_are_kept_for_the_next_batch() -> None:
    sink = TrainSink(config(), TrainProgress())
    tally = FilterTally(rollouts=2, dropped=2, hits={"gibberish": 2})
    for number in range(2):
        sink.add(replace(delivered(f"train/{number}", 0), filters=tally))
    sink.add(replace(delivered("train/2"), filters=tally))
    assert sink.progress.empty_filters == FilterTally(4, 4, {"gibberish": 4})


def test_empty_groups_of_a_token_batch_are_measured_by_its_rollouts() -> None:
    sink = TrainSink(config(train=TOKENS, dispatch=PERMITS), TrainProgress())
    sink.add(delivered("train/0", tokens=10))
    for number in range(1, 5):
        sink.add(delivered(f"train/{number}", trainable=0, tokens=0))
    assert sink.empty_batches == 1, "eight rollouts give 40 tokens"


# -- what failed ----------------------------------------------------------------------------


def arrivals_of(**overrides: Any) -> Arrivals:
    chosen, state = config(**overrides), RunState()
    sink = TrainSink(chosen, state.train)
    curriculum = Curriculum(chosen, EXAMPLES, state.curriculum)
    return Arrivals(chosen, state.arrivals, sink, curriculum)


def failing(number: int, env: str = "a", **errors: int) -> GroupResult:
    """A group of two with these errors by type; the rest has survived."""
    left = 2 - sum(errors.values())
    return replace(delivered(f"train/{number}", left), env=env, errors=errors)


def test_errors_are_counted_by_env_over_all_that_arrived() -> None:
    """Env b loses half of its groups whole, and no batch ever sees them."""
    taken = arrivals_of()
    for number in range(4):
        taken.on_group(failing(number))
    for number in range(4, 8):
        taken.on_group(failing(number, "b", **({"TaskError": 2} if number % 2 else {})))
    taken.on_group(failing(8, "b", Timeout=1))
    taken.on_group(replace(failing(9, "a"), survivors=0, trainable=0, errored=2, ref=None))
    found = taken.metrics()
    assert not undescribed(found)
    assert (found["errors/a/rate"], found["errors/b/rate"]) == (2 / 10, 5 / 10)
    assert found["errors/all/rate"] == 7 / 20
    assert (found["errors/b/rollouts"], found["errors/b/groups"]) == (5, 2)
    assert found["errors/all/groups"] == 3 and found["errors/a/by_type/Lost"] == 2
    assert found["errors/b/by_type/TaskError"] == 4 and found["errors/b/by_type/Timeout"] == 1
    assert (found["arrivals/b/rollouts"], found["arrivals/all/groups"]) == (10, 10)
    assert (found["dropped/a/groups"], found["dropped/b/groups"]) == (1, 2)
    assert not [name for name in taken.metrics() if name.startswith("errors/")], "each step anew"


def test_a_group_that_filters_emptied_is_dropped_and_did_not_fail() -> None:
    taken = arrivals_of()
    taken.on_group(replace(delivered("train/0"), survivors=0, trainable=0, errored=0))
    found = taken.metrics()
    assert (found["dropped/a/groups"], found["errors/a/groups"], found["errors/a/rate"]) == (
        1,
        0,
        0,
    )


def test_first_groups_that_all_fail_by_one_type() -> None:
    taken = arrivals_of()
    for number in range(FIRST_GROUPS):
        assert taken.all_failed() == ""
        taken.on_group(failing(number, "ab"[number % 2], TaskError=2))
    assert taken.all_failed() == "TaskError"
    taken.forgive()
    assert taken.all_failed() == "" and taken.sink.empty_batches == 0, "a pause begins anew"
    taken = arrivals_of()
    taken.on_group(failing(0))
    for number in range(1, 2 * FIRST_GROUPS):
        taken.on_group(failing(number, TaskError=2))
    assert taken.all_failed() == "", "some rollout had a reward"
    for other in ({"Lost": 2}, {"TaskError": 1, "Timeout": 1}, {"TaskError": 1}):
        taken = arrivals_of()
        for number in range(2 * FIRST_GROUPS):
            taken.on_group(failing(number, **other))
        assert taken.all_failed() == "", other


# -- evals ----------------------------------------------------------------------------------


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_eval_is_complete_with_the_last_of_its_examples(
    order: list[int], missing: set[int]
) -> None:
    progress = EvalProgress(EvalEpoch("0-0/a", "a", 0, 4, 2))
    for place, example in enumerate(order):
        group = replace(delivered("train/0"), group=f"eval/0-0/a/{example}", kind="eval")
        group = replace(group, ref=None) if example in missing else group
        assert eval_arrival(progress, group) == (place == 3)
        assert eval_arrival(progress, group) == (place == 3), "an arrival counts once"
    assert set(progress.missing) == missing and len(progress.missing) == len(missing)


# -- shipping -------------------------------------------------------------------------------


def test_ship_input_names_the_batch_by_content() -> None:
    one, two, none = delivered("train/0"), delivered("train/1"), FilterTally()
    assert (
        ship_input("r", 1, [one, two], none).digest != ship_input("r", 1, [two, one], none).digest
    )


def test_a_run_without_an_end_always_wants_the_next_batches() -> None:
    endless = config(max_steps=None)
    sink = TrainSink(endless, TrainProgress())
    assert [sink.rollouts_wanted(version) for version in (0, 10, 10**6)] == [
        16,
        96,
        8 * (10**6 + 2),
    ]
    assert TrainSink(config(), TrainProgress()).rollouts_wanted(10) == 80


def test_rewards_that_an_algorithm_observes_move_its_baseline_in_order() -> None:
    taken = arrivals_of(algo={"type": "rae", "decay": 0.5})
    taken.on_group(replace(delivered("train/0"), observed={"policy": [1.0, 0.0]}))
    assert taken.metrics()["baseline/a/policy"] == 0.25
    taken.on_group(delivered("train/1"))
    assert taken.metrics()["baseline/a/policy"] == 0.25, "a group without rewards leaves it"
    other = replace(delivered("train/2"), env="b", observed={"policy": [1.0]})
    taken.on_group(other)
    found = taken.metrics()
    assert (found["baseline/a/policy"], found["baseline/b/policy"]) == (0.25, 0.5)
