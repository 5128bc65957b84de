"""Credit by agent: moving baselines, and comparison among equals."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.activities.rollouts import groups
from ratchet.activities.scoring.algorithms import (
    Algorithm,
    Grpo,
    HierarchicalGrpo,
    Rae,
    RolloutView,
    TraceView,
    before_filters,
    build,
)
from ratchet.configs.algorithm import GrpoConfig, HierarchicalGrpoConfig, RaeConfig
from tests.groups import score_group
from tests.unit.activities.scoring.algorithms.test_streams import document, sample

REWARDS = st.lists(st.floats(-2, 2), min_size=1, max_size=12)


def alone(rewards: Sequence[float]) -> list[RolloutView]:
    return [RolloutView(i, reward, 2) for i, reward in enumerate(rewards)]


def together(*episodes: Sequence[tuple[str, float]]) -> list[RolloutView]:
    """Rollouts whose agents each sample two tokens."""
    return [
        RolloutView(
            index,
            sum(reward for _, reward in played) / len(played),
            2 * len(played),
            traces=[TraceView(agent, reward, 2) for agent, reward in played],
        )
        for index, played in enumerate(episodes)
    ]


async def advantages(
    algorithm: Algorithm, rollouts: Sequence[RolloutView], state: dict[str, float] | None = None
) -> list[Any]:
    return [credit.advantage for credit in await before_filters(algorithm, rollouts, state)]


# -- rae ------------------------------------------------------------------------------------


async def test_rae_golden() -> None:
    algorithm = build(RaeConfig(), seq_len=8)
    group = alone([1, 0, 1, -1])
    found = await advantages(algorithm, group)
    assert found == pytest.approx([1.0, -0.05, 0.9525, -1.095125], abs=1e-12)
    after = RaeConfig(decay=0.95).fold({}, algorithm.observed(group))
    assert after == {"policy": pytest.approx(0.04036875, abs=1e-12)}


async def test_rae_keeps_agents_apart_and_starts_from_the_snapshot() -> None:
    group = together([("white", 1.0), ("black", 0.0)], [("white", 0.0), ("black", 1.0)])
    algorithm = Rae(RaeConfig(decay=0.5))
    state = {"white": 0.5, "gray": 7.0}
    assert await advantages(algorithm, group, state) == [
        [0.5, 0.5, 0.0, 0.0],
        [-0.75, -0.75, 1.0, 1.0],
    ]
    assert algorithm.observed(group) == {"white": [1.0, 0.0], "black": [0.0, 1.0]}
    after = RaeConfig(decay=0.5).fold(state, algorithm.observed(group))
    assert after == {"white": 0.375, "gray": 7.0, "black": 0.5}
    assert state == {"white": 0.5, "gray": 7.0}


@given(REWARDS, REWARDS, st.floats(0, 0.999), st.floats(-1, 1))
def test_baselines_fold_in_any_portions(
    first: list[float], second: list[float], decay: float, start: float
) -> None:
    rae = RaeConfig(decay=decay)
    whole = rae.fold({"a": start}, {"a": first + second})
    assert rae.fold(rae.fold({"a": start}, {"a": first}), {"a": second}) == whole
    given_, last = rae.advance(start, first + second)
    assert last == whole["a"] and len(given_) == len(first) + len(second)
    ahead = [rae.advance(start, first[:n])[1] for n in range(len(first))]
    assert given_[: len(first)] == [r - b for r, b in zip(first, ahead, strict=True)]
    low, high = min(start, *first, *second), max(start, *first, *second)
    assert low - 1e-9 <= last <= high + 1e-9


def test_a_group_document_keeps_what_was_observed() -> None:
    rollouts: list[dict[str, Any] | None] = [
        document([sample([False, True])], 1.0),
        None,
        document([sample([False, True])], 0.5),
    ]
    work = GroupWork("train/0", "train", "e", 0, 3)
    made = json.loads(
        json.dumps(score_group(work, rollouts, 3, "", Rae(RaeConfig()), state={"policy": 0.5}))
    )
    result = groups.result(made, ArtifactRef("k", "0" * 64, 1, "p"))
    assert result.observed == {"policy": [1.0, 0.5]}
    assert [row.advantages for row in groups.batch_samples(made)] == [
        [0.0, 0.5],
        [0.0, pytest.approx(0.5 - 0.525)],
    ]
    assert (
        groups.result(
            score_group(work, rollouts, 3, ""), ArtifactRef("k", "0" * 64, 1, "p")
        ).observed
        == {}
    ), "algorithms without state observe nothing"
    rejected = score_group(work, rollouts, 3, "", Rae(RaeConfig()), require_full=True)
    assert rejected["observed"] == {}, "rewards of a group that is not trained move nothing"


# -- hierarchical_grpo ----------------------------------------------------------------------


@given(REWARDS)
async def test_with_one_agent_it_is_grpo(rewards: list[float]) -> None:
    algorithm = build(HierarchicalGrpoConfig(), seq_len=8)
    assert await advantages(algorithm, alone(rewards)) == await advantages(
        Grpo(GrpoConfig(), 1), alone(rewards)
    )
    of_another = HierarchicalGrpo(HierarchicalGrpoConfig(episode_agents=["solver"]))
    assert await advantages(of_another, alone(rewards)) == await advantages(
        Grpo(GrpoConfig(), 1), alone(rewards)
    )


async def test_solvers_are_compared_within_an_episode_and_others_across() -> None:
    algorithm = HierarchicalGrpo(HierarchicalGrpoConfig(episode_agents=["solver"]))
    group = together(
        [("proposer", 0.25), ("solver", 1.0), ("solver", 0.0)],
        [("proposer", 0.75), ("solver", 1.0), ("solver", 1.0)],
    )
    assert algorithm.advantages(group) == [[-0.25, 0.5, -0.5], [0.25, 0.0, 0.0]]
    assert await advantages(algorithm, group) == [
        [-0.25, -0.25, 0.5, 0.5, -0.5, -0.5],
        [0.25, 0.25, 0.0, 0.0, 0.0, 0.0],
    ]
    flat = HierarchicalGrpo(HierarchicalGrpoConfig())
    assert flat.advantages(group) == [[-0.25, 0.25, -0.75], [0.25, 0.25, 0.25]]


async def test_rounding_of_the_rewards_is_no_advantage_over_peers() -> None:
    scores = [0.7, *[0.8] * 6, 0.9]
    group = together(*[[("a", score), ("b", 100 * score)] for score in scores])
    low, *middle, high = await advantages(HierarchicalGrpo(HierarchicalGrpoConfig()), group)
    assert middle == [[0.0] * 4] * 6
    assert all(a < 0 < b for a, b in zip(low, high, strict=True))
