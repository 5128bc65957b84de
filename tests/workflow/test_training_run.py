"""TrainingRun, Dispatch and Host on a real server, with doubles for what the activities do."""

import asyncio
import uuid
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.workflowservice.v1 import SignalWorkflowExecutionRequest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from ratchet.activities.contracts.checks import CheckProblem, CheckResult
from ratchet.activities.contracts.names import Queues
from tests.workflow.running import (
    WITHIN_S,
    check_exactly_once,
    config,
    events,
    generations_of,
    memo,
    start,
    status,
    until,
    worker,
    world_of,
)
from tests.workflow.test_outages import hold_host
from tests.workflow.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_run_steps_the_policy_version_to_max_steps(temporal: Client) -> None:
    async with world_of(temporal, cached=0) as world:
        handle = await start(world)
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert (result["step"], result["policy_version"]) == (6, 6)
        check_exactly_once(world, 6)
        assert [push.version for push in world.pushes] == list(range(7))
        assert world.restored == [False]
        assert world.checkpoints == [2, 4, 6]
        assert sorted((e.step, e.num_examples) for e in world.evals) == [(0, 4), (3, 4), (6, 4)]
        assert world.needed[1] == [0], "of the eval that is open, or was the best so far"
        assert {*world.needed[5]} <= {0, 3} and 3 in world.needed[5]
        assert world.most_executing <= 8
        described = await handle.describe()
        attributes = {key.name: value for key, value in described.typed_search_attributes}
        assert attributes["RatchetStatus"] == "succeeded"
        assert attributes["RatchetStep"] == attributes["RatchetPolicyVersion"] == 6
        assert attributes["RatchetReward"] == 0.5
        assert attributes["RatchetEnv"] == "reverse-text"
        seen = await memo(handle)
        assert seen["status"] == "succeeded" and seen["finished_at"]
        assert seen["rollouts"] == {"train": 48, "eval": 12}
        assert [world.metrics[step]["progress/evals"] for step in (1, 3, 4, 6)] == [1, 1, 2, 2]


@pytest.mark.parametrize("checked_by", ["the run", "the API"])
async def test_a_run_starts_as_many_env_servers_as_the_checked_machine_has_cores_for(
    temporal: Client, checked_by: str
) -> None:
    examples = {f"{kind}/reverse-text": 100 for kind in ("train", "eval")}
    async with world_of(temporal, cached=0) as world:
        world.cores = 6
        checked = CheckResult(examples=examples, cores=6) if checked_by == "the API" else None
        dispatch = {"max_inflight_rollouts": 600}
        handle = await start(world, checked=checked, dispatch=dispatch, max_steps=2)
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 2)
        assert sorted(world.epochs) == ["engine/0", "env/0", "env/1", "env/2", "trainer/0"]


