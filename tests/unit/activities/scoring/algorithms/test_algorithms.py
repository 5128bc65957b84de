"""Algorithms against golden numbers, exactness, users' functions, and what configs refuse."""

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.contracts.rollouts import FinalizeGroupInput, GroupWork
from ratchet.activities.envs.datasets import reverse_text_words
from ratchet.activities.rollouts import groups
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms import (
    Algorithm,
    Credit,
    CreditError,
    Grpo,
    MaxRl,
    RolloutView,
    after_filters,
    before_filters,
    build,
)
from ratchet.activities.scoring.algorithms.driver import broadcast
from ratchet.activities.scoring.check import AlgorithmActivities, check_algorithms
from ratchet.activities.storage import documents, keys
from ratchet.configs.algorithm import CustomConfig, GrpoConfig, RewardConfig
from ratchet.configs.load import validate
from tests.groups import rollout_activities, score_group

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}


def rollouts(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
    inputs: Sequence[int] | None = None,
    tools: Sequence[float] | None = None,
) -> list[RolloutView]:
    n = len(rewards)
    return [
        RolloutView(
            index=i,
            reward=rewards[i],
            sampled_tokens=(lengths or [1] * n)[i],
            turns=(turns or [1] * n)[i],
            input_tokens=(inputs or [0] * n)[i],
            metrics={"env_total_tool_response_tokens": tools[i]} if tools else {},
        )
        for i in range(n)
    ]


def grpo(seq_len: int = 1, **options: Any) -> Grpo:
    return Grpo(GrpoConfig.model_validate(options), seq_len)


def close(values: Sequence[float]) -> Any:
    """For vectors that were recorded in float32."""
    return pytest.approx(list(values), abs=1e-6, rel=0)


# -- golden vectors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 1.0], [0.0, 0.0]),
        ([0.25, 0.5, 0.75], [-0.25, 0.0, 0.25]),
        ([], []),
    ],
)
def test_grpo(rewards: list[float], expected: list[float]) -> None:
    assert grpo().advantages(rollouts(rewards)) == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),
        ([0, 0], [0, 0]),
        ([1, 1], [0, 0]),
        ([-1, 0], [0, 0]),
        ([], []),
    ],
)
def test_max_rl(rewards: list[float], expected: list[float]) -> None:
    assert MaxRl().advantages(rollouts(rewards)) == expected


@pytest.mark.parametrize(
    ("rewards", "costs", "expected"),
    [
        ([1, 1, 0, 1], [10, 30, 20, 20], [0.625, 0.125, -0.875, 0.125]),
        ([1, 0, 0, 0], [100, 50, 200, 150], [0.75, -0.25, -0.25, -0.25]),
        ([0, 0], [1, 2], [0, 0]),
        ([-1, -2], [1, 2], [0.5, -0.5]),
    ],
)
def test_efficiency(rewards: list[float], costs: list[int], expected: list[float]) -> None:
    tokens = grpo(length_penalty={"type": "tokens"})
    assert tokens.advantages(rollouts(rewards, lengths=costs)) == expected
    turns = grpo(length_penalty={"type": "turns"})
    assert turns.advantages(rollouts(rewards, turns=costs)) == expected


def test_efficiency_of_three_right_ones() -> None:
    shaped = [11 / 7, 8 / 7, 1.0]
    expected = [value - sum(shaped) / 3 for value in shaped]
    penalty = grpo(length_penalty={"type": "tokens"})
    assert penalty.advantages(rollouts([1, 1, 1], [10, 20, 40])) == close(expected)


def test_efficiency_by_turns_golden() -> None:
    penalty = grpo(length_penalty={"type": "turns"})
    expected = [0.625, 0.125, -0.875, 0.125]
    assert penalty.advantages(rollouts([1, 1, 0, 1], turns=[1, 3, 2, 2])) == expected


