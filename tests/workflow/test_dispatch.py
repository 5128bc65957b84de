"""Dispatch on a real server: permits, limits, curricula, batches, and generations that die."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError

from ratchet.activities.contracts.hosting import ENGINE_LOAD, EngineLoad
from ratchet.workflows.protocol.messages import DispatchReport
from ratchet.workflows.rules import placement
from ratchet.workflows.run import servers
from tests.workflow.running import (
    WITHIN_S,
    change,
    check_exactly_once,
    generations_of,
    memo,
    settled,
    start,
    status,
    until,
    world_of,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ENVS = [{"id": "reverse-text"}]


async def test_permit_of_a_rollout_that_ended_inside_its_activity_is_used_again(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        # Of four rollouts the last takes long: its group's other permits must not wait for it.
        world.releases = True
        world.holds = {"train/0/3"}
        train = {"env": ENVS, "batch_size": 8, "group_size": 4}
        dispatch = {"max_inflight_rollouts": 5}
        handle = await start(world, max_steps=1, train=train, eval={}, dispatch=dispatch)
        await until(lambda: world.rolled_out["train/1/0"] == 1)
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert world.most_executing == 5, "the second group ran beside the first one's last rollout"
        order = [name.split("/")[1] for name in world.started]
        assert order[:8] == ["0"] * 4 + ["1"] * 4
        check_exactly_once(world, 1)


@pytest.mark.long
async def test_limits_change_while_the_run_runs_and_bad_changes_are_refused(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.1
        world.flowing.clear()
        dispatch = {"generation_events": 120}
        handle = await start(world, max_steps=18, eval={}, dispatch=dispatch)
        await until(lambda: world.executing == 8)
        world.flowing.set()
        await until(lambda: len(world.trained) >= 2)
        lower = {"dispatch": {"max_inflight_rollouts": 2}}
        assert await change(handle, lower) == lower
        # Two batches may have been admitted by the permits of before.
        ahead = len(world.trained) + 2
        await until(lambda: len(world.trained) >= ahead)
        assert world.most_executing == 8
        world.most_executing = 0
        await until(lambda: len(world.trained) >= ahead + 4)
        assert world.most_executing == 2
        for wrong, said in [
            ({"train": {"batch_size": 4}}, "train.batch_size: cannot change"),
            ({"dispatch": {"max_inflight_rollouts": 1}}, "must hold the largest group"),
            ({"dispatch": {"tasks_per_minute": 0}}, "tasks_per_minute"),
            ({}, "nothing to change"),
        ]:
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await change(handle, wrong)
            assert said in str(refused.value.cause)
        both = {"dispatch": {"max_inflight_rollouts": 8, "tasks_per_minute": 6000}}
        assert await change(handle, both) == both
        world.flowing.clear()
        await until(lambda: world.executing == 8)
        world.flowing.set()
        await handle.result()
        assert world.most_executing == 8
        check_exactly_once(world, 18)


async def test_generation_that_dies_is_replaced_and_nothing_is_lost_or_repeated(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=8)
        await until(lambda: len(world.trained) >= 2)
        world.flowing.clear()
        await settled(handle, temporal)
        await until(lambda: world.executing == 8)
        await temporal.get_workflow_handle(f"{handle.id}/dispatch/0").terminate("by the test")
        # A change of limits makes the run speak to its generation, and find it gone.
        await change(handle, {"dispatch": {"tasks_per_minute": 6000}})
        world.flowing.set()
        result = await handle.result()
        assert result["status"] == "succeeded" and result["step"] == 8
        assert world.trained == list(range(1, 9))
        shipped = [group for step in sorted(world.batches) for group in world.batches[step]]
        assert sorted(shipped) == sorted(f"train/{n}" for n in range(32)), "each group once"
        again = await temporal.get_workflow_handle(f"{handle.id}/dispatch/1").describe()
        assert again.id.endswith("/1"), "no generation took over"


@pytest.mark.long
async def test_generations_that_keep_dying_pause_the_run_with_the_reason(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        handle = await start(world)
        for number in range(3):
            dispatch = temporal.get_workflow_handle(f"{handle.id}/dispatch/{number}")
            async with asyncio.timeout(WITHIN_S):
                while not await _runs(dispatch):
                    await asyncio.sleep(0.05)
            await dispatch.terminate("by the test")
            # A change of limits makes the run speak to its generation, and find it gone.
            await change(handle, {"dispatch": {"tasks_per_minute": 6000 + number}})
        seen = await status(handle, "paused")
        assert "3 dispatch generations in a row ended unexpectedly" in seen["paused_because"]
        world.flowing.set()
        await handle.signal("resume")
        assert (await handle.result())["step"] == 6
        assert world.trained == [1, 2, 3, 4, 5, 6]


async def test_engine_is_used_again_once_what_rested_from_it_was_given_up(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The group gets too old long before it would be sent out again.
    monkeypatch.setattr(placement, "RELOCATION_PAUSE", timedelta(hours=1))
    async with world_of(temporal) as world:
        world.lose_engine_in = {"train/2"}
        train = {"env": ENVS, "batch_size": 8, "group_size": 2, "max_off_policy_steps": 2}
        many: dict[str, Any] = {
            "inference": {"engines": 2},
            "dispatch": {"generation_events": 20000},
        }
        handle = await start(world, max_steps=1000, eval={}, train=train, **many)
        await until(lambda: "train/2.1" in world.played_by)
        assert world.events == ["engine lost in train/2"]
        (lost,), began = world.played_by["train/2"], len(world.played_by)
        await until(lambda: len(world.played_by) >= began + 20)
        assert await generations_of(temporal, handle.id) == {f"{handle.id}/dispatch/0"}
        assert [lost] in list(world.played_by.values())[began:]
        await handle.signal("stop")
        assert (await handle.result())["status"] == "succeeded"


async def test_group_that_finds_no_env_server_says_so_and_goes_back_to_the_queue(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "RELOCATION_PAUSE", timedelta(seconds=0.5))
    monkeypatch.setattr(placement, "PLACED_WITHIN", timedelta(seconds=1))
    monkeypatch.setattr(servers, "RETURN_TIMEOUT", timedelta(seconds=1))
    async with world_of(temporal) as world:
        world.dead_env_epochs = {1}
        handle = await start(world, max_steps=2, eval={})
        await until(lambda: world.epochs["env/0"] == 1)
        world.holds = {"env/0"}
        generation = temporal.get_workflow_handle(f"{handle.id}/dispatch/0")
        await until(lambda: "env lost in train/0" in world.events)
        async with asyncio.timeout(WITHIN_S):
            while True:
                sent = [report async for report in reports(generation, temporal)]
                back = {group.group for report in sent for group in report.groups}
                if "train/0" in back:
                    break
                await asyncio.sleep(0.2)
        said = {report.waiting_for for report in sent}
        assert any(text.startswith("an engine and an env server for train/") for text in said)
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded"
        check_exactly_once(world, 2)
        shipped = {group for groups in world.batches.values() for group in groups}
        assert "train/0" in shipped, "it goes on under its name"
        *_, last = [report async for report in reports(generation, temporal)]
        assert "env server" not in last.waiting_for, "once it was there, nobody waits for it"


async def reports(generation: Any, client: Client) -> AsyncIterator[DispatchReport]:
    """What a generation has reported."""
    async for event in generation.fetch_history_events():
        sent = event.signal_external_workflow_execution_initiated_event_attributes
        if sent.signal_name == "dispatch_report":
            (report,) = await client.data_converter.decode(sent.input.payloads, [DispatchReport])
            yield report


@pytest.mark.long
async def test_groups_that_end_at_once_are_reported_by_the_hundred(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        train = {"env": ENVS, "batch_size": 300, "group_size": 2}
        dispatch = {"max_inflight_rollouts": 300}
        handle = await start(world, max_steps=1, eval={}, train=train, dispatch=dispatch)
        # A worker plays no more groups at a time; the others are scheduled.
        await until(lambda: world.executing >= 180)
        await handle.signal("pause", "cancel")
        await until(lambda: world.serving == 0)
        generation = temporal.get_workflow_handle(f"{handle.id}/dispatch/0")
        sent = [report async for report in reports(generation, temporal)]
        assert [report.seq for report in sent] == list(range(len(sent)))
        assert max(len(report.groups) for report in sent) == 100
        ahead = {group.group for report in sent for group in report.groups}
        assert len(ahead) == sum(len(report.groups) for report in sent)
        full = next(k for k, report in enumerate(sent) if len(report.groups) == 100)
        for report in sent[full:]:
            ahead -= {group.group for group in report.groups}
            assert ahead <= set(report.outstanding), "what is not reported yet is outstanding"
        # An activity learns that it is cancelled with a heartbeat, and would else end well.
        await until(lambda: world.executing == 0)
        world.flowing.set()
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 1)


async def test_small_eval_groups_share_activities_and_go_on_alone_where_one_fails(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.lose_engine_in = {"eval/0-0/reverse-text/2"}
        world.unfinalized = {"eval/0-0/reverse-text/9"}
        evals = {"env": ENVS, "num_examples": 12, "group_size": 2}
        dispatch = {"max_inflight_rollouts": 24}
        handle = await start(world, max_steps=1, eval=evals, dispatch=dispatch)
        result = await handle.result()
        assert result["status"] == "succeeded"
        groups = [f"eval/0-0/reverse-text/{n}" for n in range(12)]
        assert world.together[:2] == [groups[:8], groups[8:]], "sixteen rollouts an activity"
        assert "engine lost in eval/0-0/reverse-text/2" in world.events
        assert not world.unfinalized
        assert {name.rpartition("/")[0] for name in world.rolled_out} >= set(groups)
        check_exactly_once(world, 1)
        dispatch_of = temporal.get_workflow_handle(f"{handle.id}/dispatch/0")
        delivered = [g.group async for r in reports(dispatch_of, temporal) for g in r.groups]
        assert sorted(g for g in delivered if g.startswith("eval/0-0/")) == sorted(groups)


async def _runs(handle: Any) -> bool:
    from temporalio.service import RPCError

    try:
        return bool((await handle.describe()).status == 1)
    except RPCError:
        return False


async def test_pools_choose_the_examples_and_gates_keep_groups_from_training(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        curriculum = {
            "sampler": {"type": "difficulty_pool"},
            "gates": [{"type": "advantage_range", "reject_min": 0.0, "reject_max": 0.0}],
        }
        world.flat_groups = {"train/1", "train/2"}
        train = {"env": [{**ENVS[0], "curriculum": curriculum}], "batch_size": 8, "group_size": 2}
        handle = await start(world, max_steps=5, train=train, dispatch={"generation_events": 120})
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert world.trained == list(range(1, 6))
        shipped = {group for groups in world.batches.values() for group in groups}
        assert shipped == {f"train/{n}" for n in range(22)} - world.flat_groups
        examples = [example for env, example in world.examples if env.startswith("train/")]
        assert sorted(examples) != sorted(set(range(5000)))[: len(examples)]
        pools = [key for key in world.metrics[5] if key.startswith("curriculum/")]
        assert len(pools) == 6
        normal = world.metrics[5]["curriculum/reverse-text/pool/normal"]
        assert 0.0 < normal <= 24 / 5000, "groups of mean reward 0.5 are of normal difficulty"


async def test_batch_of_tokens_ships_with_the_group_that_reaches_them(temporal: Client) -> None:
    async with world_of(temporal) as world:
        # Groups ship 16 tokens, every third one 8.
        world.trainable_of = lambda group: 1 if int(group.split("/")[1]) % 3 == 0 else 2
        train = {"env": ENVS, "token_batch_size": 40, "group_size": 2}
        dispatch = {"max_inflight_rollouts": 4}
        handle = await start(world, max_steps=6, train=train, eval={}, dispatch=dispatch)
        result = await handle.result()
        assert result["status"] == "succeeded" and world.trained == list(range(1, 7))
        for groups in world.batches.values():
            tokens = [8 * world.trainable_of(group) for group in groups]
            assert sum(tokens) >= 40 > sum(tokens[:-1])


async def test_backfill_ships_full_batches_of_what_post_batch_filters_leave(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.trainable_of = lambda group: int(group.split("/")[1]) % 3
        train = {"env": ENVS, "batch_size": 8, "group_size": 2, "backfill": True}
        result = await (await start(world, max_steps=4, train=train, eval={})).result()
        assert result["status"] == "succeeded" and world.trained == list(range(1, 5))
        for groups in world.batches.values():
            counts = [world.trainable_of(group) for group in groups]
            assert sum(counts) >= 8 > sum(counts[:-1]) and all(counts)


async def test_a_limit_that_is_raised_ends_the_wait_for_the_old_one(temporal: Client) -> None:
    async with world_of(temporal) as world:
        dispatch = {"tasks_per_minute": 1, "burst": 8}
        handle = await start(world, max_steps=2, eval={}, dispatch=dispatch)
        # The next group may start a minute later.
        await until(lambda: len(world.order) >= 1 and world.executing == 0)
        waited = time.monotonic()
        # Still not at once: the generation is to look again before it wanted to.
        await change(handle, {"dispatch": {"tasks_per_minute": 60}})
        assert (await handle.result())["status"] == "succeeded"
        assert time.monotonic() - waited < 40
        dispatch = temporal.get_workflow_handle(f"{handle.id}/dispatch/0")
        rests = [
            event.timer_started_event_attributes.start_to_fire_timeout.ToTimedelta()
            async for event in dispatch.fetch_history_events()
            if event.user_metadata.summary.data.startswith(b'"rate limit')
        ]
        assert max(rests).total_seconds() > 50, "it was to wait for longer than it took"


@pytest.mark.parametrize("permits", [8, "auto"])
async def test_engines_alone_report_load_where_permits_follow_it(
    temporal: Client, permits: int | str
) -> None:
    async with world_of(temporal) as world:
        dispatch = {"max_inflight_rollouts": permits}
        handle = await start(world, max_steps=1, eval={}, dispatch=dispatch)
        await handle.result()
        told = {}
        for host in world.epochs:
            history = await temporal.get_workflow_handle(f"{handle.id}/host/{host}").fetch_history()
            (given,) = history.events[0].workflow_execution_started_event_attributes.input.payloads
            told[host] = json.loads(given.data)["host"].get("report_load", False)
        assert told == {host: host == "engine/0" and permits == "auto" for host in world.epochs}
        assert len(told) >= 3


@pytest.mark.nightly
async def test_auto_permits_follow_the_load_that_engines_report(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s = 0.3
        world.flowing.clear()
        bounds = {"initial": 4, "max_inflight": 64}
        dispatch = {"max_inflight_rollouts": "auto", "concurrency": bounds, "burst": 64}
        handle = await start(world, max_steps=1000, eval={}, dispatch=dispatch)
        await until(lambda: world.executing == 4)
        world.flowing.set()
        await until(lambda: len(world.trained) >= 1)
        assert world.most_executing == 4
        idle = EngineLoad(0, 1, 0.1, 4, 0, 0, 100_000, 1000)
        async with asyncio.timeout(WITHIN_S):
            while world.most_executing <= 4:
                await handle.signal(ENGINE_LOAD, idle)
                await asyncio.sleep(1)
        world.flowing.clear()
        await settled(handle, temporal)
        peak = world.executing
        assert peak > 4
        # What comes too early for a poll changes nothing; an engine that is busy says so again.
        busy = EngineLoad(0, 1, 0.95, 4, 0, 0, 100_000, 1000)
        async with asyncio.timeout(WITHIN_S):
            while world.executing >= peak:
                await handle.signal(ENGINE_LOAD, busy)
                await asyncio.sleep(1)
        await until(lambda: any("cancelled train/" in event for event in world.events))
        world.flowing.set()
        await handle.signal("stop")
        await handle.result()
        assert (await memo(handle))["status"] == "succeeded"
        shipped = [group for groups in world.batches.values() for group in groups]
        assert len(shipped) == len(set(shipped))
