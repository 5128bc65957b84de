"""Bounds on connections, which uvicorn has none of: how long a request's head may take.

A connection on which no request begins for HEAD_WITHIN_S is closed: those that send half a head,
or nothing, else stay for ever. A request under way, as a stream is, is left alone.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_WITHIN_S = 10.0
MOST_CONNECTIONS = 2000
"""Of all callers together; uvicorn answers 503 beyond."""


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol of one connection."""

    def connection_made(self, transport: Any) -> None:
        """A connection is open."""
        super().connection_made(transport)
        self._watch()

    def _watch(self) -> None:
        asyncio.get_running_loop().call_later(HEAD_WITHIN_S, self._check, self.cycle)

    def _check(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        # The cycle is the last request of which the head was read whole.
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self._watch()
