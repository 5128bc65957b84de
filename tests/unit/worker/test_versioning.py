"""Builds of workers: what the environment may say of them, and what workers without one get."""

from typing import Any

import pytest
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentResponse
from temporalio.service import RPCError, RPCStatusCode

from ratchet.worker.settings import Deployment, WorkerSettings
from ratchet.worker.upgrading_host import UpgradingHost
from ratchet.worker.versioning import (
    interceptors_of,
    make_first_current,
    options_of,
    set_current_command,
    workflows_of,
)
from ratchet.workflows.host import Host


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"RATCHET_BUILD_ID": "", "RATCHET_DEPLOYMENT": "rl"}, None),
        ({"RATCHET_BUILD_ID": "1.4-rc_2"}, Deployment("ratchet", "1.4-rc_2")),
        ({"RATCHET_BUILD_ID": "a", "RATCHET_DEPLOYMENT": "rl"}, Deployment("rl", "a")),
    ],
)
def test_build_is_opt_in(env: dict[str, str], expected: Deployment | None) -> None:
    assert WorkerSettings.from_env(env).deployment == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RATCHET_BUILD_ID", "ratchet:1"),
        ("RATCHET_BUILD_ID", "a b"),
        ("RATCHET_DEPLOYMENT", "ratchet.eu"),
        ("RATCHET_DEPLOYMENT", "x" * 101),
    ],
)
def test_names_that_temporal_would_refuse_are_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{value[:5]}"):
        WorkerSettings.from_env({"RATCHET_BUILD_ID": "1", variable: value})


def test_workers_without_a_build_say_nothing_of_versions() -> None:
    assert options_of(None) == {} and interceptors_of(None) == []
    assert Host in workflows_of(None) and UpgradingHost not in workflows_of(None)


def test_command_names_deployment_and_build() -> None:
    command = set_current_command(Deployment("rl", "2"))
    assert command.endswith("set-current-version --deployment-name rl --build-id 2")


class Server:
    """Answers the questions after a deployment: first by errors of `statuses`, then by build B."""

    def __init__(self, *statuses: RPCStatusCode) -> None:
        self.namespace, self.workflow_service = "default", self
        self.left, self.asked = list(statuses), 0

    async def describe_worker_deployment(self, _: Any) -> DescribeWorkerDeploymentResponse:
        self.asked += 1
        if self.left:
            raise RPCError("not now", self.left.pop(0), b"")
        described = DescribeWorkerDeploymentResponse()
        routing = described.worker_deployment_info.routing_config
        routing.current_version_changed_time.GetCurrentTime()
        routing.current_deployment_version.build_id = "B"
        return described


async def test_a_server_that_is_busy_is_asked_again() -> None:
    server: Any = Server(
        RPCStatusCode.NOT_FOUND, RPCStatusCode.CANCELLED, RPCStatusCode.UNAVAILABLE
    )
    assert await make_first_current(server, Deployment("rl", "A")) == "B"
    assert server.asked == 4


async def test_a_server_without_deployments_is_named_at_once() -> None:
    server: Any = Server(RPCStatusCode.UNIMPLEMENTED)
    with pytest.raises(ValueError, match="use a server with Worker Deployments"):
        await make_first_current(server, Deployment("rl", "A"))
    assert server.asked == 1
