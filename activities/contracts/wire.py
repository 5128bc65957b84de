"""How values are encoded for Temporal: JSON by pydantic, with one adapter per type and process.

Temporal creates a converter for every workflow instance. The adapters of its own pydantic converter
would be rebuilt in each, for tens of milliseconds, and by several threads at once, which breaks
CPython 3.11's `ast.parse` ("AST constructor recursion depth mismatch") and fails the task.
Invariant: adapters are built one at a time, and each once.
"""

import functools
import threading
from typing import Any

from pydantic import TypeAdapter
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)

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


WIRE = DataConverter(payload_converter_class=WireConverter)