def test_tool_tokens_cost_what_the_config_says() -> None:
    group = rollouts([1, 1, 0, 1], [5, 5, 5, 5], tools=[5.0, 25.0, 15.0, 15.0])
    both = grpo(length_penalty={"type": "tokens"})
    assert both.advantages(group) == [0.625, 0.125, -0.875, 0.125]
    none = grpo(length_penalty={"type": "tokens", "tool_weight": 0})
    assert none.advantages(group) == [0.25, 0.25, -0.75, 0.25]
    assert RolloutView(0, 1.0, 1, metrics={"a": 3.0}).tool_tokens == 0


def test_length_weighted_baseline() -> None:
    weighted = grpo(length_weighted_baseline=True)
    assert weighted.advantages(rollouts([1, 0], [100, 300])) == [0.75, -0.25]


@pytest.mark.parametrize(
    ("gated", "weighted", "expected"),
    [
        (False, False, [0.509375, 0.496875, -0.490625, -0.515625]),
        (False, True, [0.58571429, 0.57321429, -0.41428571, -0.43928571]),
        (True, False, [0.496875, 0.484375, -0.490625, -0.490625]),
        (True, True, [0.56785714, 0.55535714, -0.41964286, -0.41964286]),
    ],
)
def test_linear(gated: bool, weighted: bool, expected: list[float]) -> None:
    algorithm = linear(0.25, 1000, gated, weighted)
    found = algorithm.advantages(rollouts([1, 1, 0, 0], [100, 200, 100, 300]))
    assert found == close(expected)
    if not weighted:
        assert found == expected, "closed forms are exact in float64"


def test_linear_on_even_lengths_and_its_term_alone() -> None:
    found = linear(0.25, 1000, False, False).advantages(
        rollouts([1, 1, 0, 0], [100, 200, 100, 200])
    )
    assert found == [0.50625, 0.49375, -0.49375, -0.50625]
    group = rollouts([1, 1, 0, 0], [100] * 4)
    whole = linear(0.25, 100, True, False).advantages(group)
    plain = grpo().advantages(group)
    term = [a - b for a, b in zip(whole, plain, strict=True)]
    assert term == [-0.0625, -0.0625, 0.0625, 0.0625]


def test_group_max() -> None:
    algorithm = grpo(length_penalty={"type": "group_max"})
    group = rollouts([1, 1, 0, 0], [100, 200, 100, 200], [1, 2, 2, 4], [50, 50, 100, 100])
    assert algorithm.advantages(group) == [0.559375, 0.484375, -0.478125, -0.565625]


# -- exactness ------------------------------------------------------------------------------


def linear(coef: float, seq_len: int, gated: bool, weighted: bool) -> Grpo:
    penalty = {"type": "linear", "coef": coef, "gate_by_correctness": gated}
    return grpo(seq_len, length_penalty=penalty, length_weighted_baseline=weighted)


def folded(
    rewards: Sequence[Any],
    lengths: Sequence[int],
    coef: Any,
    seq_len: int,
    gated: bool,
    weighted: bool,
) -> list[Any]:
    """(r_i - p_i) - B(r - p), in whatever arithmetic the arguments bring along."""
    n = len(rewards)
    rate = sum(rewards) / n
    shaped = [
        r - coef * rate * length / seq_len * (r if gated else 1)
        for r, length in zip(rewards, lengths, strict=True)
    ]
    if weighted:
        baseline = sum(s * length for s, length in zip(shaped, lengths, strict=True)) / sum(lengths)
    else:
        baseline = sum(shaped) / n
    return [s - baseline for s in shaped]


