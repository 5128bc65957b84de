"""Names on the wire: activities, task queues, error types. Activities are called by these names."""

from dataclasses import dataclass

# Activities, by the room that carries them out.
CHECK_ENVS = "check_envs"
CHECK_MODEL = "check_model"
CHECK_ALGORITHMS = "check_algorithms"
PREPARE_POLICY = "prepare_policy"
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
"""The trainer process is gone or holds another state than the input names."""
NO_SPACE = "NoSpace"
"""The store's disk is too full for what is to be written."""
GATE_FAILED = "GateFailed"
"""An engine's canary log-probabilities differ from the trainer's."""


@dataclass(frozen=True)
class Queues:
    """Task queue of each worker role."""

    orchestrator: str = "ratchet-orchestrator"
    rollout: str = "ratchet-rollout"
    trainer: str = "ratchet-trainer"
    inference: str = "ratchet-inference"
    env: str = "ratchet-env"

    @staticmethod
    def prefixed(prefix: str) -> "Queues":
        """Queues `<prefix>-<role>`, so that several stacks can share one namespace."""
        roles = ("orchestrator", "rollout", "trainer", "inference", "env")
        return Queues(*(f"{prefix}-{role}" for role in roles))
