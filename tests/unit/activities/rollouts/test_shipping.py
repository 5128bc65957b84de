"""What is reported and kept of a batch besides its rows: its groups, and unusual rewards."""

from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.scoring.subsets import rewards_outside
from ratchet.activities.storage import keys
from tests.unit.activities.scoring.test_filters import (
    UNSURE,
    _finalize,
    _rollout,
    _sample,
    _ship_groups,
    _world,
)


def cut_for(rooms: RolloutActivities, step: int) -> list[list[str]]:
    """What each batch that was cut for a step was made of."""
    store = rooms.ctx.store
    found = store.committed_keys(keys.step_groups("r", 0, "").rpartition("/")[0])
    records = [store.get_json(store.require(key)) for key in found]
    return [record["groups"] for record in records if record["step"] == step]


async def test_the_groups_of_a_step_are_kept_also_those_that_do_not_train(tmp_path: Path) -> None:
    rooms = _world(tmp_path)
    sample = _sample([1], [UNSURE])
    same = await _finalize(rooms, 0, [_rollout(0.1, [sample]) for _ in range(3)])
    taught = await _finalize(rooms, 1, [_rollout(r, [sample]) for r in (0.0, 1.0)])
    assert (await _ship_groups(rooms, 1, same)).ref is None
    assert cut_for(rooms, 1) == [["train/0"]]
    assert (await _ship_groups(rooms, 1, same, taught)).ref is not None
    assert sorted(cut_for(rooms, 1)) == [["train/0"], ["train/0", "train/1"]]
    await _ship_groups(rooms, 1, same, taught)
    assert len(cut_for(rooms, 1)) == 2, "a retry adopts what is stored"


async def test_a_batch_of_other_groups_than_the_stored_one_is_refused(tmp_path: Path) -> None:
    rooms = _world(tmp_path)
    sample = _sample([1], [UNSURE])
    first, second = [
        await _finalize(rooms, group, [_rollout(r, [sample]) for r in (0.0, 1.0)])
        for group in (0, 1)
    ]
    shipped = await _ship_groups(rooms, 1, first)
    with pytest.raises(ApplicationError, match="older than the store") as refused:
        await _ship_groups(rooms, 1, first, second)
    assert refused.value.type == names.CORRUPT and refused.value.non_retryable
    assert cut_for(rooms, 1) == [["train/0"]], "nothing is kept of the other one"
    assert await _ship_groups(rooms, 1, first) == shipped


async def test_rewards_outside_of_the_usual_are_reported_by_env(tmp_path: Path) -> None:
    rooms = _world(tmp_path)
    sample = _sample([1], [UNSURE])
    usual = await _finalize(rooms, 0, [_rollout(r, [sample]) for r in (0.0, 1.0)])
    high = await _finalize(rooms, 1, [_rollout(r, [sample]) for r in (0.5, 5.0)])
    assert (await _ship_groups(rooms, 1, usual)).unusual_rewards == {}
    result = await _ship_groups(rooms, 2, usual, high)
    assert result.unusual_rewards == {"reverse-text": (0.0, 5.0)}
    assert (await _ship_groups(rooms, 2, usual, high)) == result, "a retry tells the same"
    same = await _finalize(rooms, 2, [_rollout(5.0, [sample]) for _ in range(2)])
    nothing = await _ship_groups(rooms, 3, same)
    assert nothing.ref is None and nothing.unusual_rewards == {"reverse-text": (5.0, 5.0)}


def test_bounds_themselves_are_usual() -> None:
    def found(least: float, most: float) -> dict[str, tuple[float, float]]:
        named = {"train/e/all/reward/min": least, "train/e/all/reward/max": most}
        everywhere = {"train/agg/all/reward/min": -9.0, "train/agg/all/reward/max": 9.0}
        return rewards_outside(named | everywhere, 0.0, 1.0)

    assert found(0.0, 1.0) == {}
    assert found(-0.01, 1.0) == {"e": (-0.01, 1.0)} and found(0.0, 1.01) == {"e": (0.0, 1.01)}
