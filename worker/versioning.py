"""Which build runs which workflow, for workers that name their build (RATCHET_BUILD_ID).

This is Temporal's Worker Deployment Versioning; without RATCHET_BUILD_ID none of it applies. Only
the orchestrator role is versioned, since only workflow code is bound to histories:

- TrainingRun is pinned: a run's execution is never replayed by another build. Each time it
  continues as new, between steps and with nothing of its own in progress, it starts on the build
  that is current then. Its state crosses by `workflows/protocol/state.py`, upgraded by
  `workflows/protocol/upgrades.py`.
- Dispatch is pinned, and a generation opened by a run is of the run's build. A generation ends
  on its own, after `dispatch.generation_events` of history and the work that it has in flight.
- Preflight is pinned; it lasts minutes at most.
- Host follows the current build. It lives as long as its run, with one activity for days, so that
  pinned it would keep the first build's worker from ever ending. Its history has about ten events,
  and the recorded histories (`tests/workflow/histories`) show that the build replays it.

Python 3.12 and later need a separate build: there `asyncio.wait_for`, which the SDK uses to bound
waits, starts its timer at another moment than in 3.11, and a TrainingRun's history from one does
not replay on the other. Hosts' histories do.

All other roles are unversioned: their activities are routed by task queue alone. An engine or a
trainer, and the queue that only its process polls, outlive the build of any run that pushes to it,
and on a versioned queue without a worker of the run's build those activities would never start.
Their inputs follow contracts to which fields are only added, with defaults.


Invariant: some build is current as soon as any worker of the deployment is up, otherwise runs
would wait forever: the first build of a deployment makes itself current. Every later one becomes
current only when an operator says so, and the worker of the previous one must stay until it is
drained. Pinned executions whose worker is gone for good can be moved by `temporal workflow
update-options`.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any, NoReturn

from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    ContinueAsNewInput,
    Interceptor,
    WorkerDeploymentConfig,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
    WorkflowOutboundInterceptor,
)
from temporalio.workflow import ContinueAsNewVersioningBehavior

from ratchet.worker.settings import Deployment

REGISTERED_WITHIN_S = 30.0
"""How long the server may take to register a version whose worker polls."""
LOOK_EVERY_S = 0.25
REFUSED = (
    RPCStatusCode.INVALID_ARGUMENT,
    RPCStatusCode.PERMISSION_DENIED,
    RPCStatusCode.UNAUTHENTICATED,
    RPCStatusCode.UNIMPLEMENTED,
)
"""Errors of a server that a retry does not change."""


class UpgradeOnContinueAsNew(Interceptor):
    """Lets pinned workflows that continue as new start on the current build."""

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        """The inbound half, which installs the outbound one."""
        return _Inbound


class _Inbound(WorkflowInboundInterceptor):
    def init(self, outbound: WorkflowOutboundInterceptor) -> None:
        super().init(_Outbound(outbound))


class _Outbound(WorkflowOutboundInterceptor):
    def continue_as_new(self, input: ContinueAsNewInput) -> NoReturn:
        upgrade = ContinueAsNewVersioningBehavior.AUTO_UPGRADE
        super().continue_as_new(replace(input, initial_versioning_behavior=upgrade))


def options_of(deployment: Deployment | None) -> dict[str, Any]:
    """Additional options of a worker of workflows: they are pinned unless they say otherwise."""
    if deployment is None:
        return {}
    config = WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment.name, deployment.build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )
    return {"deployment_config": config}


def interceptors_of(deployment: Deployment | None) -> list[Interceptor]:
    """Additional interceptors of a worker of workflows."""
    return [UpgradeOnContinueAsNew()] if deployment else []


def workflows_of(deployment: Deployment | None) -> list[type]:
    """The workflows of the orchestrator role.

    Servers refuse what an unversioned worker declares about versions, so that only a versioned one
    has workflows that declare it.
    """
    from ratchet.worker.upgrading_host import UpgradingHost
    from ratchet.workflows.dispatch import Dispatch
    from ratchet.workflows.host import Host
    from ratchet.workflows.preflight import Preflight
    from ratchet.workflows.training_run import TrainingRun

    return [TrainingRun, Dispatch, UpgradingHost if deployment else Host, Preflight]


def set_current_command(deployment: Deployment) -> str:
    """The operator's command that makes a build the current one."""
    return (
        "temporal worker deployment set-current-version "
        f"--deployment-name {deployment.name} --build-id {deployment.build_id}"
    )


async def make_first_current(client: Client, deployment: Deployment) -> str:
    """Makes the build current if the deployment never had a current version.

    Call it while the build's worker polls. Returns the build that is current afterwards, '' if an
    operator chose unversioned workers. Raises ValueError if the server does not register the
    version within REGISTERED_WITHIN_S.
    """
    deadline = time.monotonic() + REGISTERED_WITHIN_S
    while True:
        try:
            return await _look_or_claim(client, deployment)
        except RPCError as error:
            # Not registered yet, another build was first between check and claim, or the
            # server is too busy to answer.
            if error.status in REFUSED or time.monotonic() > deadline:
                raise ValueError(
                    f"RATCHET_BUILD_ID={deployment.build_id!r}: the Temporal server does not "
                    f"register it as a version of deployment {deployment.name!r} "
                    f"({error.message}); use a server with Worker Deployments (1.28 or later), or "
                    "unset it"
                ) from None
        await asyncio.sleep(LOOK_EVERY_S)


async def _look_or_claim(client: Client, deployment: Deployment) -> str:
    service = client.workflow_service
    described = await service.describe_worker_deployment(
        DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=deployment.name)
    )
    routing = described.worker_deployment_info.routing_config
    if routing.HasField("current_version_changed_time"):
        current = routing.current_deployment_version.build_id
        if current != deployment.build_id:
            logging.warning(
                "build %s gets no new runs: %s is current; to change that: %s",
                deployment.build_id,
                f"build {current}" if current else "an unversioned worker",
                set_current_command(deployment),
            )
        return current
    claim: Any = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace,
        deployment_name=deployment.name,
        build_id=deployment.build_id,
        conflict_token=described.conflict_token,
    )
    await service.set_worker_deployment_current_version(claim)
    logging.info("build %s is the first of %s: current", deployment.build_id, deployment.name)
    return deployment.build_id
