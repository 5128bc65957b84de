"""Training goes on while weights are pushed: on a real server, with whatever may go wrong then."""

from collections import Counter
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from tests.workflow.running import (
    check_exactly_once,
    generations_of,
    memo,
    start,
    status,
    until,
    world_of,
)
from tests.workflow.world import PUSH_SECONDS, World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

TWO_ENGINES = {"inference": {"engines": 2}, "checkpoint": {"interval": 10}}


async def ahead(world: World, **overrides: Any) -> WorkflowHandle[Any, Any]:
    """A run whose step 3 was trained while the push of version 2 is held."""
    handle = await pushing(world, **{"checkpoint": {"interval": 10}, **overrides})
    await until(lambda: 3 in world.trained)
    assert world.pushes[-1].version == 2
    return handle


async def pushing(world: World, held: str = "push 2", **overrides: Any) -> WorkflowHandle[Any, Any]:
    """A run that has batch 3, and whose push of version 2 is `held`."""
    world.holds |= {held, "step 2"}
    handle = await start(world, **overrides)
    # Until the push begins: what is sampled under its label may not be trained yet.
    await until(lambda: 3 in world.batches)
    world.holds.remove("step 2")
    await until(lambda: any(push.version == 2 for push in world.pushes))
    return handle


@pytest.mark.parametrize("cached", [pytest.param(0, marks=pytest.mark.nightly), 100])
async def test_the_next_batch_trains_while_weights_are_pushed(
    temporal: Client, cached: int
) -> None:
    async with world_of(temporal, cached) as world:
        handle = await ahead(world)
        seen = await handle.query("status")
        assert (seen["step"], seen["policy_version"]) == (1, 1), "nobody has verified version 2"
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 6
        check_exactly_once(world, 6)
        assert [push.version for push in world.pushes] == list(range(7))
        of = world.metrics[3]
        assert of["time/trainer"] > 0 and of["time/train"] < world.metrics[2]["time/sync_weights"]
        assert world.metrics[2]["time/push/idle"] == 0
        assert world.metrics[2]["time/push/load"] == PUSH_SECONDS["load"]


async def test_the_run_tells_of_the_push_that_it_waits_for(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"step 3"}
        handle = await pushing(world, checkpoint={"interval": 10})

        async def waits() -> str:
            return str(((await handle.query("status"))["waiting_for"] or {}).get("name"))

        assert await waits() == "policy v2: weights being pushed and verified"
        world.holds.remove("step 3")
        await until(lambda: 3 in world.trained)
        assert await waits() == "policy v2: weights being pushed and verified"
        world.holds.clear()
        await handle.result()


async def test_a_batch_without_lag_waits_for_its_weights(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"push 2"}
        train = {"env": [{"id": "reverse-text"}], "batch_size": 8, "group_size": 2, "max_lag": 0}
        handle = await start(world, max_steps=4, train=train, checkpoint={"interval": 10})
        await until(lambda: any(push.version == 2 for push in world.pushes))
        await handle.signal("trigger_eval")
        await until(lambda: any(name.startswith("eval/1-") for name in world.started))
        assert world.trained == [1, 2] and list(world.batches) == [1, 2]
        world.holds.clear()
        await handle.result()
        check_exactly_once(world, 4)


