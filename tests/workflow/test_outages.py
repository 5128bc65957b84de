"""What can be fixed pauses a run and ends nothing: a store that fails, servers that keep dying."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from ratchet.activities.contracts import names, rests
from ratchet.activities.contracts.hosting import HostReport
from ratchet.workflows.rules.held_work import TRIES_OF_ITS_OWN
from ratchet.workflows.run import trainer
from tests.workflow.running import (
    WITHIN_S,
    at_rest,
    change,
    check_exactly_once,
    memo,
    start,
    status,
    until,
    world_of,
)
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


WORKS = (
    names.RUN_ROLLOUTS,
    names.FINALIZE_GROUP,
    names.SHIP_BATCH,
    names.TRAIN_STEP,
    names.SAVE_CHECKPOINT,
    names.RECORD_STEP,
)


QUICK = (names.RUN_ROLLOUTS, names.TRAIN_STEP)


@pytest.mark.parametrize(
    "work",
    [
        *QUICK,
        *(pytest.param(work, marks=pytest.mark.nightly) for work in WORKS if work not in QUICK),
    ],
)
async def test_run_pauses_itself_while_the_store_fails_and_goes_on_once_it_works(
    temporal: Client, work: str
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=5)
        await until(lambda: len(world.trained) >= 1)
        world.store_fails[work] = 10**6
        seen = await status(handle, "paused")
        assert f"write of {work}: No space left on device" in seen["paused_because"]
        await until(lambda: world.events.count(f"no store for {work}") >= 2)
        world.store_fails.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["paused_because"] is None
        check_exactly_once(world, 5)


@pytest.mark.long
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


async def test_rollouts_are_delivered_while_the_trainer_is_down(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.2
        world.lose_trainer_at = {2}
        env = [{"id": "reverse-text"}]
        train = {"env": env, "batch_size": 8, "group_size": 2, "max_lag": 3}
        handle = await start(world, max_steps=7, eval={}, train=train)
        await until(lambda: world.trained == [1])
        world.holds = {"trainer/0"}
        await until(lambda: "killed trainer/0" in world.events)
        ended = world.rolled_out.total()
        # The version stands at 1: batches up to 5 may be delivered, and are.
        await until(lambda: 5 in world.batches)
        assert world.rolled_out.total() > ended
        assert world.trained == [1] and world.epochs["trainer/0"] == 1, "the trainer is still down"
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded" and world.epochs["trainer/0"] == 2
        check_exactly_once(world, 7)


async def test_engine_that_is_never_verified_pauses_the_run_until_resume(temporal: Client) -> None:
    class Refusing(set[int]):
        def discard(self, version: object) -> None:
            pass

    async with world_of(temporal) as world:
        world.refuse_gate_at = Refusing({3})
        handle = await start(world)
        seen = await status(handle, "paused")
        assert "engine -1.5, trainer -1.2" in seen["paused_because"] and seen["step"] == 2
        assert world.serving == 0
        await until(lambda: world.executing == 0)
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
        # Whoever takes this would continue as new after it once more.
        await change(handle, {"dispatch": {"tasks_per_minute": 6000}})
        await at_rest(handle, temporal)
        assert (await handle.describe()).run_id == executed, "it continues as new for ever"
        assert (await memo(handle))["status"] == "paused"
        await handle.signal("resume")
        assert (await handle.result())["step"] == 6


async def test_failure_while_a_pause_drains_pauses_all_the_same(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=8, eval={})
        await until(lambda: len(world.trained) >= 2)
        world.flowing.clear()
        await until(lambda: world.executing > 0)
        await handle.signal("pause", "drain")
        await status(handle, "pausing")
        failed = HostReport("env", 0, 1, "failed", detail="no such taskset", run_id=handle.id)
        await handle.signal("host_report", failed)
        world.flowing.set()
        seen = await status(handle, "paused")
        assert "no such taskset" in seen["paused_because"]
        await handle.signal("resume")
        assert (await handle.result())["step"] == 8
        assert world.trained == list(range(1, 9))


async def test_drift_raises_an_alarm_and_ends_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.mismatch_kl = {3: 0.7}
        # The next step, if it is calm, takes the alarm back.
        world.holds = {"step 4"}
        handle = await start(world, max_steps=5, checkpoint={"interval": 100})
        async with asyncio.timeout(WITHIN_S):
            while not (seen := await memo(handle)).get("alarm"):
                await asyncio.sleep(0.02)
        world.holds.clear()
        assert seen["alarm"] == "step 3: mismatch KL 0.7 is above 0.5" and seen["step"] == 3
        result = await handle.result()
        assert result["status"] == "succeeded" and result["alarm"] is None


async def test_damaged_groups_are_rolled_out_anew(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.damaged_groups = {"train/3": names.RUN_ROLLOUTS, "train/6": names.FINALIZE_GROUP}
        world.damaged_groups["train/9"] = names.SHIP_BATCH
        result = await (await start(world, max_steps=5)).result()
        assert result["status"] == "succeeded"
        # One that fails beside others is tried again alone.
        lost = {event for event in world.events if event.startswith("damaged")}
        assert lost == {"damaged train/3", "damaged train/6", "damaged train/9"}
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


FULL = "the start of this server cannot use its disk: No space left on device"


def second_epoch(handle: WorkflowHandle[Any, Any], role: Any, detail: str = "") -> HostReport:
    """Says that host 0 of `role` is starting anew; with a detail, that it cannot yet."""
    return HostReport(role, 0, 2, "starting", detail=detail, run_id=handle.id)


async def hold_host(world: World, handle: WorkflowHandle[Any, Any], role: Any) -> None:
    """Lets a host of a run wait for its disk, and the run with it."""
    await until(lambda: len(world.trained) >= 2)
    await handle.signal("host_report", second_epoch(handle, role, FULL))
    assert FULL in (await status(handle, "paused"))["paused_because"]


async def let_up(world: World, handle: WorkflowHandle[Any, Any], role: Any) -> None:
    """The server of that host comes up after all."""
    up = replace(second_epoch(handle, role), state="up", address=f"{role}/0@2")
    await handle.signal("host_report", replace(up, queue=world.queues.trainer))


@pytest.mark.long
async def test_host_that_waits_for_its_disk_holds_the_run_and_is_no_stall(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the five seconds without which a wait is not shown.
    monkeypatch.setattr(trainer, "COMES_UP_WITHIN", timedelta(seconds=4))
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=8, eval={})
        await hold_host(world, handle, "trainer")
        # It can start when a bound has all but passed, and is up only after that.
        await asyncio.sleep(16)
        assert FULL in (await status(handle, "paused"))["paused_because"]
        await handle.signal("host_report", second_epoch(handle, "trainer"))
        assert (await status(handle, "running"))["paused_because"] is None
        await asyncio.sleep(4)
        await let_up(world, handle, "trainer")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["restarts"]["trainer"] == 1
        assert sorted(set(world.trained)) == list(range(1, 9))


async def test_hold_of_a_host_outlives_continue_as_new_and_ends_with_its_wait(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, eval={})
        await hold_host(world, handle, "env")
        await at_rest(handle, temporal)
        executed = (await handle.describe()).run_id
        steps = len(world.trained) + 3
        await change(handle, {"max_steps": steps})
        async with asyncio.timeout(WITHIN_S):
            while (await handle.describe()).run_id == executed:
                await asyncio.sleep(0.1)
        await at_rest(handle, temporal)
        seen = await handle.query("status")
        assert seen["status"] == "paused" and FULL in seen["paused_because"]
        assert len(world.trained) == steps - 3
        await let_up(world, handle, "env")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["paused_because"] is None
        assert result["step"] == steps


async def test_host_that_is_closed_for_a_pause_holds_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, eval={})
        await hold_host(world, handle, "env")
        await handle.signal("pause", "cancel")
        await until(lambda: world.serving == 0)
        async with asyncio.timeout(WITHIN_S):
            # Between two waits it names none.
            while ((await handle.query("status"))["waiting_for"] or {}).get("name") != "resume":
                await asyncio.sleep(0.1)
        assert (await handle.query("status"))["paused_because"] is None
        await handle.signal("resume")
        trained = len(world.trained)
        await until(lambda: len(world.trained) > trained)
        await handle.signal("stop")
        assert (await handle.result())["status"] == "succeeded"


@pytest.mark.nightly
async def test_of_many_works_that_are_held_one_tries_for_all(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rests, "RESTS_S", (0.5, 0.5))
    async with world_of(temporal) as world:
        world.store_fails[names.RUN_ROLLOUTS] = 10**6
        train = {"env": [{"id": "reverse-text"}], "batch_size": 32, "group_size": 2}
        dispatch = {"max_inflight_rollouts": 32}
        handle = await start(world, max_steps=2, eval={}, train=train, dispatch=dispatch)
        failed = f"no store for {names.RUN_ROLLOUTS}"
        groups = 16
        # And some more, lest a group that lags behind is at its own tries yet.
        await until(lambda: world.events.count(failed) >= groups * (1 + TRIES_OF_ITS_OWN) + 4)
        began, before = time.monotonic(), world.events.count(failed)
        await asyncio.sleep(4)
        # One try in half a second, not sixteen.
        await until(lambda: world.events.count(failed) > before)
        tries = world.events.count(failed) - before
        assert 1 <= tries <= 3 * (time.monotonic() - began)
        world.store_fails.clear()
        result = await handle.result()
        assert result["status"] == "succeeded"
        check_exactly_once(world, 2)
