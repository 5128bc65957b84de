"""Limits on connections, which uvicorn lacks.

- A connection on which no request begins for HEAD_WITHIN_S is closed: otherwise clients that send
  half a head, or nothing, would stay forever. A request in progress, such as a stream, is left
  alone.
- No more than about MOST_HEAD of a request's head is kept. The rest of it is dropped.
- The app answers 503 on connections beyond MOST_CONNECTIONS. Beyond twice as many they are closed.

What is over a limit passes through the app like any other request, which the scope's
`state["over"]` marks as one to refuse: so it is answered, logged and counted in one place.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ratchet.api.http.security import MOST_HEAD

HEAD_WITHIN_S = 10.0
MOST_CONNECTIONS = 2000
"""All clients together."""
FURTHER_FILES = 500
"""What else the API has open: the store, Temporal, logs."""
PIECE = MOST_HEAD // 2


def allow_open_files() -> None:
    """Lets this process open as many files as MOST_CONNECTIONS needs, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS + FURTHER_FILES
    if resource.RLIM_INFINITY != soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection."""

    _in_head = False
    _head = 0
    """Bytes of the head that is being read, without the piece that it began in."""
    _dropping = False

    def connection_made(self, transport: Any) -> None:
        """Called when a connection opens."""
        super().connection_made(transport)
        if len(self.connections) > 2 * MOST_CONNECTIONS:
            transport.abort()
        elif len(self.connections) > MOST_CONNECTIONS:
            self.app_state = {**self.app_state, "over": "connections"}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Called with what the client sent."""
        for start in range(0, len(data), PIECE):
            if self._dropping or self.transport.is_closing():
                return
            piece = data[start : start + PIECE]
            if self._in_head:
                self._head += len(piece)
            if self._head > MOST_HEAD:
                self._refuse_head()
            else:
                super().data_received(piece)

    def on_message_begin(self) -> None:
        """Called at the first byte of a head."""
        super().on_message_begin()
        self._in_head, self._head = True, 0

    def on_headers_complete(self) -> None:
        """Called at the last byte of a head."""
        self._in_head, self._head = False, 0
        super().on_headers_complete()

    def _refuse_head(self) -> None:
        # What follows is read and dropped: a client that is still sending when the connection
        # closes would not see the reply. The keep-alive limit closes it.
        self._dropping = True
        self.url = b"/"
        self.headers.clear()
        self.scope["state"]["over"] = "head"
        self.on_headers_complete()

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
