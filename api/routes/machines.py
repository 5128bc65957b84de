"""The engines and workers that runs execute on, as Temporal sees them now."""

import asyncio
from dataclasses import asdict
from datetime import UTC
from typing import Any

from fastapi import APIRouter
from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.redact import redacted
from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.activities.contracts.services import read_services
from ratchet.api.http.problems import documented
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.machines import Engine, ServiceItem, WorkerItem
from ratchet.api.services.core import Served, Services
from ratchet.workflows.protocol.messages import HOST

router = APIRouter(prefix="/v1", tags=["machines"])

MOST_ENGINES = 500
ENGINE = "/host/engine/"


async def engines_of(services: Services) -> list[Engine]:
    """Engines of runs, by id."""
    query = f"WorkflowType = '{HOST}' AND ExecutionStatus = 'Running'"
    hosts = await services.temporal.listed(query, MOST_ENGINES * 4)
    ids = sorted({host.id for host in hosts if ENGINE in host.id})[:MOST_ENGINES]
    versions = {run.id: run.memo.get("policy_version") for run in await services.run_list.open()}
    result = await asyncio.gather(*(_engine(services, host, versions) for host in ids))
    return [engine for engine in result if engine is not None]


async def _engine(services: Services, host: str, versions: dict[str, Any]) -> Engine | None:
    answer = await services.temporal.described(host)
    if answer is None:
        return None
    attempt_id, _, place = host.partition(ENGINE)
    run_id = workflow_of(attempt_id)
    version = versions.get(run_id)
    engine = Engine(
        id=host,
        run_id=run_id,
        index=int(place.partition(".")[0]),
        state="starting",
        attempt=0,
        since=None,
        worker="",
        policy_version=version if isinstance(version, int) and version >= 0 else None,
    )
    for pending in answer.pending_activities:
        started = pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        since = pending.last_started_time if started else pending.scheduled_time
        engine.attempt = pending.attempt
        engine.since = since.ToDatetime(UTC)
        engine.worker = pending.last_worker_identity
        engine.state = "up" if started else "restarting" if pending.attempt > 1 else "starting"
        if pending.HasField("last_failure"):
            engine.last_failure = redacted(pending.last_failure.message, 500)
    return engine


async def workers_of(services: Services) -> list[WorkerItem]:
    """Worker processes that poll a task queue of a role, by role and name."""
    queues = services.settings.queues
    activity, workflow = (
        TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    )
    wanted = [
        ("orchestrator", queues.orchestrator, workflow),
        *((role, queues.of(role), activity) for role in WORKER_ROLES),
    ]

    answers = await asyncio.gather(
        *(services.temporal.pollers(queue, kind) for _, queue, kind in wanted)
    )
    polled = [
        (poller.last_access_time.ToDatetime(UTC), role, poller.identity, queue)
        for (role, queue, _), pollers in zip(wanted, answers, strict=True)
        for poller in pollers
    ]
    newest = {
        (role, name): WorkerItem(id=name, role=role, queue=queue, last_seen=seen)
        for seen, role, name, queue in sorted(polled)
    }
    return [newest[key] for key in sorted(newest)]


def live_gauges(services: Services, run_ids: list[str]) -> list[dict[str, Any]]:
    """What rollout workers last reported of these runs, with `run_id` and `source`. Blocks."""
    return [
        {"run_id": run_id, **record}
        for run_id in run_ids
        for record in services.records.live(run_id, services.settings.live_max_age_s)
    ]


def _same(identity: str, source: str) -> bool:
    """Whether a source of gauges is the worker of this identity, '<pid>@<host>'."""
    process, _, host = identity.partition("@")
    return source == f"rollout-{host}-{process}"


@router.get("/engines", responses=documented(503))
async def list_engines(services: Served) -> ListOf[Engine]:
    """Inference engines of all runs, and their states."""
    return ListOf[Engine](data=await engines_of(services), has_more=False)


@router.get("/workers", responses=documented(503))
async def list_workers(services: Served) -> ListOf[WorkerItem]:
    """Worker processes that polled Temporal in the last minutes, by role; rollout workers with the
    gauges that they last reported for each run.
    """
    workers = await workers_of(services)
    running = [run.id for run in await services.run_list.open()]
    reported = await asyncio.to_thread(live_gauges, services, running)
    for worker in workers:
        if worker.role == "rollout":
            worker.gauges = [gauge for gauge in reported if _same(worker.id, gauge["source"])]
    return ListOf[WorkerItem](data=workers, has_more=False)


@router.get("/services", responses=documented())
async def list_services(services: Served) -> ListOf[ServiceItem]:
    """Processes of the local stack and their states; empty unless a supervisor of `make up` runs on
    the API's machine.
    """
    states = await asyncio.to_thread(read_services, services.settings.home)
    items = [ServiceItem.model_validate(asdict(state)) for state in states or ()]
    return ListOf[ServiceItem](data=items, has_more=False)
