"""How each kind of run whose histories are recorded is played.

All are as short as their kind allows. The doubles and their faults are those of `world.py`; every
run has an id and a queue of its own, named after its kind.
"""

import asyncio

from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckProblem
from ratchet.activities.contracts.hosting import ENGINE_LOAD, EngineLoad
from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.contracts.training import RestoreInput
from ratchet.workflows.dispatch import SIGN_OF_LIFE
from ratchet.workflows.protocol.messages import TRAINING_RUN, RunInput
from ratchet.workflows.rules.fleet import MAX_DOWNS
from ratchet.workflows.rules.placement import PLACED_WITHIN
from tests.workflow.running import config, memo, until
from tests.workflow.stage import Handle, Stage
from tests.workflow.world import Stubborn, TrainGroups

TEXT = {"id": "reverse-text"}
RETRY = {"id": "reverse-retry", "group_size": 4}


async def failed(handle: Handle) -> None:
    """Waits for a run that must fail."""
    try:
        await handle.result()
    except WorkflowFailureError:
        return
    raise AssertionError(f"{handle.id} was to fail, and succeeded")


async def plain(stage: Stage) -> None:
    """Evals and checkpoints on the way, nothing else."""
    await (await stage.start(max_steps=3)).result()


async def two_envs_in_parts(stage: Stage) -> None:
    """Two envs by their ratios, with one rollout an activity."""
    train = {"env": [{**TEXT, "ratio": 3}, {**RETRY, "ratio": 1}], "batch_size": 8}
    dispatch = {"rollouts_per_activity": 1, "max_inflight_rollouts": 6}
    train["group_size"] = 2
    await (await stage.start(max_steps=3, train=train, dispatch=dispatch)).result()


async def finalized_with_rollouts(stage: Stage) -> None:
    """Groups are finalized by the activity that rolls them out, except those whose scoring depends
    on the state of the run, and one that fails there.
    """
    stage.damaged_groups = {"train/2": names.FINALIZE_GROUP}
    envs = [TEXT, {"id": "reverse-retry", "algo": {"type": "rae"}}]
    train = {"env": envs, "batch_size": 8, "group_size": 2}
    await (await stage.start(max_steps=2, train=train)).result()
    assert stage.finalized_alone and not any("eval" in name for name in stage.finalized_alone)


async def groups_together(stage: Stage) -> None:
    """Small eval groups share activities; where one loses its engine its groups go on alone, and so
    does one that fails when it is finalized there.
    """
    stage.lose_engine_in = {"eval/0-0/reverse-text/2"}
    stage.unfinalized = {"eval/0-0/reverse-text/9"}
    evals = {"env": [TEXT], "num_examples": 12, "group_size": 2}
    permits = {"max_inflight_rollouts": 24}
    await (await stage.start(max_steps=1, eval=evals, dispatch=permits)).result()
    assert len(stage.together) > 1


async def train_groups_together(stage: Stage) -> None:
    """Short train groups share activities; where one loses its engine its groups go on alone."""
    stage.lose_engine_in = {"train/13"}
    train = {"env": [TEXT], "batch_size": 16, "group_size": 2}
    await (await stage.start(max_steps=3, train=train)).result()
    assert any(group.startswith("train/") for groups in stage.together for group in groups)


async def reports_held_back(stage: Stage) -> None:
    """Groups are reported once they fill a batch; beside one that takes long, after a while."""
    stage.rollout_s_of = lambda group, index: 7.0 if group == "train/1" else 0.02  # type: ignore[method-assign]
    await (await stage.start(max_steps=3)).result()


async def loads_tasks(stage: Stage) -> None:
    """Tasks are loaded while the engine starts."""
    stage.holds = {"engine/0"}
    handle = await stage.start(max_steps=1)
    await until(lambda: bool(stage.tasks_loaded))
    stage.holds = set()
    await handle.result()


async def own_env_servers(stage: Stage) -> None:
    """Train and eval of one env differ in args, so that each has a server of its own."""
    train = {"env": [TEXT], "batch_size": 8, "group_size": 2}
    evals = {"env": [{**TEXT, "args": {"seed": 1}}], "num_examples": 4}
    await (await stage.start(max_steps=1, train=train, eval=evals)).result()


async def released_permits(stage: Stage) -> None:
    """Rollouts that end before the others of their activity free their permits."""
    stage.releases = True
    stage.rollout_s_of = lambda group, index: 0.5 if index % 3 == 2 else 0.02  # type: ignore[method-assign]
    train = {"env": [TEXT], "batch_size": 8, "group_size": 4}
    dispatch = {"rollouts_per_activity": 3, "max_inflight_rollouts": 5}
    await (await stage.start(max_steps=2, train=train, dispatch=dispatch)).result()


