"""What can be mended pauses a run and ends nothing: a store that fails, servers that keep dying."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from activities.contracts import names
from activities.contracts.hosting import HostReport
from tests.workflow.running import check_exactly_once, memo, start, until, world_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]


async def status(handle: WorkflowHandle[Any, Any], wanted: str) -> dict[str, Any]:
    """The run once it has a status."""
    async with asyncio.timeout(40):
        while (seen := await memo(handle)).get("status") != wanted:
            await asyncio.sleep(0.05)
    return seen


WORKS = (
    names.RUN_ROLLOUTS,
    names.FINALIZE_GROUP,
    names.SHIP_BATCH,
    names.TRAIN_STEP,
    names.SAVE_CHECKPOINT,
    names.RECORD_STEP,
)


@pytest.mark.parametrize("work", WORKS)
async def test_run_pauses_itself_while_the_store_fails_and_goes_on_once_it_is_mended(
    temporal: Client, work: str
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=5)
        await until(lambda: len(world.trained) >= 1)
        world.store_fails[work] = 10**6
        seen = await status(handle, "paused")
        assert f"write of {work}: No space left on device" in seen["paused_because"]
        await asyncio.sleep(0.3)
        assert world.events.count(f"no store for {work}") >= 2
        world.store_fails.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["paused_because"] is None
        check_exactly_once(world, 5)


async def test_failure_that_passes_at_once_stops_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.store_fails.update(dict.fromkeys(WORKS, 1))
        result = await (await start(world, max_steps=3)).result()
        assert result["status"] == "succeeded"
        assert {event for event in world.events if event.startswith("no store")} == {
            f"no store for {work}" for work in WORKS
        }
        check_exactly_once(world, 3)


async def test_stop_of_a_run_whose_store_fails_waits_for_its_last_checkpoint(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, checkpoint={"interval": 500})
        await until(lambda: len(world.trained) >= 2)
        world.store_fails[names.SAVE_CHECKPOINT] = 2
        await handle.signal("stop", "enough")
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert world.events.count(f"no store for {names.SAVE_CHECKPOINT}") == 2
        assert world.checkpoints == [result["step"]]


async def test_engine_that_is_never_verified_pauses_the_run_until_resume(temporal: Client) -> None:
    class Refusing(set[int]):
        def discard(self, version: int) -> None:
            pass

    async with world_of(temporal) as world:
        world.refuse_gate_at = Refusing({3})
        handle = await start(world)
        seen = await status(handle, "paused")
        assert "engine -1.5, trainer -1.2" in seen["paused_because"] and seen["step"] == 2
        assert world.serving == 0 and world.executing == 0
        world.refuse_gate_at = set()
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 6
        assert world.trained == [1, 2, 3, 4, 5, 6]
        shipped = [group for groups in world.batches.values() for group in groups]
        assert len({group.split(".")[0] for group in shipped}) == len(shipped) == 24


async def test_damaged_checkpoint_gives_way_to_the_one_before_and_the_batches_since(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.lose_trainer_at = {6}
        world.damaged = {4}
        result = await (await start(world)).result()
        assert result["status"] == "succeeded"
        assert world.events == ["killed trainer/0", "damaged 4"]
        assert world.loaded == [0, 2] and world.replayed == [3, 4, 5]
        check_exactly_once(world, 6)


async def test_batch_that_cannot_be_written_pauses_the_run_and_loses_no_group(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.broken_ships = {3}
        handle = await start(world, eval={})
        seen = await status(handle, "paused")
        assert "the digest is another" in seen["paused_because"]
        world.broken_ships = set()
        await handle.signal("resume")
        assert (await handle.result())["step"] == 6
        shipped = [group for groups in world.batches.values() for group in groups]
        assert {int(g.split("/")[1].split(".")[0]) for g in shipped} == set(range(24))
        assert len(shipped) == 24 and world.trained == [1, 2, 3, 4, 5, 6]


async def test_server_that_keeps_failing_pauses_the_run_once_and_for_good(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, eval={})
        await until(lambda: len(world.trained) >= 2)
        failed = HostReport("env", 0, 1, "failed", detail="no such taskset", run_id=handle.id)
        await handle.signal("host_report", failed)
        seen = await status(handle, "paused")
        assert "no such taskset" in seen["paused_because"]
        executed = (await handle.describe()).run_id
        await asyncio.sleep(1.5)
        assert (await handle.describe()).run_id == executed, "it continues as new for ever"
        assert (await memo(handle))["status"] == "paused"
        await handle.signal("resume")
        assert (await handle.result())["step"] == 6


async def test_failure_while_a_pause_drains_pauses_all_the_same(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=8, eval={})
        await until(lambda: len(world.trained) >= 2)
        world.rollout_s = 3.0
        await asyncio.sleep(0.5)
        await handle.signal("pause", "drain")
        await status(handle, "pausing")
        failed = HostReport("env", 0, 1, "failed", detail="no such taskset", run_id=handle.id)
        await handle.signal("host_report", failed)
        seen = await status(handle, "paused")
        assert "no such taskset" in seen["paused_because"]
        world.rollout_s = 0.02
        await handle.signal("resume")
        assert (await handle.result())["step"] == 8
        assert world.trained == list(range(1, 9))


async def test_drift_raises_an_alarm_and_ends_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.mismatch_kl = {3: 0.7}
        world.rollout_s = 0.2
        handle = await start(world, max_steps=5, checkpoint={"interval": 100})
        async with asyncio.timeout(40):
            while not (seen := await memo(handle)).get("alarm"):
                await asyncio.sleep(0.02)
        assert seen["alarm"] == "step 3: mismatch KL 0.7 is above 0.5" and seen["step"] == 3
        result = await handle.result()
        assert result["status"] == "succeeded" and result["alarm"] is None


async def test_damaged_groups_are_rolled_out_anew(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.damaged_groups = {"train/3": names.RUN_ROLLOUTS, "train/6": names.FINALIZE_GROUP}
        world.damaged_groups["train/9"] = names.SHIP_BATCH
        result = await (await start(world, max_steps=5)).result()
        assert result["status"] == "succeeded"
        lost = sorted(event for event in world.events if event.startswith("damaged"))
        assert lost == ["damaged train/3", "damaged train/6", "damaged train/9"]
        shipped = {group for groups in world.batches.values() for group in groups}
        assert {"train/3.1", "train/6.1", "train/9.1"} <= shipped
        assert {int(g.split("/")[1].split(".")[0]) for g in shipped} == set(range(20))
        assert len(shipped) == 20 and world.trained == [1, 2, 3, 4, 5]


async def test_damage_without_a_way_round_pauses_the_run_and_names_it(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.lose_trainer_at = {4}
        world.damaged = {2}
        handle = await start(world)
        seen = await status(handle, "paused")
        assert "checkpoint of step 2 does not match its sha256" in seen["paused_because"]
        world.damaged = set()
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 6)
