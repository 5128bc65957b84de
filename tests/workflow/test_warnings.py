"""What people should know of a run reaches them: once, and not in Temporal's details alone."""

import pytest
from temporalio.client import Client

from tests.workflow.running import start, until, world_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(("examples", "batch", "warns"), [(1, 16, True), (2, 16, False)])
async def test_fewer_examples_than_a_batch_has_groups_are_warned_of(
    temporal: Client, examples: int, batch: int, warns: bool
) -> None:
    async with world_of(temporal) as world:
        world.train_examples = examples
        train = {"batch_size": batch, "group_size": 8, "env": [{"id": "reverse-text"}]}
        handle = await start(world, max_steps=1, eval={}, train=train)
        warnings = (await handle.result())["warnings"]
        said = "a batch takes 2 groups and the train envs have only 1 example, so each"
        assert [text.startswith(said) for text in warnings] == [True] * warns


async def test_an_eval_says_what_it_was_made_of(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=2)
        told = (await handle.result())["eval"]["reverse-text"]
        assert told["epoch"].startswith("2-") and told["epoch"].endswith("/reverse-text")
        assert told["rollouts"] > 0 and len(told["versions"]) == 2
        assert told["versions"][1] == told["version"]


async def test_weights_whose_bits_are_not_compared_are_warned_of_once(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.unverified = "a.weight is held by Fp8LinearMethod"
        handle = await start(world, max_steps=3, eval={})
        assert (await handle.result())["warnings"] == [f"engine-0: {world.unverified}"]
        assert len(world.pushes) >= 3


async def test_what_is_ignored_in_a_signal_is_warned_of(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, eval={})
        await until(lambda: len(world.trained) >= 1)
        await handle.signal("sotp", "now")
        await handle.signal("trigger_eval", ["other"])
        await handle.signal("trigger_eval", 7)
        await handle.signal("stop", "enough")
        warnings = (await handle.result())["warnings"]
        assert warnings == [
            "unknown signal 'sotp' was ignored",
            "trigger_eval: no eval env other",
            "trigger_eval: '7' names no env; all are evaluated",
        ]