async def hand_overs(stage: Stage) -> None:
    """Generations hand over and the run continues as new."""
    await (await stage.start(max_steps=6, dispatch={"generation_events": 100})).result()


async def lost_trainer(stage: Stage) -> None:
    """A trainer is lost; the next one trains the batches since the checkpoint again."""
    stage.lose_trainer_at = {4}
    await (await stage.start(max_steps=4)).result()
    assert stage.replayed == [3]


async def refused_gate(stage: Stage) -> None:
    """An engine fails the gate and is restarted."""
    stage.refuse_gate_at = {2}
    await (await stage.start(max_steps=3)).result()


async def overlapped_push(stage: Stage) -> None:
    """The next batch trains while weights are pushed; the trainer is lost, the gate refuses."""
    stage.holds = {"push 2", "step 2"}
    stage.lose_trainer_at, stage.refuse_gate_at = {3}, {2}
    handle = await stage.start(max_steps=1000, checkpoint={"interval": 10})
    await until(lambda: 3 in stage.batches)
    stage.holds = {"push 2"}
    await stage.trained_to(3)
    await handle.signal("stop")
    stage.holds = set()
    await handle.result()


async def requests_in_a_step(stage: Stage) -> None:
    """Requests that have to wait for the end of a step are shown at once."""
    stage.holds = {"step 2"}
    handle = await stage.start(max_steps=1000)
    await until(lambda: 2 in stage.batches)
    for verb, shown in (("pause", "pausing"), ("resume", "running"), ("stop", "stopping")):
        await handle.signal(verb)
        async with asyncio.timeout(60):
            while (await memo(handle)).get("status") != shown:
                await asyncio.sleep(0.05)
    stage.holds = set()
    await handle.result()


async def killed_engine(stage: Stage) -> None:
    """An engine dies, and a group finds it gone."""
    stage.lose_engine_in = {"train/5"}
    handle = await stage.start(max_steps=4)
    await stage.trained_to(2)
    stage.kill("engine/0")
    await handle.result()


async def rest_cut_short(stage: Stage) -> None:
    """A group is given up while it rests from an engine that it lost; others use that engine."""
    stage.lose_engine_in = {"train/2"}
    train = {"env": [TEXT], "batch_size": 8, "group_size": 2, "max_off_policy_steps": 1}
    engines = {"engines": 2}
    handle = await stage.start(max_steps=1000, eval={}, train=train, inference=engines)
    await until(lambda: "train/2.1" in stage.played_by)
    lost, began = stage.played_by["train/2"], len(stage.played_by)
    await until(lambda: lost in list(stage.played_by.values())[began:])
    await handle.signal("stop")
    await handle.result()


async def lost_env(stage: Stage) -> None:
    """Only rollouts find an env server gone; the run has it restarted."""
    stage.dead_env_epochs = {1}
    await (await stage.start(max_steps=2)).result()
    assert stage.epochs["env/0"] == 2


async def no_place(stage: Stage) -> None:
    """Rollouts find their env server gone, and it does not come back for long."""
    stage.dead_env_epochs = {1}
    handle = await stage.start(max_steps=2, eval={})
    await until(lambda: stage.epochs["env/0"] == 1)
    stage.holds = {"env/0"}
    await asyncio.sleep(PLACED_WITHIN.total_seconds() + 30)
    stage.holds = set()
    await handle.result()


async def stale_group(stage: Stage) -> None:
    """A group gets too old in flight and is rolled out again."""
    stage.slow_groups = {"train/1"}
    train = {"env": [TEXT], "batch_size": 8, "group_size": 2, "max_off_policy_steps": 2}
    await (await stage.start(max_steps=4, train=train)).result()


async def surplus_groups(stage: Stage) -> None:
    """The last batch ships while a train group is in flight, which is given up."""
    stage.slow_groups = {"train/0"}
    train = {"env": [TEXT, {**RETRY, "group_size": 8}], "batch_size": 8, "group_size": 2}
    dispatch = {"max_inflight_rollouts": 12}
    await (await stage.start(max_steps=1, train=train, dispatch=dispatch)).result()


async def failed_groups(stage: Stage) -> None:
    """Groups fail and are made up for."""
    stage.fail_group = {"train/1", "train/5"}
    await (await stage.start(max_steps=3)).result()


async def empty_batch(stage: Stage) -> None:
    """Filters leave nothing of a batch."""
    stage.empty_ships = 1
    await (await stage.start(max_steps=2)).result()


