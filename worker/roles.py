"""Which workers make up a role. Heavy rooms are imported only by the roles that need them.

`watching` are interceptors that all workers of a role get besides their own.
"""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import Interceptor

from ratchet import __version__
from ratchet.activities.contracts.names import Queues
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import StorageFailures
from ratchet.worker.compat import Worker
from ratchet.worker.sandbox import SANDBOX
from ratchet.worker.settings import Deployment

HEARTBEATS_AT_LEAST_EVERY = timedelta(seconds=1)
STICKY_TIMEOUT = timedelta(seconds=2)
GRACE = timedelta(seconds=8)


def activities_of(*owners: object) -> list[Callable[..., Any]]:
    """The bound methods of `owners` that are activities."""
    return [
        method
        for owner in owners
        for _, method in inspect.getmembers(owner, inspect.ismethod)
        if hasattr(method, "__temporal_activity_definition")
    ]


def _worker(
    client: Client, queue: str, *owners: object, watching: Sequence[Interceptor], at_once: int
) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        activities=activities_of(*owners),
        # Only workflows are reset by it; by default the SDK hashes all modules that are loaded.
        build_id=__version__,
        interceptors=[StorageFailures(), *watching],
        max_concurrent_activities=at_once,
        max_heartbeat_throttle_interval=HEARTBEATS_AT_LEAST_EVERY,
        default_heartbeat_throttle_interval=HEARTBEATS_AT_LEAST_EVERY,
        graceful_shutdown_timeout=GRACE,
    )


def orchestrator(
    client: Client,
    ctx: WorkerContext,
    queues: Queues,
    watching: Sequence[Interceptor] = (),
    deployment: Deployment | None = None,
) -> list[Worker]:
    """Workflow tasks and light store work; no torch in this process.

    With a `deployment` the worker is one build of it.
    """
    from ratchet.activities.hosting.liveness import LivenessActivities
    from ratchet.activities.runtime.health_watch import HealthWatch
    from ratchet.activities.runtime.store_activities import StoreActivities
    from ratchet.worker.versioning import interceptors_of, options_of, workflows_of

    return [
        Worker(
            client,
            task_queue=queues.orchestrator,
            workflows=workflows_of(deployment),
            activities=activities_of(
                StoreActivities(ctx, HealthWatch(ctx.store, client)), LivenessActivities(client)
            ),
            interceptors=[StorageFailures(), *watching, *interceptors_of(deployment)],
            max_concurrent_workflow_tasks=8,
            max_concurrent_activities=32,
            workflow_runner=SANDBOX,
            sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
            graceful_shutdown_timeout=GRACE,
            **options_of(deployment),
        )
    ]


def rollout(
    client: Client, ctx: WorkerContext, queues: Queues, watching: Sequence[Interceptor] = ()
) -> list[Worker]:
    """Rollouts, group finalization, batches."""
    from ratchet.activities.rollouts.activities import RolloutActivities
    from ratchet.activities.rollouts.releases import Releases
    from ratchet.activities.scoring.check import AlgorithmActivities

    owners = (RolloutActivities(ctx, Releases(client)), AlgorithmActivities(ctx))
    return [_worker(client, queues.rollout, *owners, watching=watching, at_once=256)]


def trainer(
    client: Client, ctx: WorkerContext, queues: Queues, watching: Sequence[Interceptor] = ()
) -> list[Worker]:
    """Trainer processes, and the steps meant for those this worker owns."""
    from ratchet.activities.hosting.activities import HostActivities
    from ratchet.activities.training.activities import TrainerActivities
    from ratchet.activities.training.server import trainer_spec

    training = TrainerActivities(ctx)
    host = HostActivities(ctx, client, {"trainer": trainer_spec})
    return [
        _worker(client, queues.trainer, training, host, watching=watching, at_once=256),
        _worker(client, ctx.own_queue, training, watching=watching, at_once=4),
    ]


def inference(
    client: Client, ctx: WorkerContext, queues: Queues, watching: Sequence[Interceptor] = ()
) -> list[Worker]:
    """vLLM engines, and the pushes meant for those this worker owns."""
    from ratchet.activities.hosting.activities import HostActivities
    from ratchet.activities.inference.activities import InferenceActivities
    from ratchet.activities.inference.engine import engine_spec

    host = HostActivities(ctx, client, {"engine": engine_spec})
    return [
        _worker(client, queues.inference, host, watching=watching, at_once=256),
        _worker(client, ctx.own_queue, InferenceActivities(ctx), watching=watching, at_once=16),
    ]


def env(
    client: Client, ctx: WorkerContext, queues: Queues, watching: Sequence[Interceptor] = ()
) -> list[Worker]:
    """Env servers, and the check of the environments."""
    from ratchet.activities.envs.check import EnvActivities
    from ratchet.activities.envs.host import env_spec
    from ratchet.activities.hosting.activities import HostActivities

    host = HostActivities(ctx, client, {"env": env_spec})
    owners = (EnvActivities(ctx), host)
    return [_worker(client, queues.env, *owners, watching=watching, at_once=256)]


BUILDERS: dict[str, Callable[..., list[Worker]]] = {
    "orchestrator": orchestrator,
    "rollout": rollout,
    "trainer": trainer,
    "inference": inference,
    "env": env,
}
