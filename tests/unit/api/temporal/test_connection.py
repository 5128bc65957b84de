"""Calls on connections that Temporal closes for their age."""

import asyncio
from datetime import timedelta

import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment

from ratchet.api.temporal.connection import CUT, Connection
from tests.unit.api.conftest import connection, temporal_binary

pytestmark = pytest.mark.asyncio(loop_scope="session")
WITHIN_S = 120.0
LOST = 10
SETTINGS = (
    'frontend.keepAliveMaxConnectionAge="500ms"',
    "frontend.rps=100000",
    "frontend.namespaceRPS=100000",
    "frontend.globalNamespaceRPS=100000",
)


async def test_no_call_is_lost_with_a_connection_that_grew_old() -> None:
    lost = 0
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=temporal_binary(),
        dev_server_extra_args=[
            word for setting in SETTINGS for word in ("--dynamic-config-value", setting)
        ],
    ) as env:
        api = Connection(connection(env), timeout_s=WITHIN_S)
        service = (await api.client()).workflow_service
        request = DescribeNamespaceRequest(namespace="default")
        name = "describe_namespace"

        async def ask() -> None:
            nonlocal lost
            while lost < LOST:
                try:
                    await service.describe_namespace(request)
                except RPCError as error:
                    assert error.status in CUT, error
                    lost += 1
                await api.call(name, request)
                await api.poll(name, request, timedelta(seconds=WITHIN_S))

        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(ask() for _ in range(32)))