async def evals_alone(stage: Stage) -> None:
    """Training stands still for evals."""
    evals = {"env": [TEXT], "interval": 1, "num_examples": 6, "overlap": False}
    await (await stage.start(max_steps=3, eval=evals)).result()


async def evaluation(stage: Stage) -> None:
    """Nothing is trained: a long evaluation, paused on its way, and another one after it."""
    evals = {"env": [TEXT], "num_examples": 40, "group_size": 2}
    permits = {"max_inflight_rollouts": 2, "generation_events": 100}
    alone = {"max_steps": 0, "train": {"env": []}, "eval": evals, "dispatch": permits}
    stage.rollout_s = 0.1
    handle = await stage.start(**alone)
    second = f"{stage.kind}-2"
    short = config(**{**alone, "eval": {**evals, "num_examples": 2}, "after": stage.kind})
    arg = RunInput(second, short, stage.queues, created_at="2026-01-01")
    after = await stage._start(TRAINING_RUN, arg, second)
    await until(lambda: stage.executing > 0)
    await handle.signal("pause", "cancel")
    await until(lambda: stage.serving == 0)
    await handle.signal("resume")
    await handle.result()
    await after.result()


async def stopped(stage: Stage) -> None:
    """A stop with a reason, and a signal that nobody knows."""
    handle = await stage.start(max_steps=1000)
    await stage.trained_to(2)
    await handle.signal("no_such_signal", {"any": 1})
    await handle.signal("stop", {"reason": "enough"})
    await handle.result()


async def drained_pause(stage: Stage) -> None:
    """A pause that lets what is in flight end, and a second run of all servers after it."""
    handle = await stage.start(max_steps=4)
    await stage.trained_to(2)
    await handle.signal("pause", {"reason": "the machine is needed"})
    await until(lambda: stage.serving == 0)
    await handle.signal("resume")
    await handle.result()


async def cancelled_pause(stage: Stage) -> None:
    """A pause that gives up what is in flight; it is rolled out again."""
    stage.rollout_s = 0.3
    handle = await stage.start(max_steps=3)
    await stage.trained_to(1)
    await until(lambda: stage.executing > 0)
    await handle.signal("pause", "cancel")
    await until(lambda: stage.serving == 0)
    await handle.signal("resume")
    await handle.result()


async def triggered_evals(stage: Stage) -> None:
    """Evals by signal, of known and unknown envs."""
    handle = await stage.start(max_steps=1000, eval={**config()["eval"], "interval": 1000})
    await stage.trained_to(1)
    await handle.signal("trigger_eval")
    await handle.signal("TriggerEval", {"envs": ["reverse-text", "other"]})
    await until(lambda: len(stage.evals) == 3)
    await handle.signal("stop")
    await handle.result()


async def changed_config(stage: Stage) -> None:
    """Limits change by update; a change that cannot be is refused."""
    stage.rollout_s = 0.1
    handle = await stage.start(max_steps=6)
    await stage.trained_to(1)
    await handle.execute_update("change_config", {"dispatch": {"max_inflight_rollouts": 2}})
    await stage.trained_to(3)
    try:
        await handle.execute_update("change_config", {"train": {"batch_size": 4}})
    except WorkflowUpdateFailedError:
        both = {"dispatch": {"max_inflight_rollouts": 8, "tasks_per_minute": 1200}}
        await handle.execute_update("change_config", both)
    await handle.result()


async def dead_generation(stage: Stage) -> None:
    """A generation dies, and the run finds out by speaking to it."""
    stage.rollout_s = 0.2
    handle = await stage.start(max_steps=4)
    await until(lambda: 2 in stage.trained and stage.executing > 0)
    await stage.end_generation(0)
    await handle.result()


async def silent_generation(stage: Stage) -> None:
    """A generation gives a sign of life, then dies while the run has nothing to tell it."""
    stage.rollout_s = 3600.0
    handle = await stage.start(max_steps=1, eval={})
    await until(lambda: stage.executing == 8)
    await asyncio.sleep(SIGN_OF_LIFE.total_seconds() + 5)
    await stage.end_generation(0)
    stage.rollout_s = 0.02
    # The run looks at silent generations every 150 s, and this one was heard of within the first.
    await handle.result()


async def paused(handle: Handle) -> None:
    """Waits until a run has paused itself."""
    async with asyncio.timeout(60):
        while not (
            (seen := await memo(handle)).get("status") == "paused" and seen["paused_because"]
        ):
            await asyncio.sleep(0.05)


