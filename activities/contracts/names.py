"""Names on the wire: activities, task queues, error types. Activities are called by these names."""

from dataclasses import dataclass, fields
from datetime import timedelta

LOOPBACK = ("localhost", "127.0.0.1", "::1")
RPC_TIMEOUT = timedelta(seconds=5)
"""Of a call to a workflow that is made again, or that may be lost."""

# Activities, by the room that implements them.
CHECK_ENVS = "check_envs"
CHECK_MODEL = "check_model"
CHECK_ALGORITHMS = "check_algorithms"
PREPARE_POLICY = "prepare_policy"
LOAD_TASKS = "load_tasks"
RUN_ROLLOUTS = "run_rollouts"
FINALIZE_GROUP = "finalize_group"
FINALIZE_EVAL = "finalize_eval"
SHIP_BATCH = "ship_batch"
LOAD_TRAINER = "load_trainer"
TRAIN_STEP = "train_step"
SAVE_CHECKPOINT = "save_checkpoint"
SYNC_WEIGHTS = "sync_weights"
HOST_SERVER = "host_server"
RECORD_STEP = "record_step"
IS_RUNNING = "is_running"
SAVE_CONFIG = "save_config"
RESTORE_RUN = "restore_run"

MEMO_KEY = "ratchet"
"""The key of the run's description in its memo."""

WARM_START_ENVS = ("reverse-text", "reverse-retry", "reverse-shown")
"""Ids of the environments that the default policy can be warm-started on."""
SHIPPED_ENVS = (*WARM_START_ENVS, "reasoning-gym-tasks", "gsm8k-tasks")
"""Ids of the environments that ship."""

# Signals that activities send.
RELEASED = "released"

# ApplicationError types that a workflow branches on.
BAD_INPUT = "BadInput"
"""The user's config cannot work; never retried."""
ENGINE_LOST = "EngineLost"
"""The engine named in the input is gone or not the one that was verified."""
ENV_LOST = "EnvLost"
"""The env server named in the input is gone."""
TRAINER_LOST = "TrainerLost"
"""The trainer process is gone or holds a state other than the input names."""
OUT_OF_MEMORY = "the trainer ran out of memory"
"""Part of the message of a TRAINER_LOST whose trainer ran out of memory."""
NO_SPACE = "NoSpace"
"""The store's disk has too little space for a write."""
STORE_FAILED = "StoreFailed"
"""The artifact store or a scratch disk cannot be read or written now, or this worker is too old for
the data; the message says which.
"""
CORRUPT = "CorruptArtifact"
"""A committed artifact is damaged or gone; the message says which and where."""
GATE_FAILED = "GateFailed"
"""An engine's canary log-probabilities differ from the trainer's."""


ATTEMPT_MARK = "+"


def workflow_of(run_id: str) -> str:
    """The workflow of a run: `run_id` without its attempt.

    A run resumed after its end continues as '<run>+2', '<run>+3', …: its artifacts, hosts and
    generations carry that id, so that leftovers of an earlier attempt cannot touch any of them. Its
    workflow's id, which is the run's for everyone outside, stays '<run>'.
    """
    return run_id.partition(ATTEMPT_MARK)[0]


def attempt_of(run_id: str) -> int:
    """Which attempt of its run `run_id` is, from 1."""
    return int(run_id.partition(ATTEMPT_MARK)[2] or 1)


def attempt_id(run: str, attempt: int) -> str:
    """The id of attempt `attempt` (from 1) of a run."""
    return run if attempt == 1 else f"{run}{ATTEMPT_MARK}{attempt}"


@dataclass(frozen=True)
class Queues:
    """Task queue of each worker role. Runs hold these; `of` knows those of later roles, too."""

    orchestrator: str = "ratchet-orchestrator"
    rollout: str = "ratchet-rollout"
    trainer: str = "ratchet-trainer"
    inference: str = "ratchet-inference"
    env: str = "ratchet-env"

    @staticmethod
    def prefixed(prefix: str) -> "Queues":
        """Queues `<prefix>-<role>`, so that several stacks can share one namespace."""
        return Queues(**{field.name: f"{prefix}-{field.name}" for field in fields(Queues)})

    def of(self, role: str) -> str:
        """The queue of a worker role."""
        prefix = self.orchestrator.removesuffix("-orchestrator")
        queue: str = getattr(self, role, f"{prefix}-{role}")
        return queue


LOG_VIEW = "ratchet_view"
LOG_LINE = "ratchet_line"
"""Attributes of log records of workflows: a view of the pipeline at that moment, for the process to
show, and a line for the run's log.
"""