def test_gate_by_correctness_multiplies_by_the_reward() -> None:
    """coef 1/2, mean 1/2, all as long as seq_len: p = 1/4 r, B(p) = 1/8, A = (r - 1/2) + 1/8 - r/4.

    A gate that let only rewards of 1 pay would give the second rollout 1/12, and not 0.
    """
    found = linear(0.5, 100, gated=True, weighted=False)
    group = rollouts([1.0, 0.5, 0.0], [100, 100, 100])
    assert found.advantages(group) == [0.375, 0.0, -0.375]
    only_solved = [0.25, 0.0, 0.0]
    mean = sum(only_solved) / 3
    other = [r - 0.5 + mean - p for r, p in zip([1.0, 0.5, 0.0], only_solved, strict=True)]
    assert other[1] == pytest.approx(1 / 12), "what others read the gate as"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_penalty_is_its_folded_form_bit_for_bit(gated: bool, weighted: bool) -> None:
    draw = random.Random(7)
    for _ in range(2000):
        n = draw.randint(2, 16)
        seq_len = draw.randint(1, 8192)
        coef = draw.uniform(0.01, 2.0)
        rewards = [draw.choice([0.0, 1.0, draw.random(), draw.gauss(0, 3)]) for _ in range(n)]
        lengths = [draw.randint(1, seq_len) for _ in range(n)]
        found = linear(coef, seq_len, gated, weighted).advantages(rollouts(rewards, lengths))
        exact = [Fraction(reward) for reward in rewards]
        want = folded(exact, lengths, Fraction(coef), seq_len, gated, weighted)
        assert [value.hex() for value in found] == [float(value).hex() for value in want]
        roughly = folded(rewards, lengths, coef, seq_len, gated, weighted)
        assert found == pytest.approx(roughly, abs=1e-12, rel=1e-9)


@pytest.mark.parametrize("gated", [False, True])
def test_linear_penalty_is_its_float_folded_form_where_floats_do_not_round(gated: bool) -> None:
    draw = random.Random(8)
    for _ in range(2000):
        n = 2 ** draw.randint(1, 5)
        rewards = [draw.randint(0, 4) / 4 for _ in range(n)]
        lengths = [draw.randint(1, 4096) for _ in range(n)]
        found = linear(0.25, 4096, gated, False).advantages(rollouts(rewards, lengths))
        assert found == folded(rewards, lengths, 0.25, 4096, gated, False)


ALL_KINDS = st.sampled_from(
    [
        grpo(),
        grpo(length_weighted_baseline=True),
        grpo(length_penalty={"type": "tokens"}),
        grpo(length_penalty={"type": "turns"}),
        grpo(length_penalty={"type": "group_max"}),
        linear(0.25, 100, True, True),
        MaxRl(),
    ]
)
MEMBERS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=24
)


@given(ALL_KINDS, MEMBERS, st.randoms(use_true_random=False))
def test_order_within_a_group_does_not_matter(
    algorithm: Any, members: list[tuple[float, int, int]], shuffle: random.Random
) -> None:
    def credit(some: list[tuple[float, int, int]]) -> list[float]:
        rewards, lengths, turns = zip(*some, strict=True)
        found: list[float] = algorithm.advantages(rollouts(rewards, lengths, turns))
        return found

    order = list(range(len(members)))
    shuffle.shuffle(order)
    before = credit(members)
    assert credit([members[i] for i in order]) == [before[i] for i in order]


@given(st.floats(0, 1), st.integers(1, 24))
def test_equal_rewards_get_nothing_at_all(reward: float, n: int) -> None:
    for algorithm in (grpo(), grpo(length_weighted_baseline=True), MaxRl()):
        found = algorithm.advantages(rollouts([reward] * n, list(range(1, n + 1))))
        assert found == [0.0] * n


@pytest.mark.parametrize("scale", [1.0, 1e-9, 3e5])
def test_rounding_of_the_rewards_is_no_advantage(scale: float) -> None:
    """The exact mean of these floats is not the float 0.8."""
    group = rollouts([scale * reward for reward in [0.7, *[0.8] * 6, 0.9]])
    for algorithm in (
        grpo(),
        grpo(length_weighted_baseline=True),
        grpo(length_penalty={"type": "linear", "coef": 0.25}),
        grpo(length_penalty={"type": "group_max"}),
        MaxRl(),
    ):
        low, *middle, high = algorithm.advantages(group)
        assert middle == [0.0] * 6 and low < 0 < high
    assert grpo().advantages(rollouts([1.0, 1.0 + 2**-36])) == [-(2**-37), 2**-37], "small, kept"


