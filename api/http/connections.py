"""Limits on connections, which uvicorn lacks: how long a request's head may take.

A connection on which no request begins for HEAD_WITHIN_S is closed: otherwise clients that send
half a head, or nothing, would stay forever. A request in progress, such as a stream, is left alone.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_WITHIN_S = 10.0
MOST_CONNECTIONS = 2000
"""All clients together; beyond that uvicorn answers 503."""


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol of one connection."""

    def connection_made(self, transport: Any) -> None:
        """Called when a connection opens."""
        super().connection_made(transport)
        self._watch()

    def _watch(self) -> None:
        asyncio.get_running_loop().call_later(HEAD_WITHIN_S, self._check, self.cycle)

    def _check(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        # The cycle is the last request whose head was read completely.
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self._watch()
