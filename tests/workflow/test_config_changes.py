"""Changes of a running run's config that hold from the next step on."""

import json
from collections import Counter
from typing import Any

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError

from ratchet.workflows.protocol.messages import MEMO_KEY
from tests.workflow.running import change, check_exactly_once, memo, start, until, world_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_changes_hold_from_the_next_step_and_lose_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.1
        handle = await start(world, max_steps=1000)
        await until(lambda: len(world.trained) >= 2)
        world.flowing.clear()
        before = len(world.trained)
        patch = {
            "max_steps": 10,
            "trainer": {"optim": {"lr": 0.5}},
            "eval": {"interval": 5},
            "checkpoint": {"interval": 4},
        }
        told: list[dict[str, Any]] = []
        await change(handle, patch)
        async for event in handle.fetch_history_events():
            said = event.workflow_properties_modified_event_attributes.upserted_memo.fields
            if MEMO_KEY in said:
                told.append(json.loads(said[MEMO_KEY].data))
        (changes,) = [one for one in told if "config_diff" in one]
        assert changes["config_diff"]["max_steps"] == [1000, 10]
        assert changes["config_pending"]["trainer.optim.lr"] == 0.5
        # One more may be under way, with the config of before.
        latest = len(world.trained) + 2
        world.flowing.set()
        result = await handle.result()
        assert result["step"] == 10 and result["config_revision"] == 1
        assert result["config_changes"] == patch and result["config_pending"] == {}
        config = world.configs[handle.id, 1]
        assert config["trainer"]["optim"]["lr"] == 0.5 and config["max_steps"] == 10
        check_exactly_once(world, 10)
        since = min(step for step, revision in world.revisions.items() if revision == 1)
        assert before < since <= latest and world.revisions[10] == 1
        assert set(world.revisions.values()) == {0, 1}
        assert {e.step for e in world.evals} >= {0, 5, 10}
        assert not {e.step for e in world.evals if e.step > since} - {5, 10}


async def test_ratios_change_without_a_gap_in_the_data(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.05
        envs = [{"id": "reverse-text"}, {"id": "reverse-retry"}]
        train = {"env": envs, "batch_size": 8, "group_size": 2}
        handle = await start(world, max_steps=24, train=train, eval={})
        await until(lambda: len(world.trained) >= 3)
        world.flowing.clear()
        for name, ratio in (("reverse-text", 7), ("reverse-retry", 1)):
            await change(handle, {"train": {"env": {name: {"ratio": ratio}}}})
        world.flowing.set()
        result = await handle.result()
        assert result["step"] == 24
        check_exactly_once(world, 24)
        groups = [g for step in sorted(world.batches) for g in world.batches[step]]
        assert sorted(int(g.split("/")[1]) for g in groups) == list(range(96))
        used = Counter(env for env, _ in world.examples)
        assert used["train/reverse-text"] > 1.5 * used["train/reverse-retry"]
        for env in ("train/reverse-text", "train/reverse-retry"):
            assert all(n == 1 for (name, _), n in world.examples.items() if name == env)


async def test_change_of_a_paused_run_holds_when_it_wakes(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000)
        await until(lambda: len(world.trained) >= 2)
        await handle.signal("pause")
        await until(lambda: world.serving == 0)
        step = len(world.trained)
        patch = {"max_steps": step + 3, "metadata": {"owner": "ana"}}
        await change(handle, patch)
        assert (await memo(handle))["metadata"] == {"owner": "ana"}
        await handle.signal("resume")
        result = await handle.result()
        assert result["step"] == step + 3 and result["metadata"] == {"owner": "ana"}
        check_exactly_once(world, step + 3)


async def test_steps_added_while_the_last_evals_run_are_taken(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"eval/3-"}
        handle = await start(world, max_steps=3)
        await until(lambda: any("/3-" in name for name in world.started))
        await change(handle, {"max_steps": 6})
        world.holds.clear()
        result = await handle.result()
        assert result["step"] == 6 and result["config_changes"] == {"max_steps": 6}
        check_exactly_once(world, 6)


async def test_steps_that_are_under_way_cannot_be_taken_back(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000)
        await until(lambda: len(world.trained) >= 3)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await change(handle, {"max_steps": 1})
        assert "max_steps cannot become 1" in str(refused.value.cause)
        await handle.signal("stop")
        await handle.result()