# -- hooks ----------------------------------------------------------------------------------


async def test_hooks_run_by_barrier_and_the_last_word_counts() -> None:
    class Staged(Algorithm):
        name = "staged"

        async def score_rollout(self, rollout: RolloutView) -> Credit:
            return Credit(rollout.reward)

        async def score_group(
            self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
        ) -> list[Credit]:
            return [Credit(5.0), *([Credit()] * (len(rollouts) - 1))]

        async def score_survivors(self, rollouts: Sequence[RolloutView]) -> list[Credit]:
            return [Credit(float(len(rollouts)))] * len(rollouts)

    group = rollouts([0.1, 0.2, 0.3])
    credit = await before_filters(Staged(), group)
    assert [given.advantage for given in credit] == [5.0, 0.2, 0.3]
    left = await after_filters(Staged(), group[:2], credit[:2])
    assert [given.advantage for given in left] == [2.0, 2.0]
    assert await before_filters(Algorithm(), group) == [Credit()] * 3
    assert await after_filters(Algorithm(), group, credit) == credit
    assert await before_filters(Staged(), []) == []


async def test_reward_is_known_on_arrival() -> None:
    credit = await before_filters(build(RewardConfig(), seq_len=8), rollouts([0.25, 1.0]))
    assert [given.advantage for given in credit] == [0.25, 1.0]


async def test_rewards_beyond_floats_are_the_users_error() -> None:
    with pytest.raises(CreditError, match="moderate size"):
        await before_filters(grpo(), rollouts([1.7e308, -1.7e308, -1.7e308]))


def test_broadcast_touches_sampled_tokens_only() -> None:
    masks = [[False, True, True], [False, False, True]]
    assert broadcast(0.5, masks) == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.5]]
    assert broadcast([1.0, 2.0, 3.0], masks) == [[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]]
    with pytest.raises(CreditError, match="2 advantages for 3 sampled tokens"):
        broadcast([1.0, 2.0], masks)


# -- group documents ------------------------------------------------------------------------


def document(reward: float) -> dict[str, Any]:
    samples = [
        {
            "token_ids": [1, 2, 3],
            "loss_mask": [False, True, True],
            "logprobs": [0.0, -1.0, -2.0],
            "versions": [-1, 5, 5],
        }
    ]
    return {
        "reward": reward,
        "error": None,
        "labels": [],
        "tokens": 3,
        "sampled_tokens": 2,
        "samples": samples,
        "messages": [{"role": "assistant", "content": "x"}],
        "rewards": {"main": reward},
        "metrics": {},
        "truncated": False,
        "responded": True,
        "turns": 1,
        "timing": {},
        "stop": None,
        "temperature": 1.0,
    }


WORK = GroupWork("train/0", "train", "reverse-text", 0, 4)


def test_a_group_document_names_its_algorithm() -> None:
    found = score_group(WORK, [document(r) for r in (1.0, 0.0, 0.0, 0.0)], 5, "", MaxRl())
    assert found["algorithm"] == "max_rl"
    rows = groups.batch_samples(found)
    assert [row.advantages for row in rows][:2] == [[0.0, 3.0, 3.0], [0.0, -1.0, -1.0]]
    evaluated = GroupWork("eval/0-0/0", "eval", "reverse-text", 0, 1)
    assert score_group(evaluated, [document(1.0)], 5, "")["algorithm"] is None


