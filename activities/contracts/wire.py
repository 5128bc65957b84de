"""How values are encoded for Temporal: JSON by pydantic, with one adapter per type and process;
and failures, without secrets.

Temporal creates a converter for every workflow instance. The adapters of its own pydantic converter
would be rebuilt in each, for tens of milliseconds, and by several threads at once, which breaks
CPython 3.11's `ast.parse` ("AST constructor recursion depth mismatch") and fails the task.
Invariants: adapters are built one at a time, and each once; no message and no stack trace of a
failure enters a history unredacted. What a history holds is read as it is, so that replays see what
the first execution saw.
"""

import functools
import threading
from typing import Any

from pydantic import TypeAdapter
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
    PayloadConverter,
)

from ratchet.activities.contracts.redact import writable

_BUILDING = threading.Lock()


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    with _BUILDING:
        return TypeAdapter(hint)


def decoded(hint: Any, value: Any) -> Any:
    """Plain data as a value of a type; raises pydantic's ValidationError if it does not fit."""
    return _adapter(hint).validate_python(value)


class JsonConverter(PydanticJSONPlainPayloadConverter):
    """Reads JSON as any type that pydantic knows."""

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        """The value; raises pydantic's ValidationError if it does not fit the type."""
        return _adapter(Any if type_hint is None else type_hint).validate_json(payload.data)


class WireConverter(CompositePayloadConverter):
    """Temporal's default encodings, with JSON by pydantic."""

    def __init__(self) -> None:
        super().__init__(
            *(
                JsonConverter() if isinstance(converter, JSONPlainPayloadConverter) else converter
                for converter in DefaultPayloadConverter.default_encoding_payload_converters
            )
        )


class RedactingFailures(DefaultFailureConverter):
    """Temporal's own form of failures, without secrets."""

    def to_failure(
        self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure
    ) -> None:
        """Writes an exception, with all that caused it, to `failure`."""
        super().to_failure(exception, payload_converter, failure)
        # The whole chain: an exception that was read from a history brings its causes along.
        link = failure
        while True:
            link.message = writable(link.message)
            link.stack_trace = writable(link.stack_trace)
            if not link.HasField("cause"):
                return
            link = link.cause


WIRE = DataConverter(
    payload_converter_class=WireConverter, failure_converter_class=RedactingFailures
)
