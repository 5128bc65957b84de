"""A run that pushes each version as an adapter of its own name: rollouts keep what they named."""

import uuid
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from ratchet.activities.contracts.training import base_of, label_of
from ratchet.configs.load import validate
from ratchet.configs.upgrades import config_document
from ratchet.workflows.protocol.messages import RunInput
from tests.workflow.running import check_exactly_once, config, world_of
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


async def start(world: World, transfer: str, **overrides: Any) -> WorkflowHandle[Any, Any]:
    """Starts a run that trains an adapter."""
    changes = {"trainer": {"lora": {}}, "inference": {"transfer": transfer}, **overrides}
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    document = config_document(validate(config(**changes)))
    return await world.client.start_workflow(
        "TrainingRun",
        RunInput(run_id, document, world.queues, created_at="2026-01-01T00:00:00Z"),
        id=run_id,
        task_queue=world.queues.orchestrator,
    )


@pytest.mark.long
async def test_rollouts_name_what_was_verified_and_keep_it(temporal: Client) -> None:
    async with world_of(temporal, cached=0) as world:
        world.adapters = True
        result = await (await start(world, "auto")).result()
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
        envs = [{"id": "reverse-text"}]
        train = {"env": envs, "batch_size": 8, "group_size": 2, "max_off_policy_steps": 3}
        await (await start(world, "adapter", train=train, eval={})).result()
        assert {label_of(name) for name in world.named["train/1"]} == {""}, "begun at version 0"
        oldest = [push.oldest for push in world.pushes]
        assert oldest[:4] == [-1, 0, 0, 0] and oldest[-1] >= 3, oldest


async def test_merged_pushes_retire_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        await (await start(world, "store", max_steps=2)).result()
        assert [push.oldest for push in world.pushes] == [None] * 3
