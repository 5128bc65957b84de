"""The connection to Temporal: opened on first use; every failure of a call becomes a problem."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from temporalio.client import Client, GrpcCompression
from temporalio.envconfig import ClientConfig, ClientConnectConfig
from temporalio.service import RPCError, RPCStatusCode

from ratchet.activities.contracts.wire import WIRE
from ratchet.api.schemas.problems import ApiProblem

# A connection that breaks in the middle of a call is UNKNOWN to the SDK.
UNREACHABLE = {
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.UNKNOWN,
}

CUT = {RPCStatusCode.CANCELLED, RPCStatusCode.INTERNAL, RPCStatusCode.UNKNOWN}
"""What the SDK says of a call whose connection was closed under it."""


class Missing(Exception):
    """Temporal knows no such execution, or the execution has ended."""


def _cause(error: RuntimeError) -> str:
    """The operating system's message inside the SDK's nested connection error."""
    text = " ".join(str(error).split())
    innermost = re.findall(r'message: "([^"]+)"', text)
    return str(innermost[-1]).lower() if innermost else text[:160]


class Connection:
    """Reaches one Temporal namespace; raises ApiProblem 503 when it does not answer."""

    def __init__(self, connect: ClientConnectConfig | None, *, timeout_s: float) -> None:
        """`connect`: from `ClientConfig.load_client_connect_config()`; None: load it here."""
        config = connect if connect is not None else ClientConfig.load_client_connect_config()
        self._connect: dict[str, Any] = {"target_host": "localhost:7233", **config}
        self.address: str = self._connect["target_host"]
        self.namespace: str = self._connect.get("namespace") or "default"
        self.timeout = timedelta(seconds=timeout_s)
        self._client: Client | None = None
        self._lock = asyncio.Lock()

    def _unreachable(self, why: str) -> ApiProblem:
        return ApiProblem(
            503,
            "temporal-unavailable",
            "Temporal does not answer",
            f"No answer from Temporal at {self.address}, namespace {self.namespace!r} ({why}). "
            "Start it (`make up`), or set TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE to one that "
            "runs, and try again.",
            retry_after_s=5,
        )

    async def client(self) -> Client:
        """The connected client. A failed attempt is retried on the next call."""
        async with self._lock:
            if self._client is None:
                try:
                    async with asyncio.timeout(self.timeout.total_seconds()):
                        self._client = await Client.connect(
                            **self._connect,
                            data_converter=WIRE,
                            grpc_compression=GrpcCompression.NONE,
                        )
                except TimeoutError:
                    raise self._unreachable("connecting timed out") from None
                except RuntimeError as error:
                    raise self._unreachable(_cause(error)) from None
            return self._client

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[Client]:
        """The client, for calls whose failures become problem documents; raises ApiProblem 503, and
        Missing. Everything else is raised as RPCError, as the SDK does.
        """
        client = await self.client()
        try:
            yield client
        except RPCError as error:
            if error.status == RPCStatusCode.RESOURCE_EXHAUSTED:
                raise ApiProblem(
                    503,
                    "temporal-busy",
                    "Temporal is busy",
                    f"Temporal at {self.address} refuses calls over its rate limit; try again.",
                    retry_after_s=2,
                ) from None
            if error.status in UNREACHABLE:
                raise self._unreachable(error.message or error.status.name) from None
            if error.status in (RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.PERMISSION_DENIED):
                raise ApiProblem(
                    503,
                    "temporal-refused",
                    "Temporal refuses this API",
                    f"Temporal at {self.address} refused: {error.message}. Check TEMPORAL_API_KEY "
                    "and the TLS settings.",
                ) from None
            if error.status == RPCStatusCode.NOT_FOUND:
                if "amespace" not in error.message:
                    raise Missing(error.message) from None
                raise ApiProblem(
                    503,
                    "temporal-namespace-missing",
                    "The Temporal namespace does not exist",
                    f"Temporal at {self.address} has no namespace {self.namespace!r}; create it "
                    "(`temporal operator namespace create`) or set TEMPORAL_NAMESPACE.",
                ) from None
            raise

    async def call(self, name: str, request: Any) -> Any:
        """The answer of Temporal's workflow service to a request; raises as `calling` does."""
        async with self.calling() as client:
            method = getattr(client.workflow_service, name)
            return await method(request, retry=True, timeout=self.timeout)

    async def poll(self, name: str, request: Any, timeout: timedelta) -> Any:
        """The answer to a request that waits at Temporal for at most `timeout`; raises as `calling`
        does. Temporal closes every connection after some minutes, and a call on its way is lost:
        it is made again, once. The SDK's own retries of a poll do not end while Temporal is away.
        """
        async with self.calling() as client:
            method = getattr(client.workflow_service, name)
            try:
                return await method(request, timeout=timeout)
            except RPCError as error:
                if error.status not in CUT:
                    raise
                return await method(request, timeout=timeout)