async def test_a_checkpoint_that_is_due_comes_before_the_next_batch(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await pushing(world, checkpoint={"interval": 2})
        await handle.signal("trigger_eval")
        await until(lambda: any(name.startswith("eval/1-") for name in world.started))
        assert world.trained == [1, 2]
        world.holds.clear()
        await handle.result()
        assert world.checkpoints == [2, 4, 6] and world.loaded == [0]
        assert world.metrics[2]["time/push/idle"] > 0, "batch 3 was there"
        check_exactly_once(world, 6)


async def test_what_refused_weights_sampled_trains_nowhere(temporal: Client) -> None:
    async with world_of(temporal) as world:
        # One of batch 3, in flight while the weights are pushed that are refused.
        world.holds, world.refuse_gate_at = {"push 2", "train/9/1"}, {2}
        handle = await start(world)
        await until(lambda: any(push.version == 2 for push in world.pushes))
        world.holds = {"push 2"}
        await until(lambda: "train/9" in world.order)
        await handle.signal("trigger_eval")
        await until(lambda: any(name.startswith("eval/1-") for name in world.started))
        assert list(world.batches) == [1, 2], "its last group waits for the gate"
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and world.events == ["gate refused v2"]
        shipped = {group for groups in world.batches.values() for group in groups}
        assert not any(world.sampled[group] & world.refused for group in shipped)
        assert "train/9" not in shipped and "train/9.1" in shipped
        check_exactly_once(world, 6)


@pytest.mark.parametrize("other_bits", [False, True])
async def test_a_trainer_that_is_lost_while_it_is_ahead(temporal: Client, other_bits: bool) -> None:
    async with world_of(temporal) as world:
        world.lose_trainer_at, world.other_bits = {3}, {2} if other_bits else set()
        handle = await ahead(world)
        assert world.events == ["killed trainer/0"] and world.replayed == [1, 2]
        world.holds.clear()
        assert (await handle.result())["status"] == "succeeded"
        versions = [push.version for push in world.pushes]
        assert versions == [0, 1, 2, *([2] if other_bits else []), 3, 4, 5, 6]
        check_exactly_once(world, 6)


async def test_an_engine_that_is_lost_in_the_middle_of_the_push(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await ahead(world)
        world.kill("engine/0")
        await until(lambda: world.epochs["engine/0"] == 2)
        world.holds.clear()
        assert (await handle.result())["status"] == "succeeded"
        assert [push.version for push in world.pushes] == [0, 1, 2, 2, 3, 4, 5, 6]
        check_exactly_once(world, 6)


@pytest.mark.long
async def test_a_store_that_fails_while_the_trainer_is_ahead(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"step 3"}
        handle = await pushing(world, checkpoint={"interval": 10})
        world.store_fails["train_step"] = 2
        world.holds = {"push 2"}
        await until(lambda: 3 in world.trained)
        assert world.events == ["no store for train_step"] * 2
        world.holds.clear()
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 6)


@pytest.mark.parametrize("verb", ["pause", "stop"])
async def test_a_request_waits_for_the_step_that_is_under_way(temporal: Client, verb: str) -> None:
    async with world_of(temporal) as world:
        handle = await ahead(world, max_steps=8)
        await handle.signal(verb)
        world.holds.clear()
        if verb == "pause":
            seen = await status(handle, "paused")
            assert seen["step"] == 3 and world.checkpoints == [3]
            await handle.signal("resume")
        result = await handle.result()
        steps = 8 if verb == "pause" else 3
        assert result["status"] == "succeeded" and result["step"] == steps
        assert world.trained == list(range(1, steps + 1)) and not world.replayed


async def test_a_change_is_made_once_the_trainer_is_not_ahead(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await ahead(world)
        patch = {"train": {"env": {"reverse-text": {"ratio": 2}}}}
        await handle.execute_update("change_config", patch)
        world.holds.clear()
        result = await handle.result()
        assert result["step"] == 6 and world.revisions[3] == 0 < world.revisions[4]
        check_exactly_once(world, 6)


async def test_an_engine_that_is_never_verified_pauses_the_run(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await ahead(world)
        refused = world.refuse_gate_at = _Always({2})
        world.holds.clear()
        seen = await status(handle, "paused")
        assert "engine -1.5" in seen["paused_because"] and seen["step"] == 1
        refused.clear()
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 6
        assert world.replayed[:3] == [1, 2, 3], "no checkpoint was due yet"
        assert world.trained == list(range(1, 7))


class _Always(set[int]):
    def discard(self, value: object) -> None:
        pass


@pytest.mark.long
async def test_a_long_run_continues_as_new_between_two_steps(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.push_s = 0.1
        dispatch = {"generation_events": 120}
        handle = await start(world, max_steps=20, dispatch=dispatch, eval={})
        await handle.result()
        check_exactly_once(world, 20)
        assert (await memo(handle))["step"] == 20
        first = handle.first_execution_run_id
        described = await temporal.get_workflow_handle(handle.id).describe()
        assert described.run_id != first, "the run never continued as new"
        assert len(await generations_of(temporal, handle.id, least=2)) >= 2
        idle = [step for step, of in world.metrics.items() if of["time/trainer"] > of["time/train"]]
        assert idle, "no batch trained ahead"


async def test_a_version_rises_once_every_engine_has_it(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await pushing(world, "push 2 to 1", **TWO_ENGINES)
        # By then one engine has version 2, and the other one not.
        await until(lambda: 3 in world.trained)
        await until(lambda: pushed(world)[2, 0] == pushed(world)[2, 1] == 1)
        assert (await handle.query("status"))["policy_version"] == 1
        assert 4 not in world.trained
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and not any(result["restarts"].values())
        check_exactly_once(world, 6)
        assert pushed(world) == {(version, engine): 1 for version in range(7) for engine in (0, 1)}


async def test_a_refused_engine_is_back_before_the_version_rises(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.refuse_gate_at = {2}
        handle = await pushing(world, "push 2 to 1", **TWO_ENGINES)
        # The other engine verifies nothing yet: it is this one that is refused, restarts and is
        # given the version again.
        await until(lambda: pushed(world)[2, 0] == 2)
        assert "gate refused v2" in world.events
        seen = await handle.query("status")
        assert seen["policy_version"] == 1 and seen["restarts"]["engine"] == 1
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["restarts"]["engine"] == 1
        check_exactly_once(world, 6)
        assert pushed(world)[2, 1] == 1, "what it has, the other engine is not given again"


def pushed(world: World) -> Counter[tuple[int, int]]:
    """How often each version was pushed to each engine."""
    return Counter((push.version, push.engine_index) for push in world.pushes)