CREDIT = """
from __future__ import annotations
from dataclasses import dataclass


@dataclass
class Scale:
    by: float


def scaled(rollouts, by=2.0):
    return [Scale(by).by * rollout.reward for rollout in rollouts]


async def per_token(rollouts):
    import numpy as np
    return [np.asarray(rollout.logprobs) for rollout in rollouts]


def amiss(rollouts, what):
    return {
        "none": None,
        "few": [0.0],
        "text": ["a"] * len(rollouts),
        "nan": [float("nan")] * len(rollouts),
        "short": [[1.0] for _ in rollouts],
        "token": [["a", 1.0] for _ in rollouts],
        "truth": [None] * len(rollouts),
    }[what]


def broken(rollouts):
    raise KeyError("gone")


def by_word(rollouts):
    return [float(len(rollout.task.get("word", ""))) for rollout in rollouts]


constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "my_credit.py").write_text(CREDIT)
    (tmp_path / "bad_credit.py").write_text("import no_such_thing")
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("from .other import half as half")
    (package / "other.py").write_text("def half(rollouts): return [0.5] * len(rollouts)")
    return str(tmp_path)


def custom(folder: str, function: str, **kwargs: Any) -> Algorithm:
    config = CustomConfig(function=f"my_credit:{function}", path=folder, kwargs=kwargs)
    return build(config, seq_len=8)


def test_custom_scalars_and_per_token_lists(folder: str) -> None:
    members = [document(r) for r in (1.0, 0.25)]
    work = GroupWork("train/0", "train", "e", 0, 2)
    found = score_group(work, members, 5, "", custom(folder, "scaled", by=4.0))
    assert [row.advantages for row in groups.batch_samples(found)] == [
        [0.0, 4.0, 4.0],
        [0.0, 1.0, 1.0],
    ]
    found = score_group(work, members, 5, "", custom(folder, "per_token"))
    assert [row.advantages for row in groups.batch_samples(found)] == [[0.0, -1.0, -2.0]] * 2
    assert found["rollouts"][0]["advantage"] == -1.5
    assert found["algorithm"] == "custom"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_custom_function_sees_its_task_if_the_config_says_so(
    folder: str, tmp_path: Path, declared: bool
) -> None:
    """The credit is the example's own index, read from a real taskset by the activity."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    algo = {"type": "custom", "function": "my_credit:by_word", "path": folder}
    config = validate(
        {
            "max_steps": 1,
            "algo": {**algo, "needs_task": declared},
            "train": {"env": [{"id": "reverse-text"}]},
            "filters": {"pre_batch": [], "post_batch": []},
        }
    )
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    rooms, work = rollout_activities(ctx), GroupWork("train/0", "train", "reverse-text", 3, 2)
    for index in range(2):
        ctx.store.put_json(keys.rollout("r", work.group, index), document(1.0))
    run = ActivityEnvironment().run
    done = await run(rooms.finalize_group, FinalizeGroupInput("r", work, 0))
    assert done.ref is not None
    members = documents.read(ctx.store, done.ref)["rollouts"]
    words = reverse_text_words("train", 4, 0)
    assert [m["advantage"] for m in members] == [float(len(words[3]) if declared else 0)] * 2


async def test_custom_function_of_a_package(folder: str) -> None:
    config = CustomConfig(function="pack.deep:half", path=folder)
    credit = await before_filters(build(config, seq_len=8), rollouts([1.0]))
    assert credit == [Credit(0.5)]


async def test_custom_functions_of_one_name_do_not_meet(folder: str, tmp_path: Path) -> None:
    old = custom(folder, "scaled")
    (tmp_path / "my_credit.py").write_text("def scaled(rollouts): return [7] * len(rollouts)")
    new = custom(folder, "scaled")
    assert await before_filters(old, rollouts([1.0])) == [Credit(2.0)]
    assert await before_filters(new, rollouts([1.0])) == [Credit(7.0)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("none", "must return a list with one entry per rollout, not NoneType"),
        ("few", "returned 1 entries for 2 rollouts"),
        ("text", "rollout 0: an advantage is a finite number or a list of them, not 'a'"),
        ("nan", "rollout 0: an advantage is a finite number"),
        ("short", "rollout 0: 1 advantages for 2 sampled tokens"),
        ("token", "rollout 0: 'a' is not a finite number"),
        ("truth", "not None"),
    ],
)
async def test_what_a_custom_function_returns_is_checked(
    folder: str, what: str, message: str
) -> None:
    algorithm = custom(folder, "amiss", what=what)
    with pytest.raises(CreditError, match=message):
        await before_filters(algorithm, rollouts([1.0, 0.0], [2, 2]))