async def dying_env(stage: Stage) -> None:
    """An env whose server is lost again and again before a group ends pauses its run."""
    stage.rollout_s = 3600.0
    handle = await stage.start(max_steps=1, eval={})
    for epoch in range(1, MAX_DOWNS + 1):
        await until(lambda epoch=epoch: stage.epochs["env/0"] == epoch and stage.executing > 0)  # type: ignore[misc]
        stage.kill("env/0")
    await paused(handle)
    stage.rollout_s = 0.02
    await handle.signal("resume")
    await handle.result()


async def dying_generations(stage: Stage) -> None:
    """Generations that keep dying pause the run."""
    stage.rollout_s = 3600.0
    handle = await stage.start(max_steps=1, eval={})
    for number in range(3):
        # Its rollouts of before may be executing still: those that begin are counted.
        begun = 8 * (number + 1)
        await until(lambda begun=begun: len(stage.started) >= begun)  # type: ignore[misc]
        await stage.end_generation(number)
        change = {"dispatch": {"tasks_per_minute": 60000 + number}}
        await handle.execute_update("change_config", change)
    await paused(handle)
    stage.rollout_s = 0.02
    await handle.signal("resume")
    await handle.result()


async def refused_config(stage: Stage) -> None:
    """The preflight finds a problem."""
    stage.problems = [CheckProblem("/train/env/0/id", "train.env.0.id", "no such taskset")]
    await failed(await stage.start())


async def gate_never_passes(stage: Stage) -> None:
    """An engine is never verified; the run fails if it has not begun, and pauses if it has."""
    stage.refuse_gate_at = Stubborn({2})
    handle = await stage.start()
    await paused(handle)
    await handle.signal("stop")
    await handle.result()


async def gate_passes_at_last(stage: Stage) -> None:
    """The run that had paused for an engine's sake goes on once the engine works."""
    stage.refuse_gate_at = Stubborn({2})
    handle = await stage.start(max_steps=3)
    await paused(handle)
    stage.refuse_gate_at = set()
    await handle.signal("resume")
    await handle.result()


async def no_first_gate(stage: Stage) -> None:
    """An engine is not verified at version 0; the run fails."""
    stage.refuse_gate_at = Stubborn({0})
    await failed(await stage.start())


async def failing_store(stage: Stage) -> None:
    """Every kind of work finds the store full for a while."""
    works = (names.RUN_ROLLOUTS, names.FINALIZE_GROUP, names.SHIP_BATCH, names.TRAIN_STEP)
    stage.store_fails.update(dict.fromkeys(works, 3))
    stage.store_fails.update({names.SAVE_CHECKPOINT: 3, names.RECORD_STEP: 2})
    await (await stage.start(max_steps=3)).result()


async def damaged(stage: Stage) -> None:
    """Groups and a checkpoint turn out to be damaged."""
    stage.damaged_groups = {"train/2": names.FINALIZE_GROUP, "train/5": names.SHIP_BATCH}
    stage.lose_trainer_at, stage.damaged = {6}, {4}
    await (await stage.start()).result()


async def restored(stage: Stage) -> None:
    """A cancelled run goes on from its last checkpoint as a second attempt, with other steps."""
    handle = await stage.start(max_steps=1000)
    await handle.signal("checkpoint")
    await stage.trained_to(5)
    await handle.cancel()
    await failed(handle)
    step = max(stage.saved[stage.kind])
    stage.trained = [n for n in stage.trained if n <= step]
    stage.batches = {n: groups for n, groups in stage.batches.items() if n <= step}
    again = attempt_id(stage.kind, 2)
    restore = RestoreInput(again, stage.kind)
    arg = RunInput(again, config(max_steps=step + 2), stage.queues, restore=restore)
    await (await stage._start(TRAINING_RUN, arg, stage.kind)).result()


async def revised(stage: Stage) -> None:
    """Ratios, learning rate and the last step change while the run runs and while it is paused."""
    train = {"env": [TEXT, {"id": "reverse-retry"}], "batch_size": 8, "group_size": 2}
    handle = await stage.start(max_steps=1000, train=train, eval={})
    await stage.trained_to(2)
    ratios = {"reverse-text": {"ratio": 3}}
    patch = {"train": {"env": ratios}, "trainer": {"optim": {"lr": 0.5}}}
    await handle.execute_update("change_config", patch)
    await stage.trained_to(len(stage.trained) + 3)
    await handle.signal("pause")
    await until(lambda: stage.serving == 0)
    await handle.execute_update("change_config", {"max_steps": len(stage.trained) + 2})
    await handle.signal("resume")
    await handle.result()


