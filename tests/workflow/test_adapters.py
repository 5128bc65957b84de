"""A run that pushes each version as an adapter of its own name: rollouts keep what they named."""

from typing import Any

import pytest
from temporalio.client import Client

from ratchet.activities.contracts.training import base_of, label_of
from tests.workflow.running import check_exactly_once, start, world_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ADAPTED: dict[str, Any] = {"trainer": {"lora": {}}, "inference": {"transfer": "auto"}}


async def test_rollouts_name_what_was_verified_and_keep_it(temporal: Client) -> None:
    async with world_of(temporal, cached=0) as world:
        world.adapters = True
        result = await (await start(world, **ADAPTED)).result()
        assert (result["status"], result["policy_version"]) == ("succeeded", 6)
        check_exactly_once(world, 6)
        for group, names in world.named.items():
            (name,) = names
            assert world.sampled[group] == {label_of(name) or "0.1a"}, group
        used = {label_of(name) for names in world.named.values() for name in names}
        assert {"", "1.2a", "2.3a"} <= used
        assert len({base_of(name) for names in world.named.values() for name in names}) == 1
        assert [push.version for push in world.pushes] == list(range(7))
        for push in world.pushes:
            assert push.oldest is not None and push.oldest < push.version


async def test_what_a_rollout_in_flight_uses_is_not_retired(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.adapters, world.slow_groups = True, {"train/1"}
        await (await start(world, max_steps=5, eval={}, **ADAPTED)).result()
        assert world.named["train/1"] == {world.pushes[1].model}
        assert [push.oldest for push in world.pushes] == [-1, 0, 0, 0, 0, 0]


async def test_merged_pushes_retire_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        lora = {**ADAPTED, "inference": {"transfer": "store"}}
        await (await start(world, max_steps=2, **lora)).result()
        assert [push.oldest for push in world.pushes] == [None] * 3
