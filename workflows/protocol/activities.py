"""The activities that workflows call: for each its types, its time-outs and retries, and its role.

A workflow calls a descriptor: `await SHIP_BATCH(input, queues, summary)`. Invariant: a descriptor's
types and role are those of the activity that a worker registers under its name.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Literal, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput, CheckResult
from ratchet.activities.contracts.hosting import DescribeInput, HostInput
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import WorkerRole
from ratchet.activities.contracts.rollouts import (
    BatchResult,
    EvalResult,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupResult,
    LoadTasksInput,
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
)

HEARTBEAT = timedelta(seconds=10)
"""An activity or server that is silent this long counts as lost."""
TAKEN_WITHIN = timedelta(seconds=15)
"""How long work for one particular process may wait in its queue."""
RETURN_TIMEOUT = timedelta(seconds=25)
"""How long the restart of a lost server may take: a heartbeat and the retry."""

RIDDEN_OUT = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=30,
    non_retryable_error_types=["PayloadsTooLarge"],
)
"""Idempotent work that keeps what it has done: trouble of about five minutes is ridden out. Workers
may die under a group as often as under a host.
"""
ONCE = RetryPolicy(maximum_attempts=1)
"""Trainer work: the workflow handles failures, since it knows what to reload."""
FOREVER = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=["PayloadsTooLarge"],
)
"""Hosts: a server is restarted for as long as its run lives. Waits do not grow, since attempts span
the whole life of the run; servers that keep dying pause the run.
"""

Input = TypeVar("Input")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Policy:
    """How long one attempt may take, how it is retried, and how long it may wait for a worker.

    Only work for one particular process limits that wait: silence means that the process is lost.
    """

    timeout: timedelta
    retry: RetryPolicy
    queue_timeout: timedelta | None = None
    cancellation: workflow.ActivityCancellationType = workflow.ActivityCancellationType.TRY_CANCEL


STORE = Policy(timedelta(minutes=5), RIDDEN_OUT)
"""Short work on the store."""
CHECK = Policy(timedelta(seconds=90), RIDDEN_OUT)
PREPARE = Policy(timedelta(hours=2), RIDDEN_OUT)
SCORING = Policy(timedelta(hours=6), RIDDEN_OUT)
"""Work that may query a busy model about every rollout."""
AHEAD = Policy(timedelta(hours=2), ONCE, TAKEN_WITHIN)
"""What rollouts would do themselves, later."""
TRAINER = Policy(timedelta(hours=6), ONCE, TAKEN_WITHIN)
PUSH = Policy(timedelta(minutes=12), ONCE, TAKEN_WITHIN)
HOST = Policy(
    timedelta(days=3650),
    FOREVER,
    cancellation=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
)


@dataclass(frozen=True)
class Activity(Generic[Input, Result]):
    """An activity by its name on the wire. `role` is that of the workers that register it; '': all
    roles that host servers.
    """

    name: str
    input: type[Input]
    result: type[Result]
    policy: Policy
    role: WorkerRole | Literal[""]

    def start(
        self, input: Input, at: Queues | str, summary: str, *, timeout: timedelta | None = None
    ) -> workflow.ActivityHandle[Result]:
        """Schedules the activity on the queue of its role, or on queue `at`. `timeout` is for an
        attempt whose length depends on the input.
        """
        return workflow.start_activity(
            self.name,
            input,
            task_queue=at if isinstance(at, str) else at.of(self.role),
            result_type=self.result,
            schedule_to_start_timeout=self.policy.queue_timeout,
            start_to_close_timeout=timeout or self.policy.timeout,
            heartbeat_timeout=HEARTBEAT,
            retry_policy=self.policy.retry,
            cancellation_type=self.policy.cancellation,
            summary=summary,
        )

    async def __call__(
        self, input: Input, at: Queues | str, summary: str, *, timeout: timedelta | None = None
    ) -> Result:
        """The activity's result; it is scheduled once this is awaited. Raises ActivityError."""
        return await self.start(input, at, summary, timeout=timeout)


CHECK_ENVS = Activity(names.CHECK_ENVS, CheckInput, CheckResult, CHECK, "env")
CHECK_MODEL = Activity(names.CHECK_MODEL, CheckInput, CheckResult, CHECK, "trainer")
CHECK_ALGORITHMS = Activity(names.CHECK_ALGORITHMS, CheckInput, CheckResult, CHECK, "rollout")
PREPARE_POLICY = Activity(
    names.PREPARE_POLICY, PreparePolicyInput, PolicyResult, PREPARE, "trainer"
)
RESTORE_RUN = Activity(names.RESTORE_RUN, RestoreInput, RestoreResult, PREPARE, "orchestrator")
LOAD_TASKS = Activity(names.LOAD_TASKS, LoadTasksInput, type(None), AHEAD, "rollout")
RUN_ROLLOUTS = Activity(names.RUN_ROLLOUTS, RunRolloutsInput, RunRolloutsResult, SCORING, "rollout")
FINALIZE_GROUP = Activity(names.FINALIZE_GROUP, FinalizeGroupInput, GroupResult, SCORING, "rollout")
FINALIZE_EVAL = Activity(names.FINALIZE_EVAL, FinalizeEvalInput, EvalResult, STORE, "rollout")
SHIP_BATCH = Activity(names.SHIP_BATCH, ShipBatchInput, BatchResult, STORE, "rollout")
LOAD_TRAINER = Activity(names.LOAD_TRAINER, LoadTrainerInput, LoadTrainerResult, TRAINER, "trainer")
TRAIN_STEP = Activity(names.TRAIN_STEP, TrainStepInput, TrainStepResult, TRAINER, "trainer")
SAVE_CHECKPOINT = Activity(
    names.SAVE_CHECKPOINT, SaveCheckpointInput, CheckpointResult, TRAINER, "trainer"
)
SYNC_WEIGHTS = Activity(names.SYNC_WEIGHTS, SyncInput, SyncResult, PUSH, "inference")
HOST_SERVER = Activity(names.HOST_SERVER, HostInput, type(None), HOST, "")
RECORD_STEP = Activity(names.RECORD_STEP, StepRecord, type(None), STORE, "orchestrator")
SAVE_CONFIG = Activity(names.SAVE_CONFIG, SaveConfigInput, type(None), STORE, "orchestrator")
IS_RUNNING = Activity(names.IS_RUNNING, DescribeInput, bool, STORE, "orchestrator")
