"""Connects to Temporal by its standard settings, and registers what runs need there."""

import logging

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.client import Client, GrpcCompression
from temporalio.envconfig import ClientConfig
from temporalio.service import RetryConfig, RPCError, RPCStatusCode

from ratchet.activities.contracts.wire import WIRE
from ratchet.workflows.protocol.messages import SEARCH_ATTRIBUTES

TYPES = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "Double": IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}


RETRIES = RetryConfig(max_interval_millis=1000, max_elapsed_time_millis=30_000, max_retries=40)
"""A connection lost for a few seconds is back before a heartbeat is missed, and results of
activities survive half a minute without a server.
"""


class TemporalUnreachable(Exception):
    """No Temporal server answers at the configured address."""


async def connect() -> Client:
    """A client for TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, … (temporalio.envconfig)."""
    settings = ClientConfig.load_client_connect_config()
    address = settings.get("target_host", "localhost:7233")
    try:
        return await Client.connect(
            **settings,
            data_converter=WIRE,
            retry_config=RETRIES,
            # Messages are small, since they refer to artifacts: to pack them costs both sides more.
            grpc_compression=GrpcCompression.NONE,
        )
    except RuntimeError as error:
        raise TemporalUnreachable(
            f"Temporal does not answer at {address}: start it with `make up`, or set "
            f"TEMPORAL_ADDRESS (and TEMPORAL_NAMESPACE, TEMPORAL_API_KEY or TLS settings) to one "
            f"that runs ({str(error)[:200]})"
        ) from None


async def register_search_attributes(client: Client) -> None:
    """Adds the search attributes that the namespace lacks."""
    operator = client.operator_service
    try:
        listed = await operator.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError as error:
        if error.status not in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED):
            raise
        # Hosted servers keep their operator service to themselves.
        wanted = ", ".join(f"{name}={kind}" for name, kind in SEARCH_ATTRIBUTES.items())
        logging.warning("search attributes cannot be registered from here; required: %s", wanted)
        return
    missing = {
        n: TYPES[t] for n, t in SEARCH_ATTRIBUTES.items() if n not in listed.custom_attributes
    }
    if not missing:
        return
    try:
        await operator.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
    except RPCError as error:
        # Two workers that start together both see them missing; the second add is refused.
        if error.status != RPCStatusCode.ALREADY_EXISTS:
            raise