async def failing_env(stage: Stage) -> None:
    """Every group fails; the run pauses with the reason (in older builds it failed)."""
    stage.fail_group = TrainGroups()
    handle = await stage.start(eval={}, when_all_fail="continue")
    await paused(handle)
    await handle.signal("stop")
    await handle.result()


async def failing_credit(stage: Stage) -> None:
    """An algorithm raises while weights are pushed; the run ends with a checkpoint of them."""
    stage.holds = {"push 2", "train/9"}
    handle = await stage.start(max_steps=1000, eval={}, checkpoint={"interval": 100})
    await until(lambda: any(push.version == 2 for push in stage.pushes))
    await until(lambda: "train/9/1" in stage.started)
    stage.credit_error, stage.holds = "no credit", {"push 2"}
    await until(lambda: "no credit for train/9" in stage.events)
    stage.holds = set()
    await failed(handle)


async def stays_empty(stage: Stage) -> None:
    """Filters leave nothing of batches; the run pauses with the reason, and goes on when told."""
    stage.rollout_s = 0.1
    train = {"env": [TEXT], "batch_size": 8, "group_size": 2, "max_empty_batches": 2}
    handle = await stage.start(max_steps=3, train=train, eval={})
    await stage.trained_to(1)
    stage.empty_ships = 10**6
    await paused(handle)
    stage.empty_ships = 0
    await handle.signal("resume")
    await handle.result()


async def failing_eval(stage: Stage) -> None:
    """All rollouts of the first eval fail alike; the run pauses with their error."""
    stage.rollout_s, stage.eval_error = 0.1, "TaskError: boom (at env.py:12 in score)"
    handle = await stage.start(max_steps=2)
    await paused(handle)
    stage.eval_error = ""
    await handle.signal("resume")
    await handle.result()


async def difficulty_pools(stage: Stage) -> None:
    """A curriculum draws the examples, and a gate keeps groups from training."""
    curriculum = {
        "sampler": {"type": "difficulty_pool"},
        "gates": [{"type": "advantage_range", "reject_min": 0.0, "reject_max": 0.0}],
    }
    stage.flat_groups = {"train/1", "train/2"}
    train = {"env": [{**TEXT, "curriculum": curriculum}], "batch_size": 8, "group_size": 2}
    dispatch = {"generation_events": 120}
    await (await stage.start(max_steps=4, train=train, dispatch=dispatch)).result()


async def token_batches(stage: Stage) -> None:
    """Batches are counted in tokens, of what the filters leave."""
    stage.trainable_of = lambda group: int(group.split("/")[1]) % 3
    train = {"env": [TEXT], "token_batch_size": 40, "group_size": 2, "backfill": True}
    dispatch = {"max_inflight_rollouts": 4}
    await (await stage.start(max_steps=3, train=train, eval={}, dispatch=dispatch)).result()


async def auto_permits(stage: Stage) -> None:
    """Permits follow the engines' load, up and down; the youngest groups are given up."""
    stage.rollout_s = 0.5
    bounds = {"initial": 4, "max_inflight": 16}
    dispatch = {"max_inflight_rollouts": "auto", "concurrency": bounds, "burst": 16}
    handle = await stage.start(max_steps=1000, eval={}, dispatch=dispatch)
    await stage.trained_to(1)
    async with asyncio.timeout(40):
        while stage.most_executing <= 4:
            await handle.signal(ENGINE_LOAD, EngineLoad(0, 1, 0.1, 4, 0, 0, 100_000, 1000))
            await asyncio.sleep(1)
    stage.rollout_s = 3.0
    await asyncio.sleep(5)
    await handle.signal(ENGINE_LOAD, EngineLoad(0, 1, 0.95, 4, 0, 0, 100_000, 1000))
    await until(lambda: any("cancelled train/" in event for event in stage.events))
    await handle.signal("stop")
    await handle.result()


async def cancelled(stage: Stage) -> None:
    """The run is cancelled, as an operator would."""
    handle = await stage.start(max_steps=1000)
    await stage.trained_to(2)
    await handle.cancel()
    await failed(handle)


async def preflight(stage: Stage) -> None:
    """The preflight on its own: a good config, a bad one, and custom algorithms."""
    await stage.preflight("good", TEXT)
    for name in ("half", "missing"):
        algo = {"type": "custom", "function": f"credit:{name}"}
        await stage.preflight(f"custom-{name}", {**TEXT, "algo": algo})
    stage.problems = [CheckProblem("/train/env/0/id", "train.env.0.id", "no such taskset")]
    await stage.preflight("bad", TEXT)
