"""The kinds of run whose histories are recorded, each with what its histories must say. How each
is played is in `plays.py`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import ENGINE_LOAD
from tests.workflow import plays
from tests.workflow.stage import Stage


@dataclass(frozen=True)
class Kind:
    """One kind of run: how it is played, and what its histories must say."""

    play: Callable[[Stage], Awaitable[None]]
    shows: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.play.__name__


# The longest comes first, so that the others are played beside it.
KINDS: tuple[Kind, ...] = (
    Kind(plays.silent_generation, (names.IS_RUNNING, '"state":"open","groups":[]')),
    Kind(plays.auto_permits, (ENGINE_LOAD, '"cancelled":"overload"')),
    Kind(plays.hand_overs, ("EXECUTION_CONTINUED_AS_NEW", '"state":"tail"', '"generation":2')),
    Kind(plays.plain, (names.FINALIZE_EVAL, names.SAVE_CHECKPOINT, "all 3 steps are done")),
    Kind(plays.two_envs_in_parts, ("train/reverse-retry", '"first":3,"last":4')),
    Kind(
        plays.finalized_with_rollouts,
        (
            "finalize-with-rollouts",
            '"finalized":{"group":"train/0"',
            '"finalized":null',
            names.FINALIZE_GROUP,
            '"cancelled":"damaged"',
        ),
    ),
    Kind(
        plays.groups_together,
        (
            "eval-groups-together",
            '"more":[{"group":"eval/0-0/reverse-text/1"',
            '"more":[null,',
            names.ENGINE_LOST,
        ),
    ),
    Kind(
        plays.train_groups_together,
        ("train-groups-together", '"more":[{"group":"train/', names.ENGINE_LOST),
    ),
    Kind(
        plays.reports_held_back,
        ("holds-reports-back", "more groups to report", '"missing":8,"heard":'),
    ),
    Kind(plays.loads_tasks, ("loads-tasks-while-servers-start", names.LOAD_TASKS)),
    Kind(plays.own_env_servers, ("own-env-servers", "eval/reverse-text", "host/env/1")),
    Kind(plays.released_permits, (names.RELEASED, '"ended":{"train/0/0":')),
    Kind(plays.lost_trainer, (names.TRAINER_LOST, "TIMER_STARTED")),
    Kind(plays.refused_gate, (names.GATE_FAILED, "ACTIVITY_TASK_CANCEL_REQUESTED")),
    Kind(
        plays.overlapped_push,
        ("overlapped-pushes", names.TRAINER_LOST, names.GATE_FAILED, "stopped at step 3"),
    ),
    Kind(plays.killed_engine, (names.ENGINE_LOST, "relocate train/5", "killed by the test")),
    Kind(plays.rest_cut_short, ("forgive-after-cancelled-rest", "relocate train/2", "train/2.1")),
    Kind(plays.lost_env, (names.ENV_LOST, '"role":"env"', "ACTIVITY_TASK_CANCEL_REQUESTED")),
    Kind(
        plays.no_place,
        ("bounded-wait-for-a-place", '"cancelled":"pause"', "an env server for train/0"),
    ),
    Kind(plays.stale_group, ('"cancelled":"stale"', "train/1.1")),
    Kind(
        plays.surplus_groups, ('"cancelled":"pause"', '"train_over":true', "all 1 steps are done")
    ),
    Kind(plays.failed_groups, ("TaskError: broken reward",)),
    Kind(plays.empty_batch, ('"ref":null',)),
    Kind(plays.evals_alone, ('"overlap":false', '"train_limit":0')),
    Kind(
        plays.evaluation,
        (
            '"max_steps":0',
            "EXECUTION_CONTINUED_AS_NEW",
            '"pause":"cancel"',
            "run evaluation to end",
            "all evals are done",
        ),
    ),
    Kind(plays.stopped, ("no_such_signal", "stopped at step")),
    Kind(plays.requests_in_a_step, ("shows-requests", '"status":"pausing"', '"status":"stopping"')),
    Kind(plays.drained_pause, ("host/engine/0.1", '"pause":"drain"')),
    Kind(plays.cancelled_pause, ('"cancelled":"pause"', '"pause":"cancel"')),
    Kind(plays.triggered_evals, ("trigger_eval", "TriggerEval")),
    Kind(plays.changed_config, ("EXECUTION_UPDATE_COMPLETED", "rate limit")),
    Kind(plays.dead_generation, ("EXECUTION_TERMINATED", "the last report of generation 0")),
    Kind(plays.dying_env, ("dies-in-vain", "failed 5 times in a row", '"status":"paused"')),
    Kind(plays.dying_generations, ("3 dispatch generations in a row", "host/engine/0.1")),
    Kind(plays.refused_config, ("no such taskset", "EXECUTION_FAILED")),
    Kind(plays.gate_never_passes, ("engine -1.5, trainer -1.2", "stopped at step")),
    Kind(plays.gate_passes_at_last, ("engine -1.5, trainer -1.2", "all 3 steps are done")),
    Kind(plays.no_first_gate, ("engine -1.5, trainer -1.2", "EXECUTION_FAILED")),
    # The wait is named in other words than when it was recorded.
    Kind(plays.failing_store, ("No space left on device", "the store to ", " for batch 1")),
    Kind(plays.damaged, ('"cancelled":"damaged"', "train/5.1", names.CORRUPT)),
    Kind(plays.restored, (names.RESTORE_RUN, "restored+2/dispatch/", '"kind":"resume"')),
    Kind(plays.revised, (names.SAVE_CONFIG, '"revision":2', '"shares":[{')),
    Kind(
        plays.failing_credit, ("fails-between-steps", '"checkpoint":{"step":2}', "EXECUTION_FAILED")
    ),
    Kind(plays.failing_env, ("groups in a row had no rollout to train on",)),
    Kind(
        plays.stays_empty,
        ("pause-when-batches-stay-empty", "2 batches in a row", '"status":"paused"'),
    ),
    Kind(plays.failing_eval, ("4 of 4 failed: TaskError: boom", '"status":"paused"')),
    Kind(plays.difficulty_pools, ('"type":"difficulty_pool"', '"draws":{"0":')),
    Kind(plays.token_batches, ('"token_batch_size":40', '"backfill":true')),
    Kind(plays.cancelled, ("EXECUTION_CANCELED",)),
    Kind(plays.preflight, (names.CHECK_ALGORITHMS, "BadInput", "no such taskset")),
)
