"""Where examples come from: every example once an epoch, envs by ratio, evals interleaved."""

from hypothesis import given
from hypothesis import strategies as st

from ratchet.workflows.protocol.state import EvalEpoch, Shares
from ratchet.workflows.rules.sources import (
    TrainSource,
    fired_evals,
    interleave,
    next_attempt,
    permute,
    smooth_cycle,
    train_counter,
    train_group,
)
from tests.unit.workflows.support import EXAMPLES, config


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


@given(
    starts=st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True).map(sorted),
    ratios=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=3, max_size=3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_every_example_is_served_once_an_epoch_over_changes_of_the_ratios(
    starts: list[int], ratios: list[tuple[int, int]], sizes: tuple[int, int]
) -> None:
    shares = [
        Shares(start, {"a": float(a), "b": float(b)})
        for start, (a, b) in zip(starts, ratios, strict=False)
    ]
    source = TrainSource(config(), {"train/a": sizes[0], "train/b": sizes[1]}, shares)
    works = [source.work(train_group(n)) for n in range(150)]
    assert works[: starts[0]] == [
        TrainSource(config(), {"train/a": sizes[0], "train/b": sizes[1]}).work(train_group(n))
        for n in range(starts[0])
    ]
    for name, size in zip("ab", sizes, strict=True):
        examples = [work.example for work in works if work.env == name]
        for first in range(0, len(examples) - size + 1, size):
            assert sorted(examples[first : first + size]) == list(range(size))
    last = shares[-1]
    cycle = int(last.ratios["a"] + last.ratios["b"])
    turns = [source.env_of(n) for n in range(last.start, last.start + cycle)]
    assert turns.count("a") / cycle == last.ratios["a"] / cycle
    group_size = config().train.group_size
    assert source.rollouts_below(150) == 150 * group_size
    assert source.counter_for(150 * group_size) == 150


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
    without = config(eval={"env": [{"id": "a"}], "interval": 4, "at_end": False})
    assert [step for step in range(11) if fired_evals(without, step)] == [0, 4, 8]
    endless = config(max_steps=None)
    assert [step for step in range(11) if fired_evals(endless, step)] == [0, 4, 8]
    skipping = config(eval={"env": [{"id": "a", "interval": 5}], "skip_first_step": True})
    assert [step for step in range(11) if fired_evals(skipping, step)] == [5, 10]
    alone = config(max_steps=0, train={"env": []}, eval={"env": [{"id": "a"}]})
    assert fired_evals(alone, 0) == ["a"]
    both = {"env": [{"id": "a"}, {"id": "b"}], "skip_first_step": True}
    assert fired_evals(config(max_steps=0, train={"env": []}, eval=both), 0) == ["a", "b"]


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
    assert smooth_cycle([4, 2]) == [0, 1, 0], "no longer than it must be"
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