async def test_tasks_are_loaded_once_while_engines_start(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.holds = {"engine/0", "trainer/0"}
        handle = await start(world, max_steps=2)
        await until(lambda: bool(world.tasks_loaded))
        world.holds = set()
        assert (await handle.result())["status"] == "succeeded"
        assert world.tasks_loaded == [(handle.id, [])]
        check_exactly_once(world, 2)


async def test_tasks_that_cannot_be_loaded_early_are_left_to_rollouts(
    temporal: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_of(temporal) as world:
        world.holds, world.unloaded = {"engine/0"}, "the hub is away"
        handle = await start(world, max_steps=2)
        said = "tasks are loaded with the first rollouts: BadInput: the hub is away"
        await until(lambda: said in caplog.text)
        world.holds = set()
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 2)


async def test_a_step_tells_what_it_waited_for(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.scoring_s = {2: 1000.0}
        await (await start(world, max_steps=2, checkpoint={"interval": 1}, eval={})).result()
        first, second = world.metrics[1], world.metrics[2]
        assert first["time/wait_for_batch"] > 0 == first["time/scoring"]
        assert second["time/scoring"] >= 0 == second["time/wait_for_batch"], "no more than the wait"
        for step in (first, second):
            parts = ("wait_for_batch", "scoring", "train", "sync_weights")
            assert sum(step[f"time/{part}"] for part in parts) == pytest.approx(step["time/step"])
        assert "time/checkpoint" not in first and second["time/checkpoint"] > 0


async def test_hand_overs_and_continue_as_new_lose_and_repeat_nothing(temporal: Client) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=20, dispatch={"generation_events": 120})
        result = await handle.result()
        assert result["step"] == 20
        check_exactly_once(world, 20)
        first = await temporal.get_workflow_handle(
            handle.id, run_id=handle.first_execution_run_id
        ).describe()
        last = await temporal.get_workflow_handle(handle.id).describe()
        assert first.run_id != last.run_id, "the run never continued as new"
        # Generations handed over.
        assert len(await generations_of(temporal, handle.id, least=3)) >= 3


async def test_lost_trainer_replays_recorded_batches_since_the_checkpoint(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.lose_trainer_at = {4, 6}
        result = await (await start(world, checkpoint={"interval": 2})).result()
        assert result["status"] == "succeeded"
        assert world.events.count("killed trainer/0") == 2
        check_exactly_once(world, 6)
        assert world.replayed == [3, 5]
        assert result["restarts"]["trainer"] == 2
        assert [push.version for push in world.pushes] == list(range(7)), "the same bits"


@pytest.mark.parametrize("times", [1, 2])
async def test_a_trainer_without_memory_is_tried_once_more(temporal: Client, times: int) -> None:
    async with world_of(temporal) as world:
        world.no_memory = {2: times, 3: 1}
        handle = await start(world, max_steps=3, checkpoint={"interval": 1}, eval={})
        if times == 1:
            assert (await handle.result())["status"] == "succeeded"
            check_exactly_once(world, 3)
            return
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
        assert "set trainer.micro_batch_tokens" in str(failed.value.cause)
        assert world.events.count("killed trainer/0") == 2, "the second time was the last"


async def test_replay_that_makes_other_bits_is_pushed_again(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.lose_trainer_at, world.other_bits = {4}, {3}
        result = await (await start(world, max_steps=5, checkpoint={"interval": 2})).result()
        assert result["status"] == "succeeded" and world.replayed == [3]
        assert [push.version for push in world.pushes] == [0, 1, 2, 3, 3, 4, 5]
        first, again = (push.weights for push in world.pushes[3:5])
        assert first.key == "weights/v3" and again.key == "weights/v3of another machine"
        check_exactly_once(world, 5)


async def test_engine_that_fails_the_gate_is_restarted_before_it_serves(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.refuse_gate_at = {3}
        # It is in flight while the weights are pushed that are refused.
        world.holds = {"train/13/1"}
        handle = await start(world)
        await until(lambda: world.events == ["gate refused v3"])
        world.holds.clear()
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert world.events == ["gate refused v3"]
        assert world.refused < world.sampled["train/13"], "tokens of refused and of good weights"
        shipped = {group for groups in world.batches.values() for group in groups}
        assert "train/13" not in shipped and "train/13.1" in shipped
        assert world.epochs["engine/0"] == 2
        versions = [(push.engine_epoch, push.version) for push in world.pushes]
        assert versions[3:5] == [(1, 3), (1001, 3)]
        check_exactly_once(world, 6)


async def test_gate_that_never_passes_at_first_fails_the_run_with_both_numbers(
    temporal: Client,
) -> None:
    class Refusing(set[int]):
        def discard(self, version: int) -> None:
            pass

    async with world_of(temporal) as world:
        world.refuse_gate_at = Refusing({0})
        handle = await start(world)
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
        assert "engine -1.5, trainer -1.2" in str(failure.value.cause)
        seen = await memo(handle)
        assert seen["status"] == "failed"
        assert seen["error"]["code"] == "gate_failed" and seen["error"]["role"] == "inference"


async def test_killed_engine_and_lost_group_go_on_elsewhere(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.lose_engine_in = {"train/9"}
        handle = await start(world)
        await until(lambda: 2 in world.trained)
        world.kill("engine/0")
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert set(world.events) == {"engine lost in train/9", "killed engine/0"}
        assert world.epochs["engine/0"] == 2
        check_exactly_once(world, 6)


@pytest.mark.long
async def test_env_server_that_only_rollouts_find_gone_is_restarted(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.dead_env_epochs = {1}
        result = await (await start(world, max_steps=2)).result()
        assert result["status"] == "succeeded"
        assert any(event.startswith("env lost in train/") for event in world.events)
        assert world.epochs["env/0"] == 2 and result["restarts"]["env"] == 1
        check_exactly_once(world, 2)


async def test_groups_in_parts_are_finalized_once_all_their_rollouts_ended(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        train = {"env": [{"id": "reverse-text"}], "batch_size": 8, "group_size": 4}
        dispatch = {"rollouts_per_activity": 1, "max_inflight_rollouts": 3}
        world.flowing.clear()
        handle = await start(world, max_steps=3, train=train, dispatch=dispatch)
        await until(lambda: world.executing == 3)
        world.flowing.set()
        assert (await handle.result())["status"] == "succeeded"
        check_exactly_once(world, 3)
        assert sorted(world.rolled_out)[:4] == [f"eval/0-0/reverse-text/{n}/0" for n in range(4)]
        assert sum(name.startswith("train/") for name in world.rolled_out) == 24
        assert world.most_executing == 3


async def test_stale_group_is_given_up_before_the_push_and_rolled_out_anew(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.slow_groups = {"train/1"}
        envs = [{"id": "reverse-text"}]
        train = {"env": envs, "batch_size": 8, "group_size": 2, "max_off_policy_steps": 2}
        result = await (await start(world, max_steps=6, train=train)).result()
        assert result["status"] == "succeeded"
        await until(lambda: len(world.events) == 2)
        assert world.events == ["slow train/1", "cancelled train/1"]
        shipped = {group: step for step, groups in world.batches.items() for group in groups}
        assert "train/1" not in shipped and shipped["train/1.1"] >= 3
        assert world.rolled_out["train/1.1/0"] == 1 and not world.rolled_out["train/1/0"]
        check_exactly_once(world, 6)


async def test_empty_batch_is_replaced_and_ten_in_a_row_pause_the_run(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.empty_ships = 2
        result = await (await start(world, max_steps=2)).result()
        assert result["status"] == "succeeded" and len(world.events) == 2
        check_exactly_once(world, 2)
    async with world_of(temporal) as world:
        world.rollout_s = 0.1
        handle = await start(world, max_steps=4, checkpoint={"interval": 100})
        await until(lambda: 1 in world.trained)
        world.empty_ships = 10**6
        seen = await status(handle, "paused")
        assert "10 batches in a row had nothing to train on" in seen["paused_because"]
        assert "of mean reward 0.500," in seen["paused_because"]
        assert "curriculum" in seen["paused_because"] and seen["error"] is None
        assert seen["step"] >= 1 and seen["checkpoint"] == {"step": seen["step"]}
        warned = await events(world, handle, "run.warning")
        assert len(warned) == 10 and "3 in a row" in warned[2], "at each, and not at the end alone"
        world.empty_ships = 2
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded"
        assert world.trained == [1, 2, 3, 4]


async def test_empty_batches_may_be_as_many_as_the_config_says(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.empty_ships = 12
        train = {**config()["train"], "max_empty_batches": -1}
        assert (await (await start(world, max_steps=1, train=train)).result())["step"] == 1
    async with world_of(temporal) as world:
        world.empty_ships = 10**6
        train = {**config()["train"], "max_empty_batches": 2}
        handle = await start(world, max_steps=1, train=train)
        assert "2 batches in a row" in (await status(handle, "paused"))["paused_because"]
        assert len([e for e in world.events if e.endswith("was empty")]) == 2
        await handle.signal("stop")
        await handle.result()


BOOM = "TaskError: list index out of range (at env.py:12 in score)"


@pytest.mark.parametrize(("asked", "warns"), [(-1, False), (7, False), (50, True)])
async def test_an_eval_of_more_examples_than_there_are_takes_all(
    temporal: Client, asked: int, warns: bool
) -> None:
    async with world_of(temporal) as world:
        world.eval_examples = 7
        evals = {"env": [{"id": "reverse-text"}], "interval": 10, "num_examples": asked}
        handle = await start(world, max_steps=1, eval={**evals, "at_end": False})
        assert (await handle.result())["status"] == "succeeded"
        assert [(e.step, e.num_examples) for e in world.evals] == [(0, 7)]
        warned = await events(world, handle, "run.warning")
        assert len(warned) == warns and all(
            "50 examples requested, the set has 7" in w for w in warned
        )


async def test_a_first_eval_of_which_everything_fails_pauses_the_run(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.rollout_s, world.eval_error = 0.2, BOOM
        handle = await start(world, max_steps=4)
        seen = await status(handle, "paused")
        assert seen["paused_because"] == f"the first eval of reverse-text: 4 of 4 failed: {BOOM}"
        told = seen["eval"]["reverse-text"]
        assert told["reward"] is None and (told["failed"], told["of"]) == (4, 4)
        (text,) = await events(world, handle, "run.eval")
        said = "eval of reverse-text at step 0 has no reward, policy v0"
        assert text == f"{said}; 4 of 4 failed: {BOOM}"
        world.eval_error = ""
        await handle.signal("resume")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["eval"]["reverse-text"]["reward"] == 0.5
        assert world.trained == [1, 2, 3, 4]


async def test_first_groups_that_all_fail_alike_pause_the_run(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.group_error = BOOM
        handle = await start(world, max_steps=3, eval={})
        seen = await status(handle, "paused")
        assert f"rollouts so far failed: {BOOM}" in seen["paused_because"] and seen["step"] == 0
        assert 8 <= len(world.rolled_out) / 2 < 40, "after the first groups, not after ten batches"
        world.group_error = ""
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded"
        assert world.trained == [1, 2, 3]


async def test_what_becomes_of_a_run_of_which_everything_fails_is_configured(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.eval_error = world.group_error = BOOM
        handle = await start(world, max_steps=3, when_all_fail="end")
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
        assert BOOM in str(failure.value.cause)
    async with world_of(temporal) as world:
        world.eval_error = BOOM
        result = await (await start(world, max_steps=2, when_all_fail="continue")).result()
        assert result["status"] == "succeeded", "an eval that fails keeps nobody from training"


@pytest.mark.parametrize("overlap", [True, False])
async def test_training_stands_still_for_evals_only_without_overlap(
    temporal: Client, overlap: bool
) -> None:
    async with world_of(temporal) as world:
        evals = {"env": [{"id": "reverse-text"}], "interval": 2, "num_examples": 12}
        result = await (await start(world, eval={**evals, "overlap": overlap})).result()
        assert result["status"] == "succeeded" and result["rollouts"]["eval"] == 48
        during = [what for what in world.order if not what.startswith("train/")]
        steps = [n for n, what in enumerate(during) if what == "step 3"]
        done = [n for n, what in enumerate(during) if what.startswith("eval/2-")]
        assert len(done) == 12
        if not overlap:
            assert max(done) < steps[0], "step 3 began before the eval of step 2 was done"
        check_exactly_once(world, 6)


async def test_two_envs_share_a_run_by_their_ratios(temporal: Client) -> None:
    async with world_of(temporal) as world:
        envs = [
            {"id": "reverse-text", "ratio": 3},
            {"id": "reverse-retry", "ratio": 1, "group_size": 4},
        ]
        train = {"env": envs, "batch_size": 20, "group_size": 2}
        result = await (await start(world, max_steps=4, train=train)).result()
        assert result["status"] == "succeeded"
        used = [env for env, _ in world.examples if env.startswith("train/")]
        text, retry = used.count("train/reverse-text"), used.count("train/reverse-retry")
        assert retry >= 8 and abs(text - 3 * retry) <= 3, "within one cycle of the ratio"
        check_exactly_once(world, 4)


async def test_group_that_fails_is_counted_and_made_up_for(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.fail_group = {"train/1", "train/5"}
        result = await (await start(world)).result()
        assert result["status"] == "succeeded"
        # One that fails beside others is tried again alone.
        assert set(world.events) == {"failed train/1", "failed train/5"}
        check_exactly_once(world, 6)
        shipped = {group for groups in world.batches.values() for group in groups}
        assert shipped == {f"train/{n}" for n in range(26)} - world.fail_group


async def test_env_that_only_fails_pauses_the_run_with_the_reason(temporal: Client) -> None:
    class All(set[str]):
        def __contains__(self, group: object) -> bool:
            return str(group).startswith("train/")

    async with world_of(temporal) as world:
        world.fail_group = All()
        handle = await start(world)
        assert "broken reward" in (await status(handle, "paused"))["paused_because"]
        assert not world.trained
        world.fail_group = set()
        await handle.signal("resume")
        assert (await handle.result())["status"] == "succeeded", "what counts against it began anew"


async def test_preflight_problem_ends_a_queued_run_before_anything_starts(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.problems = [CheckProblem("/train/env/0/id", "train.env.0.id", "no such taskset")]
        handle = await start(world)
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        seen = await memo(handle)
        assert seen["error"]["is_user_error"] and "no such taskset" in seen["error"]["message"]
        assert not world.epochs


async def test_a_run_that_is_stopped_while_it_is_checked_waits_for_no_check(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        world.holds = {"check"}
        handle = await start(world)
        await status(handle, "queued")
        await handle.signal("stop", "enough")
        result = await handle.result()
        assert (result["status"], result["step"]) == ("succeeded", 0) and not world.epochs


PAYLOADS: list[tuple[str, Payload | None]] = [
    ("no input", None),
    ("JSON string", Payload(metadata={"encoding": b"json/plain"}, data=b'"enough"')),
    ("JSON object", Payload(metadata={"encoding": b"json/plain"}, data=b'{"reason":"enough"}')),
    ("tctl null", Payload(metadata={"encoding": b"binary/null"})),
    ("JSON null", Payload(metadata={"encoding": b"json/plain"}, data=b"null")),
    ("bytes", Payload(metadata={"encoding": b"binary/plain"}, data=b"enough")),
    ("number", Payload(metadata={"encoding": b"json/plain"}, data=b"7")),
]


async def send(handle: WorkflowHandle[Any, Any], name: str, payload: Payload | None) -> None:
    """Signals as a CLI does, with exactly this payload."""
    client = handle._client
    await client.workflow_service.signal_workflow_execution(
        SignalWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution={"workflow_id": handle.id},
            signal_name=name,
            input=Payloads(payloads=[payload] if payload is not None else []),
        ),
        retry=True,
    )


@pytest.mark.parametrize(("what", "payload"), PAYLOADS, ids=[name for name, _ in PAYLOADS])
async def test_stop_signal_with_any_payload_ends_with_a_checkpoint(
    temporal: Client, what: str, payload: Payload | None
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, checkpoint={"interval": 500})
        await until(lambda: len(world.trained) >= 2)
        await send(handle, "no_such_signal", payload)
        await send(handle, "stop", payload)
        result = await handle.result()
        assert result["status"] == "succeeded"
        assert result["end_reason"].startswith(f"stopped at step {result['step']}")
        assert world.checkpoints == [result["step"]]
        if payload is not None and b"enough" in payload.data:
            assert result["end_reason"].endswith(": enough")


async def test_a_run_without_an_end_steps_until_it_is_stopped(temporal: Client) -> None:
    async with world_of(temporal) as world:
        monitor = {"heartbeat_url": "https://h/ping"}
        handle = await start(world, max_steps=None, checkpoint={"interval": 500}, monitor=monitor)
        await until(lambda: len(world.trained) >= 3)
        assert (await handle.query("progress"))["max_steps"] is None
        await handle.execute_update("change_config", {"max_steps": 10**6})
        await until(lambda: len(world.trained) >= 5)
        await handle.execute_update("change_config", {"max_steps": None})
        seen = len(world.trained)
        await until(lambda: len(world.trained) >= seen + 2)
        await handle.signal("stop")
        result = await handle.result()
        assert result["status"] == "succeeded" and result["max_steps"] is None
        assert world.checkpoints == [result["step"]] and result["step"] >= 5
        assert world.pinged == ["https://h/ping"] * len(world.recorded)


async def test_trigger_eval_by_signal_evaluates_now_and_ignores_unknown_envs(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, eval={**config()["eval"], "interval": 1000})
        await until(lambda: len(world.trained) >= 2)
        for payload in (None, b'"reverse-text"', b'{"envs":["reverse-text","other"]}', b'"other"'):
            data = payload and Payload(metadata={"encoding": b"json/plain"}, data=payload)
            await send(handle, "trigger_eval", data or None)
        await send(handle, "TriggerEval", None)
        await until(lambda: len(world.evals) == 5)
        await handle.signal("stop")
        result = await handle.result()
        assert len(world.evals) == 5, "step 0 and the four that named a known env or none"
        assert result["rollouts"]["eval"] == 20


@pytest.mark.parametrize("spelling", ["stop", "Stop"])
async def test_a_signal_that_comes_with_the_first_task_is_read_as_any_other(
    temporal: Client, spelling: str
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, (spelling, {"reason": "enough"}))
        result = await handle.result()
        assert result["end_reason"] == "stopped at step 0: enough"


@pytest.mark.parametrize("skips", [True, False])
async def test_an_eval_requested_before_the_first_version_is_made_there_once(
    temporal: Client, skips: bool
) -> None:
    async with world_of(temporal) as world:
        evals = {**config()["eval"], "interval": 1000, "skip_first_step": skips}
        world.holds = {"policy"}
        handle = await start(world, max_steps=2, eval=evals)
        await handle.signal("trigger_eval")
        await handle.signal("trigger_eval", "reverse-text")
        world.holds.clear()
        assert (await handle.result())["status"] == "succeeded"
        assert sorted(done.step for done in world.evals) == [0, 2]


async def test_run_goes_on_after_its_worker_was_gone(temporal: Client) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    world = World(temporal, Queues(*[queue] * 5))
    first = asyncio.create_task(worker(world).run())
    handle = await start(world, max_steps=12)
    await until(lambda: len(world.trained) >= 3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.events.append("worker gone")
    before = len(world.trained)
    # The server notes that the run has heard something, and nobody is there to act on it.
    await handle.signal("checkpoint")
    async with asyncio.timeout(WITHIN_S):
        while not (await handle.describe()).raw_description.HasField("pending_workflow_task"):
            await asyncio.sleep(0.05)
    assert len(world.trained) == before < 12
    async with worker(world):
        result = await handle.result()
    assert result["status"] == "succeeded"
    assert world.trained == list(range(1, 13))


async def test_details_name_what_the_run_waits_for(temporal: Client) -> None:
    async with world_of(temporal) as world:
        world.flowing.clear()
        handle = await start(world, max_steps=1)
        await until(lambda: world.executing > 0)
        seen = await handle.query("status")
        assert seen["waiting_for"]["name"].startswith("rollouts for batch 1")
        progress = await handle.query("progress")
        assert set(progress["in_flight"]) == {"train", "eval"} and progress["step"] == 0
        assert progress["waiting_for"].startswith("rollouts for batch 1")
        assert progress["servers"]["engine-0"] == "up"
        await handle.execute_update("change_config", {"dispatch": {"tasks_per_minute": 60}})
        assert (await handle.query("config"))["dispatch"]["tasks_per_minute"] == 60
        metadata = await handle.query("__temporal_workflow_metadata")
        assert "rollouts for batch 1" in str(metadata)
        await handle.signal("stop")
        world.flowing.set()
        await handle.result()


async def test_run_that_ends_while_a_host_waits_for_its_disk_waits_for_nothing(
    temporal: Client,
) -> None:
    async with world_of(temporal) as world:
        handle = await start(world, max_steps=1000, eval={})
        await hold_host(world, handle, "env")
        await handle.cancel(reason="wrong data")
        seen = await status(handle, "cancelled")
        assert seen["paused_because"] is None and seen["end_reason"] == "wrong data"
