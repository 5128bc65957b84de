"""Curricula: draws follow from durable state, pools from rewards, verdicts from gates."""

import json
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.step_metrics import undescribed
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.configs.load import validate
from ratchet.configs.run import RunConfig
from ratchet.workflows.rules.curriculum import (
    LARGEST_POOLED,
    POOLS,
    Curriculum,
    CurriculumState,
    pack,
    too_large,
    unpack,
)

# floor(1000 * blake2b-128("7/a/draw/<n>") / 2**128) for n = 0, 1, …
GOLDEN = [352, 414, 838, 327, 655]
REWARD_OF = {"hard": 0.1, "normal": 0.5, "easy": 0.9}


def config(seed: int = 0, gates: list[dict[str, Any]] | None = None, **sampler: Any) -> RunConfig:
    """Env a draws from pools, env b follows its counter; both have `gates`."""
    pool = {"type": "difficulty_pool", **sampler}
    envs = [
        {"id": "a", "curriculum": {"sampler": pool, "gates": gates or []}},
        {"id": "b", "curriculum": {"gates": gates or []}},
    ]
    return validate({"max_steps": 3, "seed": seed, "train": {"env": envs}})


def curriculum(size: int, state: CurriculumState | None = None, **options: Any) -> Curriculum:
    examples = {"train/a": size, "train/b": 10}
    return Curriculum(config(**options), examples, state or CurriculumState())


def over_continue_as_new(state: CurriculumState) -> CurriculumState:
    return CurriculumState(**json.loads(json.dumps(asdict(state))))


def judged(advantage_range: tuple[float, float] | None, env: str = "a") -> GroupResult:
    return GroupResult(
        group="train/0",
        kind="train",
        env=env,
        ref=None,
        size=2,
        survivors=2,
        errored=0,
        reward_mean=0.5,
        samples=2,
        tokens=2,
        version_start=0,
        advantage_range=advantage_range,
    )


@given(st.binary().map(lambda data: bytes(byte & 3 for byte in data)))
def test_packed_pools_unpack_to_themselves(pools: bytes) -> None:
    text = pack(pools)
    assert unpack(text, len(pools)) == pools
    assert len(text) == -(-len(pools) // 3)


def test_packed_golden() -> None:
    assert pack(bytes([0, 1, 2, 3])) == "kD"


@pytest.mark.parametrize(
    ("reward", "pool"),
    [
        (-1.0, "hard"),
        (0.0, "hard"),
        (0.25, "hard"),
        (0.2500001, "normal"),
        (0.75, "normal"),
        (0.7500001, "easy"),
        (1.0, "easy"),
        (2.5, "easy"),
    ],
)
def test_thresholds_are_inclusive_and_the_last_pool_takes_the_rest(
    reward: float, pool: str
) -> None:
    it = curriculum(1)
    it.observe("a", 0, reward)
    assert it.metrics()[f"curriculum/a/pool/{pool}"] == 1.0


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 39), st.floats(-1, 2)), max_size=60),
)
def test_state_and_counts_hold_the_latest_reward_of_every_example(
    size: int, rewards: list[tuple[int, float]]
) -> None:
    it = curriculum(size)
    expected = ["unseen"] * size
    for example, reward in rewards:
        it.observe("a", example % size, reward)
        pool = "hard" if reward <= 0.25 else "normal" if reward <= 0.75 else "easy"
        expected[example % size] = pool
    it.metrics()
    packed = unpack(it.state.pools["a"], size)
    assert [POOLS[pool] for pool in packed] == expected
    again = curriculum(size, over_continue_as_new(it.state))
    for found in (it.metrics(), again.metrics()):
        shares = {pool: found[f"curriculum/a/pool/{pool}"] for pool in POOLS}
        assert shares == {pool: expected.count(pool) / size for pool in POOLS}


@given(
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0])), max_size=20),
    st.integers(0, 20),
)
def test_draws_go_on_from_the_state_as_if_nothing_had_happened(
    size: int, seed: int, rewards: list[tuple[int, float]], cut: int
) -> None:
    """One curriculum lives through all; the other is rebuilt from JSON after `cut` observations."""
    one, other = curriculum(size, seed=seed), curriculum(size, seed=seed)
    for number, (step, reward) in enumerate(rewards):
        if number == cut:
            other = curriculum(size, over_continue_as_new(other.state), seed=seed)
        for it in (one, other):
            it.draw("a", number)
            it.observe("a", step % size, reward)
    assert one.state == other.state
    assert all(0 <= example < size for example in one.state.draws.values())


def test_draws_golden() -> None:
    """Draws of a run outlive the code that made them: histories are replayed."""
    it = curriculum(1000, seed=7)
    assert [it.draw("a", counter) for counter in range(5)] == GOLDEN
    assert [curriculum(1000, seed=8).draw("a", counter) for counter in range(5)] != GOLDEN


