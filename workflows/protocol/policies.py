"""Time-outs and retry policies of every activity, in one place."""

from datetime import timedelta
from typing import Any

from temporalio.common import RetryPolicy

HEARTBEAT = timedelta(seconds=10)
"""An activity or server that is silent this long counts as lost."""

LIGHT = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=30,
    non_retryable_error_types=["PayloadsTooLarge"],
)
"""Short, idempotent store work: ridden out for about five minutes."""

ROLLOUTS = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=10),
    maximum_attempts=30,
    non_retryable_error_types=["PayloadsTooLarge"],
)
"""A group's rollouts: finished ones are kept over attempts. Workers may die under a group as often
as under a host.
"""

ONCE = RetryPolicy(maximum_attempts=1)
"""Trainer work: a failure is answered by the workflow, which knows what to reload."""

FOREVER = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=["PayloadsTooLarge"],
)
"""Hosts: a server is restarted for as long as its run lives. Rests do not grow, since attempts are
those of a whole life; servers that keep dying put the run to rest.
"""

PREFLIGHT_TIMEOUT = timedelta(seconds=90)
STORE_TIMEOUT = timedelta(minutes=5)
STORE_WORK: dict[str, Any] = {
    "start_to_close_timeout": STORE_TIMEOUT,
    "heartbeat_timeout": HEARTBEAT,
    "retry_policy": LIGHT,
}
"""Options of short work on the store; a worker that died with it is noticed by its silence."""
FROZEN_QUEUE = timedelta(hours=6)
"""How long rollouts may wait for a frozen model that plays few at once."""
SCORING: dict[str, Any] = {**STORE_WORK, "start_to_close_timeout": timedelta(hours=6)}
"""Options of finalizing a group, which may ask a busy model about every rollout."""
SYNC_TIMEOUT = timedelta(minutes=12)
STEP_TIMEOUT = timedelta(hours=6)
PREPARE_TIMEOUT = timedelta(hours=2)
HOST_LIFETIME = timedelta(days=3650)
RETURN_TIMEOUT = timedelta(seconds=25)
"""How long a lost server may take to be started again by itself: a heartbeat and the retry."""

QUEUE_TIMEOUT = timedelta(seconds=20)
"""How long a task for one particular process may wait before that process counts as lost."""

RESTS_S = (2.0, 300.0)
"""The shortest and the longest rest before another try."""
REST_SHARE = 1 / 8
"""The part of its past length by which a rest may make a trouble longer."""


def rest_after(seconds: float) -> float:
    """Seconds until what has failed for `seconds` is tried again."""
    shortest, longest = RESTS_S
    return min(max(seconds * REST_SHARE, shortest), longest)
