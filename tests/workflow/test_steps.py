"""What a step says of its batch."""

import pytest
from temporalio.client import Client

from tests.workflow.running import start, world_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_unusual_rewards_and_batches_that_hardly_train_are_warned_of_once(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.unusual_rewards = {"reverse-text": (0.0, 5.0)}
        world.trainable = {2: 0, 3: 0, 4: 8, 5: 0}
        handle = await start(world, max_steps=6, eval={})
        result = await handle.result()
        rewards, low, again = result["warnings"]
        assert rewards.startswith("env reverse-text gives rewards outside [0, 1], from 0 to 5")
        assert low == "batch 2: only 0 of 8 rollouts can train"
        assert again == "batch 5: only 0 of 8 rollouts can train", "it was better in between"


async def test_unusual_rewards_of_a_batch_that_cannot_train_are_warned_of(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.unusual_rewards, world.empty_ships = {"reverse-text": (5.0, 5.0)}, 2
        handle = await start(world, max_steps=2, eval={})
        warnings = (await handle.result())["warnings"]
        assert world.events.count("batch 1 was empty") == 2
        rewards = [text for text in warnings if "outside [0, 1], from 5 to 5" in text]
        assert rewards == warnings[:1], "before what says that nothing could train"