def test_an_example_is_drawn_as_often_as_its_weight_says() -> None:
    """Chances are per example: 60 hard ones of weight 0.5 outweigh 10 normal ones of weight 2."""
    it = curriculum(100, hard_weight=0.5, normal_weight=2.0, easy_weight=0.0, unseen_weight=1.0)
    pools = ["hard"] * 60 + ["normal"] * 10 + ["easy"] * 20
    for example, pool in enumerate(pools):
        it.observe("a", example, REWARD_OF[pool])
    draws = 60_000
    counts = Counter(it.draw("a", counter) for counter in range(draws))
    for example, pool in enumerate(pools + ["unseen"] * 10):
        weight = {"hard": 0.5, "normal": 2.0, "easy": 0.0, "unseen": 1.0}[pool]
        expected = draws * weight / 60
        # Six standard deviations of a binomial count.
        assert abs(counts[example] - expected) <= 6 * expected**0.5, (example, pool)


def test_without_a_weighted_example_all_are_drawn_alike() -> None:
    it = curriculum(4, hard_weight=0, easy_weight=0)
    for example in range(4):
        it.observe("a", example, example % 2)
    counts = Counter(it.draw("a", counter) for counter in range(400))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 60


def test_a_counter_keeps_its_draw_until_it_is_forgotten() -> None:
    it = curriculum(1000)
    first = it.draws_for({3: "a", 2: "b", 1: "a"})
    assert set(first) == {"1", "3"} and it.drawn(2) is None
    assert it.draws_for({1: "a", 2: "b", 3: "a", 5: "a"}) == first | {"5": it.draw("a", 5)}
    assert it.state.drawn == {"a": 3}
    it.observe("a", first["3"], 1.0)
    assert it.drawn(3) == first["3"]
    it.forget(3)
    it.forget(2)
    assert set(it.state.draws) == {"1", "5"}
    # Draw numbers, not counters, are hashed.
    assert curriculum(1000).draws_for({k: "a" for k in (10, 30)}) == {
        "10": first["1"],
        "30": first["3"],
    }


@pytest.mark.parametrize(
    ("advantages", "admitted"),
    [
        (None, True),
        ((0.0, 0.0), False),
        ((0.0, 1e-9), True),
        ((-0.5, 0.5), True),
        ((0.3, 0.4), True),
        ((0.5, 0.75), False),
        ((0.5, 0.76), True),
        ((0.49, 0.75), True),
        ((0.6, 0.6), False),
        ((0.0, 0.6), True),
    ],
)
def test_a_group_trains_unless_one_gate_holds_all_its_advantages(
    advantages: tuple[float, float] | None, admitted: bool
) -> None:
    gates = [
        {"type": "advantage_range"},
        {"type": "advantage_range", "reject_min": 0.5, "reject_max": 0.75},
    ]
    assert curriculum(1, gates=gates).admits(judged(advantages)) is admitted


def test_without_gates_every_group_trains() -> None:
    it = curriculum(1)
    assert it.admits(judged((0.0, 0.0)))
    assert it.state == curriculum(1).state


def test_verdicts_are_counted_until_metrics_are_taken() -> None:
    it = curriculum(1, gates=[{"type": "advantage_range"}])
    for advantages in [(0.0, 0.0), (0.0, 1.0), (0.0, 0.0)]:
        it.admits(judged(advantages))
    it.admits(judged((0.0, 0.0), env="b"))
    it = curriculum(1, over_continue_as_new(it.state), gates=[{"type": "advantage_range"}])
    assert it.metrics() == {
        "curriculum/a/pool/unseen": 1.0,
        "curriculum/a/pool/hard": 0.0,
        "curriculum/a/pool/normal": 0.0,
        "curriculum/a/pool/easy": 0.0,
        "curriculum/a/admitted": 1.0,
        "curriculum/a/rejected": 2.0,
        "curriculum/b/admitted": 0.0,
        "curriculum/b/rejected": 1.0,
    }
    again = it.metrics()
    assert again["curriculum/a/rejected"] == 0.0 and not undescribed(again)


def test_standard_envs_remember_nothing() -> None:
    it = curriculum(5)
    it.observe("b", 3, 1.0)
    assert not it.samples("b") and it.samples("a")
    it.draw("a", 0)
    assert set(it.state.pools) == {"a"}


@pytest.mark.alone
def test_large_datasets_stay_small_and_fast() -> None:
    """100 draws a step must fit many times into a workflow task, which may take 2 s."""
    size = 100_000
    it = curriculum(size)
    began = time.process_time()
    for counter in range(1000):
        example = it.draw("a", counter)
        it.observe("a", example, counter % 5 / 4)
    assert time.process_time() - began < 1.0
    for counter in range(750):
        it.forget(counter)
    assert len(json.dumps(asdict(it.state))) <= 40 * 1024


def test_pools_that_outgrow_the_state_are_refused_by_name() -> None:
    pool = {"sampler": {"type": "difficulty_pool"}}
    envs = [{"id": "a", "curriculum": pool}, {"id": "b"}, {"id": "c", "curriculum": pool}]
    both = validate({"max_steps": 3, "train": {"env": envs}})
    sizes = {"train/a": LARGEST_POOLED, "train/b": 10**9, "train/c": 0}
    assert too_large(both, sizes) == []
    ((key, message),) = too_large(both, sizes | {"train/c": 1})
    assert key == "train.env.2.curriculum.sampler"
    assert "'c' has 1, 200001 with the envs before it" in message
    (first, _) = too_large(both, sizes | {"train/a": LARGEST_POOLED + 1})
    assert first[0] == "train.env.0.curriculum.sampler"
    assert "use sampler 'standard' or a smaller part of the dataset" in first[1]