async def test_what_a_custom_function_raises_is_reported(folder: str) -> None:
    with pytest.raises(CreditError, match="my_credit:broken raised KeyError: 'gone'"):
        await before_filters(custom(folder, "broken"), rollouts([1.0]))


@pytest.mark.parametrize(
    ("function", "path", "kwargs", "message"),
    [
        ("my_credit:nothing", True, {}, "has no 'nothing'"),
        ("my_credit:constant", True, {}, "not as a function"),
        ("my_credit:scaled", True, {"bye": 1}, "cannot be called .*'bye'"),
        ("my_credit:amiss", True, {}, "cannot be called .*'what'"),
        ("bad_credit:f", True, {}, "cannot be imported: ModuleNotFoundError.*no_such_thing"),
        ("your_credit:f", True, {}, "there is no module 'your_credit' in"),
        ("your_credit:f", False, {}, "set `path` to its folder"),
    ],
)
def test_a_custom_function_that_cannot_be_had(
    folder: str, function: str, path: bool, kwargs: dict[str, Any], message: str
) -> None:
    algo = {"type": "custom", "function": function, "kwargs": kwargs}
    config = CustomConfig.model_validate({**algo, "path": folder if path else None})
    with pytest.raises(CreditError, match=message):
        build(config, seq_len=8)
    env = {"id": "reverse-text", "algo": config.model_dump()}
    (problem,) = check_algorithms(validate({**MINIMAL, "train": {"env": [env]}}))
    assert problem.pointer == "/train/env/0/algo/function"


async def test_a_run_scores_with_the_algorithm_of_its_env(tmp_path: Path, folder: str) -> None:
    """From a resolved config in the store to the group's document, as a worker does it."""
    ctx = WorkerContext(home=tmp_path / "home", store_url=f"file://{tmp_path}/store", own_queue="q")
    algo = {"type": "custom", "function": "my_credit:scaled", "path": folder}
    broken = {**algo, "function": "my_credit:broken"}
    absent = {**algo, "function": "my_credit:absent"}
    envs = [
        {"id": "reverse-text"},
        {"id": "reverse-text", "name": "mine", "algo": algo},
        {"id": "reverse-text", "name": "broken", "algo": broken},
        {"id": "reverse-text", "name": "absent", "algo": absent},
    ]
    unfiltered = {"pre_batch": [], "post_batch": []}
    config = validate(
        {**MINIMAL, "algo": {"type": "max_rl"}, "train": {"env": envs}, "filters": unfiltered}
    )
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"), attempt="a")
    activities = rollout_activities(ctx)

    async def finalize(number: int, env: str) -> tuple[str, list[float]]:
        work = GroupWork(f"train/{number}", "train", env, 0, 2)
        for index, reward in enumerate((1.0, 0.0)):
            key = keys.rollout("r", work.group, index)
            ctx.store.put_json(key, document(reward), attempt="a")
        given = FinalizeGroupInput("r", work, version=1)
        result = await ActivityEnvironment().run(activities.finalize_group, given)
        assert result.ref is not None
        stored = documents.read(ctx.store, result.ref)
        return stored["algorithm"], [member["advantage"] for member in stored["rollouts"]]

    assert await finalize(0, "reverse-text") == ("max_rl", [1.0, -1.0])
    assert await finalize(1, "mine") == ("custom", [2.0, 0.0])
    for number, (env, message) in enumerate({"broken": "KeyError", "absent": "has no"}.items(), 2):
        with pytest.raises(ApplicationError, match=message) as error:
            await finalize(number, env)
        assert error.value.type == names.BAD_INPUT and error.value.non_retryable
    given = CheckInput(config.model_dump(mode="json"))
    checked = await ActivityEnvironment().run(AlgorithmActivities(ctx).check_algorithms, given)
    assert [problem.key for problem in checked.problems] == ["train.env.3.algo.function"]
