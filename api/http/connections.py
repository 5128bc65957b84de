"""Limits on connections, which uvicorn lacks.

- A connection on which no request begins for HEAD_WITHIN_S is closed: otherwise clients that send
  half a head, or nothing, would stay forever. A request in progress, such as a stream, is left
  alone.
- No more than about MOST_HEAD of a request's head is kept, the rest is dropped. Trailers are
  dropped; a client that sends more than MOST_HEAD of them is cut off.
- A request with a body that asks for another protocol (`Upgrade`) is refused: httptools would take
  its body for the next request.
- The app answers 503 on connections beyond MOST_CONNECTIONS. Beyond twice as many they are closed.

What is refused passes through the app like any other request, and the scope's `state["refuse"]`
says why: so it is answered, logged and counted in one place. It is the last of its connection, of
which it closes only the sending half: a client that is still sending when a connection closes
would not see the reply. What it sends is read and dropped until the keep-alive limit.

uvicorn's other parser, h11, bounds heads and trailers itself, but is written in Python: one read of
256 KiB in chunks of a byte takes 0.4 s of the event loop, against 5 ms.
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


def _announces_body(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")


class HalfClosing(asyncio.Transport):
    """A transport that closes its sending half only."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport

    def write(self, data: Any) -> None:
        """Sends."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Sends what is left, then the end."""
        if not self.is_closing():
            self._transport.write_eof()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection."""

    _in_head = False
    _kept = 0
    """Bytes of the head or the trailers that are being read, without the piece they began in."""
    _dropping = False

    def connection_made(self, transport: Any) -> None:
        """Called when a connection opens."""
        super().connection_made(transport)
        if len(self.connections) > 2 * MOST_CONNECTIONS:
            transport.abort()
        elif len(self.connections) > MOST_CONNECTIONS:
            self.app_state = {**self.app_state, "refuse": "connections"}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Called with what the client sent."""
        for start in range(0, len(data), PIECE):
            if self._dropping or self.transport.is_closing():
                return
            piece = data[start : start + PIECE]
            self._kept += len(piece)
            if self._kept <= MOST_HEAD:
                super().data_received(piece)
            elif self._in_head:
                self.url = b"/"
                self.headers.clear()
                self.scope["state"]["refuse"] = "head"
                self.on_headers_complete()
            else:
                # No reply: there may be one already.
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Called at the first byte of a head."""
        super().on_message_begin()
        self._in_head, self._kept = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called after a header, and after a trailer."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called at the last byte of a head."""
        self._in_head, self._kept = False, 0
        state = self.scope["state"]
        if self.parser.should_upgrade() and any(map(_announces_body, self.headers)):
            state["refuse"] = "upgrade"
        super().on_headers_complete()
        if "refuse" in state:
            self._dropping = True
            self.cycle.keep_alive = False
            self.cycle.transport = HalfClosing(self.transport)

    def on_body(self, body: bytes) -> None:
        """Called with a part of a body."""
        self._kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called at the last byte of a request."""
        self._kept = 0
        super().on_message_complete()

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
