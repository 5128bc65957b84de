"""A double of everything outside the workflows: quick activities that remember what they did.

The workflows, the server and the wire are real. Faults are switched on by test, and every one
leaves a mark in `events`, so that a test can tell that it happened.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput, CheckProblem, CheckResult
from ratchet.activities.contracts.hosting import DescribeInput, HostInput, HostReport
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import (
    BatchResult,
    EvalResult,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    LoadTasksInput,
    Released,
    RunRolloutsInput,
    RunRolloutsResult,
    ShipBatchInput,
)
from ratchet.activities.contracts.training import (
    CheckpointResult,
    LoadTrainerInput,
    LoadTrainerResult,
    PolicyResult,
    PreparePolicyInput,
    RestoreInput,
    RestoreResult,
    SaveCheckpointInput,
    SaveConfigInput,
    StepRecord,
    SyncInput,
    SyncResult,
    TrainStepInput,
    TrainStepResult,
    adapter_name,
    base_of,
    label_of,
    push_label,
)
from ratchet.activities.hosting.liveness import LivenessActivities

PUSH_SECONDS = {"receive": 0.125, "load": 0.25, "pause": 0.5, "verify": 1.0}
"""What every push reports."""


def ref(key: str) -> ArtifactRef:
    """A reference to nothing."""
    return ArtifactRef(key, f"{abs(hash(key)):064x}"[:64], 1, key)


def step_of(ref: ArtifactRef) -> int:
    """The step of a batch or checkpoint: of 'batch/6', and of '…/batches/step-00000006.parquet'."""
    name = ref.key.rpartition("/")[2]
    return int(name.removeprefix("step-").removesuffix(".parquet"))


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Stubborn(set[int]):
    """Forgets nothing."""

    def discard(self, value: object) -> None:
        """Leaves `value` in the set."""


class TrainGroups(set[str]):
    """Every train group."""

    def __contains__(self, group: object) -> bool:
        return str(group).startswith("train/")


@dataclass
class World:
    """What the doubles did and which faults they are to show.

    Rollouts end only while `flowing` is set: a test that cancels some clears it first, so that no
    rollout can end before its cancellation arrives. `holds` keeps single ones from ending, batches
    from being trained, pushes from ending, servers from coming up and the policy from being
    prepared: it has beginnings of their names, like 'train/0/3', 'step 4', 'push 4', 'trainer/0' or
    'policy'.

    As engines do, a push labels all that is sampled from then on, also where its gate refuses it:
    `labels` are the engines' present ones, `sampled` those of the tokens of groups. `played_by` are
    the engines that groups were sent to, and `playing` what they play now.
    """

    client: Client
    queues: Queues
    rollout_s: float = 0.02
    push_s: float = 0.0
    flowing: asyncio.Event = field(default_factory=_set)
    holds: set[str] = field(default_factory=set)
    problems: list[CheckProblem] = field(default_factory=list)
    tasks_loaded: list[tuple[str, list[str]]] = field(default_factory=list)
    """The runs whose tasks were loaded, and which of their servers were up by then."""
    unloaded: str = ""
    """Why tasks cannot be loaded before rollouts need them."""
    train_examples: int = 5000
    cores: int = 0
    rolled_out: Counter[str] = field(default_factory=Counter)
    examples: Counter[tuple[str, int]] = field(default_factory=Counter)
    example_of: dict[str, tuple[str, int]] = field(default_factory=dict)
    executing: int = 0
    serving: int = 0
    loaded: list[int] = field(default_factory=list)
    most_executing: int = 0
    trained: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    recorded: list[int] = field(default_factory=list)
    pinged: list[str] = field(default_factory=list)
    evals: list[FinalizeEvalInput] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    shipped: set[tuple[str, int]] = field(default_factory=set)
    checkpoints: list[int] = field(default_factory=list)
    pushes: list[SyncInput] = field(default_factory=list)
    adapters: bool = False
    named: dict[str, set[str]] = field(default_factory=dict)
    epochs: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    trainer_step: int = -1
    trainer_epoch: int = -1
    no_memory: dict[int, int] = field(default_factory=dict)
    """How often the trainer runs out of memory at a step."""
    lose_trainer_at: set[int] = field(default_factory=set)
    refuse_gate_at: set[int] = field(default_factory=set)
    lose_engine_in: set[str] = field(default_factory=set)
    dead_env_epochs: set[int] = field(default_factory=set)
    fail_group: set[str] = field(default_factory=set)
    slow_groups: set[str] = field(default_factory=set)
    empty_ships: int = 0
    trainable: dict[int, int] = field(default_factory=dict)
    """Rollouts that train of the batch of a step; of others all do."""
    unusual_rewards: dict[str, tuple[float, float]] = field(default_factory=dict)
    eval_examples: int = 5000
    eval_error: str = ""
    group_error: str = ""
    credit_error: str = ""
    """What the user's algorithm raises for every train group."""
    refused_steps: set[int] = field(default_factory=set)
    broken_saves: bool = False
    broken_ships: set[int] = field(default_factory=set)
    releases: bool = False
    flat_groups: set[str] = field(default_factory=set)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    scoring_s: dict[int, float] = field(default_factory=dict)
    """Seconds that the slowest group of a step's batch was scored."""
    started: list[str] = field(default_factory=list)
    trainable_of: Callable[[str], int] | None = None
    order: list[str] = field(default_factory=list)
    finalized_alone: list[str] = field(default_factory=list)
    """Groups that were finalized by an activity of their own."""
    restored: list[bool] = field(default_factory=list)
    servers: dict[str, asyncio.Event] = field(default_factory=dict)
    store_fails: Counter[str] = field(default_factory=Counter)
    damaged: set[int] = field(default_factory=set)
    mismatch_kl: dict[int, float] = field(default_factory=dict)
    damaged_groups: dict[str, str] = field(default_factory=dict)
    saved: dict[str, dict[int, str]] = field(default_factory=dict)
    configs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    revisions: dict[int, int] = field(default_factory=dict)
    needed: dict[int, list[int]] = field(default_factory=dict)
    other_bits: set[int] = field(default_factory=set)
    labels: dict[int, str] = field(default_factory=dict)
    unverified: str = ""
    """What engines say that they cannot compare."""
    refused: set[str] = field(default_factory=set)
    sampled: dict[str, set[str]] = field(default_factory=dict)
    playing: dict[int, list[str]] = field(default_factory=dict)
    played_by: dict[str, list[int]] = field(default_factory=dict)
    together: list[list[str]] = field(default_factory=list)
    """Groups that activities ran side by side."""
    committed: set[str] = field(default_factory=set)
    """Groups that ended in such an activity which failed, or did not finalize them: they are
    adopted, and not run again.
    """
    unfinalized: set[str] = field(default_factory=set)
    """Groups that are not finalized with their rollouts, once."""

    def _store(self, work: str) -> None:
        """Fails as a store does, as often as `store_fails` says for this work."""
        if self.store_fails[work] > 0:
            self.store_fails[work] -= 1
            self.events.append(f"no store for {work}")
            text = f"write of {work}: No space left on device"
            raise ApplicationError(text, type=names.STORE_FAILED, non_retryable=True)

    def _read(self, work: str, groups: list[str]) -> None:
        """Fails where one of the groups is damaged, if it is `work` that finds it."""
        for group in groups:
            if self.damaged_groups.get(group) == work:
                self.events.append(f"damaged {group}")
                text = f"runs/r/groups/{group}.json does not match its sha256"
                raise ApplicationError(text, type=names.CORRUPT, non_retryable=True)

    async def _let_go(self, name: str) -> None:
        """Waits while the test holds `name`."""
        while any(name.startswith(held) for held in self.holds):
            activity.heartbeat()
            await asyncio.sleep(0.02)

    # -- preflight and start ----------------------------------------------------------------

    @activity.defn(name=names.CHECK_ENVS)
    async def check_envs(self, arg: CheckInput) -> CheckResult:
        self._store(names.CHECK_ENVS)
        await self._let_go("check")
        train = {f"train/{env['name']}": self.train_examples for env in arg.config["train"]["env"]}
        evals = {f"eval/{env['name']}": self.eval_examples for env in arg.config["eval"]["env"]}
        return CheckResult(self.problems, {**train, **evals}, cores=self.cores)

    @activity.defn(name=names.CHECK_MODEL)
    async def check_model(self, arg: CheckInput) -> CheckResult:
        self.restored.append(arg.restored)
        return CheckResult()

    @activity.defn(name=names.PREPARE_POLICY)
    async def prepare_policy(self, arg: PreparePolicyInput) -> PolicyResult:
        await self._let_go("policy")
        return PolicyResult(ref("weights/v0"), 1, "test")

    @activity.defn(name=names.HOST_SERVER)
    async def host_server(self, host: HostInput) -> None:
        epoch = host.epoch_base + activity.info().attempt
        run = self.client.get_workflow_handle(names.workflow_of(host.run_id))
        lost = self.servers.setdefault(host.host_id, asyncio.Event())
        lost.clear()
        await self._let_go(host.host_id)
        self.epochs[host.host_id] += 1
        report = HostReport(
            host.role,
            host.index,
            epoch,
            "up",
            f"{host.host_id}@{epoch}",
            host.queue,
            f"m{epoch}",
            run_id=host.run_id,
        )
        await run.signal("host_report", report)
        beat = asyncio.create_task(self._beat())
        self.serving += 1
        try:
            await lost.wait()
        finally:
            self.serving -= 1
            beat.cancel()
        down = HostReport(
            host.role,
            host.index,
            epoch,
            "down",
            detail="killed by the test",
            run_id=host.run_id,
        )
        await run.signal("host_report", down)
        raise ApplicationError("server lost", type="ServerLost")

    async def _beat(self) -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(1)

    def kill(self, host_id: str) -> None:
        """Loses a server."""
        self.events.append(f"killed {host_id}")
        self.servers[host_id].set()

    # -- rollouts ---------------------------------------------------------------------------

    @activity.defn(name=names.LOAD_TASKS)
    async def load_tasks(self, arg: LoadTasksInput) -> None:
        up = [host for host in self.epochs if not host.startswith("env/")]
        self.tasks_loaded.append((arg.run_id, up))
        if self.unloaded:
            raise ApplicationError(self.unloaded, type=names.BAD_INPUT, non_retryable=True)

    @activity.defn(name=names.RUN_ROLLOUTS)
    async def run_rollouts(self, arg: RunRolloutsInput) -> RunRolloutsResult:
        groups = arg.of_each()
        run = self._run_group
        if len(groups) > 1:
            self.together.append([one.work.group for one in groups])
            run = self._run_beside
        runs = map(run, groups)
        results: list[RunRolloutsResult] = []
        for outcome in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return replace(results[0], more=[result.finalized for result in results[1:]])

    async def _run_beside(self, arg: RunRolloutsInput) -> RunRolloutsResult:
        """Whatever becomes of the shared activity, one of its own adopts a group that ended."""
        result = await self._run_group(arg)
        self.committed.add(arg.work.group)
        return result

    async def _run_group(self, arg: RunRolloutsInput) -> RunRolloutsResult:
        work, engine, count = arg.work, arg.engine.index, len(arg.indexes)
        if work.group in self.committed:
            return RunRolloutsResult(work.group, count, 0, count * 4, self._finalized_too(arg))
        self.played_by.setdefault(work.group, []).append(engine)
        if work.group in self.lose_engine_in:
            self.lose_engine_in.discard(work.group)
            self.events.append(f"engine lost in {work.group}")
            raise ApplicationError("gone", type=names.ENGINE_LOST, non_retryable=True)
        if int(arg.env_address.rpartition("@")[2]) in self.dead_env_epochs:
            self.events.append(f"env lost in {work.group}")
            raise ApplicationError("gone", type=names.ENV_LOST, non_retryable=True)
        self._store(names.RUN_ROLLOUTS)
        self._read(names.RUN_ROLLOUTS, [work.group])
        if work.group in self.slow_groups:
            self.events.append(f"slow {work.group}")
        # A run that began elsewhere has engines whose push this world has not seen.
        label = self.labels.get(engine, push_label(arg.engine.version, 0, 0))
        label = label_of(arg.engine.model) or label
        self.named.setdefault(work.group, set()).add(arg.engine.model)
        self.sampled.setdefault(work.group, set()).add(label)
        self.playing.setdefault(engine, []).append(work.group)
        try:
            await self._run_all(arg)
        except asyncio.CancelledError:
            self.events.append(f"cancelled {work.group}")
            raise
        finally:
            self.playing[engine].remove(work.group)
        if work.group in self.fail_group:
            self.events.append(f"failed {work.group}")
            raise ApplicationError("broken reward", type="TaskError", non_retryable=True)
        for index in arg.indexes:
            self.rolled_out[f"{work.group}/{index}"] += 1
        return RunRolloutsResult(work.group, count, 0, count * 4, self._finalized_too(arg))

    def _finalized_too(self, arg: RunRolloutsInput) -> GroupResult | None:
        """The group, if it was to be finalized with its rollouts and nothing is to fail in that."""
        fails = self.store_fails[names.FINALIZE_GROUP] > 0 or self._has_no_credit(arg.work)
        damaged = self.damaged_groups.get(arg.work.group) == names.FINALIZE_GROUP
        if arg.finalize_from is None or fails or damaged:
            return None
        if arg.work.group in self.unfinalized:
            self.unfinalized.discard(arg.work.group)
            return None
        return self._finalized(arg.work, arg.finalize_from)

    async def _run_all(self, arg: RunRolloutsInput) -> None:
        """Every rollout for its own time; those that end before others are told to Dispatch."""
        group, ended = arg.work.group, 0

        async def one(index: int) -> None:
            nonlocal ended
            self.executing += 1
            self.most_executing = max(self.most_executing, self.executing)
            self.started.append(f"{group}/{index}")
            try:
                slow = group in self.slow_groups
                await asyncio.sleep(3600 if slow else self.rollout_s_of(group, index))
                await self.flowing.wait()
                await self._let_go(f"{group}/{index}")
            finally:
                self.executing -= 1
            ended += 1
            if self.releases and ended < len(arg.indexes):
                dispatch = self.client.get_workflow_handle(activity.info().workflow_id or "")
                released = Released({f"{group}/{arg.first}": ended})
                await dispatch.signal(names.RELEASED, released)

        beat = asyncio.create_task(self._beat())
        try:
            await asyncio.gather(*(one(index) for index in arg.indexes))
        finally:
            beat.cancel()

    def rollout_s_of(self, group: str, index: int) -> float:
        """Seconds that a rollout takes."""
        return self.rollout_s

    @activity.defn(name=names.FINALIZE_GROUP)
    async def finalize_group(self, arg: FinalizeGroupInput) -> GroupResult:
        self._store(names.FINALIZE_GROUP)
        self._read(names.FINALIZE_GROUP, [arg.work.group])
        if self._has_no_credit(arg.work):
            self.events.append(f"no credit for {arg.work.group}")
            raise ApplicationError(self.credit_error, type=names.BAD_INPUT, non_retryable=True)
        self.finalized_alone.append(arg.work.group)
        return self._finalized(arg.work, arg.version, arg.lost)

    def _has_no_credit(self, work: GroupWork) -> bool:
        return bool(self.credit_error) and work.kind == "train"

    def _finalized(self, work: GroupWork, version: int, lost: str = "") -> GroupResult:
        labels = self.sampled.get(work.group, set())
        example = (f"{work.kind}/{work.env}", work.example)
        self.example_of[work.group] = example
        if not labels & self.refused:
            self.examples[example] += 1
        self.order.append(work.group)
        error = lost or (self.group_error if work.kind == "train" else "")
        survivors = 0 if error else work.size
        trainable = self.trainable_of(work.group) if self.trainable_of else survivors
        return GroupResult(
            work.group,
            work.kind,
            work.env,
            ref(work.group),
            work.size,
            survivors,
            work.size - survivors,
            0.5,
            survivors,
            trainable * 8,
            version,
            sorted(labels),
            error,
            errors={"TaskError": work.size} if error and not lost else {},
            trainable=trainable,
            advantage_range=(0.0, 0.0) if work.group in self.flat_groups else (-0.5, 0.5),
        )

    @activity.defn(name=names.FINALIZE_EVAL)
    async def finalize_eval(self, arg: FinalizeEvalInput) -> EvalResult:
        self.evals.append(arg)
        count = arg.num_examples * arg.group_size
        told = EvalResult(arg.epoch, arg.env, arg.step, 0.5, count, 0, (arg.step, arg.step))
        if not self.eval_error:
            return told
        return replace(told, reward_mean=None, errored=count, error=self.eval_error, alike=True)

    @activity.defn(name=names.SHIP_BATCH)
    async def ship_batch(self, arg: ShipBatchInput) -> BatchResult:
        self._store(names.SHIP_BATCH)
        self._read(names.SHIP_BATCH, arg.groups)
        if arg.step in self.broken_ships:
            self.events.append(f"batch {arg.step} was refused")
            text = "the digest is another"
            raise ApplicationError(text, type=names.CORRUPT, non_retryable=True)
        labels = {label for group in arg.groups for label in self.sampled.get(group, ())}
        assert not labels & self.refused, "a batch with tokens of refused weights was shipped"
        # Another attempt of a run ships batches of its own after the checkpoint.
        assert (arg.run_id, arg.step) not in self.shipped, "a batch was shipped twice"
        if self.empty_ships:
            self.empty_ships -= 1
            self.events.append(f"batch {arg.step} was empty")
            metrics, unusual = {"reward/all/mean": 0.5}, self.unusual_rewards
            return BatchResult(None, 0, 0, 0, metrics, unusual_rewards=unusual)
        self.shipped.add((arg.run_id, arg.step))
        self.batches[arg.step] = arg.groups
        metrics = {"reward/all/mean": 0.5, "time/scoring": self.scoring_s.get(arg.step, 0.0)}
        rollouts = self.trainable.get(arg.step, 8)
        batch = ref(f"batch/{arg.step}")
        return BatchResult(batch, 8, 64, rollouts, metrics, unusual_rewards=self.unusual_rewards)

    # -- trainer ----------------------------------------------------------------------------

    @activity.defn(name=names.LOAD_TRAINER)
    async def load_trainer(self, arg: LoadTrainerInput) -> LoadTrainerResult:
        step = step_of(arg.checkpoint) if arg.checkpoint else 0
        if step in self.damaged:
            self.events.append(f"damaged {step}")
            text = f"checkpoint of step {step} does not match its sha256"
            raise ApplicationError(text, type=names.CORRUPT, non_retryable=True)
        self.trainer_step, self.trainer_epoch = step, arg.trainer.epoch
        self.loaded.append(step)
        return LoadTrainerResult(step)

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, arg: TrainStepInput) -> TrainStepResult:
        await self._let_go(f"step {arg.step}")
        if self.no_memory.get(arg.step):
            self.no_memory[arg.step] -= 1
            self.kill("trainer/0")
            text = f"{names.OUT_OF_MEMORY} (CUDA): set trainer.micro_batch_tokens"
            raise ApplicationError(text, type=names.TRAINER_LOST, non_retryable=True)
        if arg.step in self.lose_trainer_at:
            self.lose_trainer_at.discard(arg.step)
            self.kill("trainer/0")
            raise ApplicationError("gone", type=names.TRAINER_LOST, non_retryable=True)
        if arg.step in self.refused_steps:
            text = f"loss is nan at step {arg.step}"
            raise ApplicationError(text, type=names.BAD_INPUT, non_retryable=True)
        assert arg.trainer.epoch == self.trainer_epoch and arg.step == self.trainer_step + 1
        assert step_of(arg.batch) == arg.step
        self._store(names.TRAIN_STEP)
        self.trainer_step = arg.step
        self.revisions[arg.step] = arg.revision
        self.needed[arg.step] = arg.needed
        self.order.append(f"step {arg.step}")
        again = arg.step in self.trained
        (self.replayed if again else self.trained).append(arg.step)
        bits = "of another machine" if again and arg.step in self.other_bits else ""
        metrics = {"loss": 0.1, "mismatch_kl": self.mismatch_kl.get(arg.step, 0.001)}
        return TrainStepResult(arg.step, ref(f"weights/v{arg.step}{bits}"), metrics)

    @activity.defn(name=names.SAVE_CHECKPOINT)
    async def save_checkpoint(self, arg: SaveCheckpointInput) -> CheckpointResult:
        assert arg.step == self.trainer_step
        self._store(names.SAVE_CHECKPOINT)
        if self.broken_saves:
            raise ApplicationError("no checkpoint", type=names.CORRUPT, non_retryable=True)
        self.checkpoints.append(arg.step)
        self.saved.setdefault(arg.run_id, {})[arg.step] = arg.run_state
        return CheckpointResult(arg.step, ref(f"checkpoint/{arg.step}"))

    @activity.defn(name=names.SYNC_WEIGHTS)
    async def sync_weights(self, arg: SyncInput) -> SyncResult:
        self.pushes.append(arg)
        label = self.labels[arg.engine_index] = push_label(arg.version, arg.push, 0)
        # Rollouts keep the adapter that they named.
        adapter = adapter_name(base_of(arg.model), label) if self.adapters and arg.version else ""
        for group in () if adapter else self.playing.get(arg.engine_index, ()):
            self.sampled[group].add(label)
        await asyncio.sleep(self.push_s)
        await self._let_go(f"push {arg.version} to {arg.engine_index}")
        if arg.version in self.refuse_gate_at:
            self.refused.add(label)
            self.refuse_gate_at.discard(arg.version)
            self.events.append(f"gate refused v{arg.version}")
            text = "canary token 3: engine -1.5, trainer -1.2"
            raise ApplicationError(text, label, type=names.GATE_FAILED, non_retryable=True)
        return SyncResult(
            arg.version,
            label,
            1e-6,
            unverified=self.unverified,
            model=adapter,
            seconds=PUSH_SECONDS,
        )

    @activity.defn(name=names.RECORD_STEP)
    async def record_step(self, record: StepRecord) -> None:
        self._store(names.RECORD_STEP)
        self.recorded.append(record.step)
        self.pinged.append(record.heartbeat_url or record.heartbeat_var)
        self.metrics[record.step] = record.metrics

    @activity.defn(name=names.SAVE_CONFIG)
    async def save_config(self, arg: SaveConfigInput) -> None:
        self.configs[arg.run_id, arg.revision] = arg.config

    @activity.defn(name=names.RESTORE_RUN)
    async def restore_run(self, arg: RestoreInput) -> RestoreResult:
        self.events.append("restoring")
        await self._let_go("restore")
        saved = self.saved[arg.source]
        step = max(saved) if arg.step is None else arg.step
        self.events.append(f"restored {arg.source} at {step}")
        checkpoint = CheckpointResult(step, ref(f"checkpoint/{step}"))
        return RestoreResult(checkpoint, ref(f"weights/v{step}"), json.loads(saved[step]))

    @activity.defn(name=names.IS_RUNNING)
    async def is_running(self, arg: DescribeInput) -> bool:
        self.events.append(f"looked at {arg.workflow_id.rpartition('/')[2]}")
        return await LivenessActivities(self.client).is_running(arg)

    def activities(self) -> list[Any]:
        """All doubles."""
        from ratchet.worker.roles import activities_of

        return activities_of(self)
