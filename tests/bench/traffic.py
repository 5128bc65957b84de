"""Load on an HTTP server, made as cheaply as Python allows, and a server that does nothing.

Requests are sent at fixed moments whatever the server does (an open loop): a latency counts from
when its request was due. A watcher is a connection that reads server-sent events and sends nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

TIMEOUT_S = 10.0
TRICKLE_S = 0.01
"""Between the openings of two watchers."""
NOTHING = b'{"object":"list","data":[],"has_more":false}'
MARK = b"\nid: "


@dataclass
class Traffic:
    """What came of a load: seconds from due to whole, errors by what they were, events by watcher.

    `began` and `ended` are Unix times: the requests were due between them.
    """

    began: float = 0.0
    ended: float = 0.0
    latencies: list[float] = field(default_factory=list)
    by_path: dict[str, list[float]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    events: list[int] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """A kept-alive connection that carries one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server took the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, request: bytes) -> int:
        """The status of the answer, once all of it came; raises OSError or TimeoutError."""
        assert self.transport is not None
        self._data, self._answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await asyncio.wait_for(self._answer, TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        """More of an answer."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or self._answer is None or self._answer.done():
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) >= int(length):
            self._answer.set_result(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed it, or it broke."""
        self.transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed within an answer"))


class Watcher(asyncio.Protocol):
    """Reads a stream of server-sent events; `wrong` says what went wrong, if anything did."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.events = 0
        self.heard = False
        self.wrong = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks for the stream."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts events, also those that arrive in pieces."""
        if not self.heard:
            self.heard = True
            if data[9:12] != b"200":
                self.wrong = f"stream answered {data[9:12].decode(errors='replace')}"
        self.events += (self._tail + data).count(MARK)
        self._tail = data[-len(MARK) + 1 :]

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream ends before its run does only if it broke."""
        if self._transport is not None:
            self.wrong = self.wrong or f"stream closed: {exc}"

    def close(self) -> None:
        """Stops watching."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.close()


def _request(path: str, accept: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: {accept}\r\n\r\n".encode()


class Load:
    """Watchers of `stream` and `rate` requests a second, of `paths` in turn, on one server."""

    def __init__(
        self, port: int, stream: str, paths: Sequence[str], *, watchers: int, rate: float
    ) -> None:
        self._port = port
        self._stream = _request(stream, "text/event-stream")
        self._requests = [(path.partition("?")[0], _request(path, "*/*")) for path in paths]
        self._many, self._rate = watchers, rate
        self._watchers: list[Watcher] = []
        self._idle: list[Connection] = []

    async def open(self) -> None:
        """Opens the watchers, and waits until each of them has heard of the server."""
        loop = asyncio.get_running_loop()
        for _ in range(self._many):
            _, watcher = await loop.create_connection(
                lambda: Watcher(self._stream), "127.0.0.1", self._port
            )
            self._watchers.append(watcher)
            await asyncio.sleep(TRICKLE_S)
        async with asyncio.timeout(TIMEOUT_S * 3):
            while not all(watcher.heard for watcher in self._watchers):
                await asyncio.sleep(0.1)

    async def send(self, seconds: float) -> Traffic:
        """Sends requests for so long; returns when all are answered or given up."""
        found = Traffic(began=time.time())
        loop = asyncio.get_running_loop()
        before = [watcher.events for watcher in self._watchers]
        start, tasks = loop.time(), set()
        for number in range(int(seconds * self._rate)):
            due = start + number / self._rate
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            path, request = self._requests[number % len(self._requests)]
            task = asyncio.create_task(self._one(path, request, due, found))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, start + seconds - loop.time()))
        found.ended = time.time()
        await asyncio.gather(*tasks)
        now = [watcher.events for watcher in self._watchers]
        found.events = [new - old for new, old in zip(now, before, strict=True)]
        for watcher in self._watchers:
            if watcher.wrong:
                found.errors[watcher.wrong] += 1
        return found

    async def _one(self, path: str, request: bytes, due: float, found: Traffic) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection = self._idle.pop() if self._idle else None
            if connection is None or connection.transport is None:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
            status = await connection.ask(request)
        except (OSError, TimeoutError) as error:
            found.errors[f"{path}: {type(error).__name__}: {error}"] += 1
            return
        self._idle.append(connection)
        if status != 200:
            found.errors[f"{path}: status {status}"] += 1
        taken = loop.time() - due
        found.latencies.append(taken)
        found.by_path.setdefault(path, []).append(taken)

    def close(self) -> None:
        """Closes all connections."""
        for watcher in self._watchers:
            watcher.close()
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._watchers, self._idle = [], []


class Idler(asyncio.Protocol):
    """Answers every request with an empty list, and a stream with silence."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A request, which is taken to come in one piece."""
        if b"text/event-stream" in data:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            return
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(NOTHING)}\r\n\r\n"
        self._transport.write(head.encode() + NOTHING)


async def idle() -> None:
    """Serves nothing, on a port that is printed, until it is killed."""
    server = await asyncio.get_running_loop().create_server(Idler, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(idle())
