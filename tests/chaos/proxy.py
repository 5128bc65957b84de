"""A TCP proxy in front of Temporal that can drop every connection and refuse others for a while.

It runs in a thread of its own, so that whatever else the fault suite does delays no byte.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from concurrent.futures import Future

RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`, while it is not cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()
        self._call(self._listen())

    def cut(self) -> int:
        """Refuses connections from here on and resets all there are; returns how many."""
        return self._call(self._cut())

    def restore(self) -> None:
        """Takes connections again, on the same port."""
        self._call(self._listen())

    def close(self) -> None:
        """Ends for good."""
        if self._thread.is_alive():
            self._call(self._cut())
            self._call(self._finish())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    def _call(self, work: "asyncio.Future[int] | object") -> int:
        future: Future[int] = asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]
        return future.result(timeout=10)

    async def _listen(self) -> int:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._connected, "127.0.0.1", self.port, reuse_address=True
            )
            self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def _cut(self) -> int:
        if self._server is not None:
            self._server.close()
            self._server = None
        count = len(self._writers) // 2
        for writer in list(self._writers):
            # Closed without lingering, a connection is reset and not ended in good order. One that
            # has just ended by itself has no socket any more.
            with contextlib.suppress(OSError):
                ours = writer.get_extra_info("socket")
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        return count

    async def _finish(self) -> int:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, up_writer}
        self._writers |= both
        try:
            await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
        finally:
            self._writers -= both


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    # One end is gone: so is the other, as on a wire.
    writer.close()
