"""Connections to env servers, one for each server and worker process.

An env client waits for ever when its server dies, so while anyone uses a connection its server is
watched: `lost` is set, with the reason, as soon as nothing listens at the address any more, or
when it has not answered for `SILENCE_S`. A lost connection is never used again.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ratchet.activities.envs.client import EnvClient
from ratchet.activities.envs.probe import probe

WATCH_S = 2.0
SILENCE_S = 30.0
"""Generous: a server that tokenizes for many rollouts on a busy machine answers late."""

IDLE_S = 10.0


class EnvConnection:
    """A client of one env server, and whether that server is still there."""

    def __init__(self, address: str, client: EnvClient) -> None:
        self.address = address
        self.client = client
        self.users = 0
        self.closed = False
        self.lost = asyncio.Event()
        self.reason = ""
        self._watcher: asyncio.Task[None] | None = None

    def start_watch(self) -> None:
        """Watches until `stop_watch` or until the server is lost."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    async def stop_watch(self) -> None:
        """Ends the watch."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not self.lost.is_set():
            health = await probe(self.address, WATCH_S * 2)
            if health == "up":
                heard = loop.time()
            elif health == "refused":
                self._lose("nothing listens there any more")
            elif loop.time() - heard > SILENCE_S:
                self._lose(f"it has not answered for {SILENCE_S:.0f} s")
            await asyncio.sleep(WATCH_S)

    def _lose(self, why: str) -> None:
        self.reason = f"the env server at {self.address} is gone: {why}"
        self.lost.set()


class EnvConnections:
    """All env servers that this process talks to."""

    def __init__(self) -> None:
        self._open: dict[str, EnvConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[EnvConnection]:
        """A watched connection for the time of the block."""
        connection = self._open.get(address)
        if connection is None or connection.lost.is_set():
            connection = self._open[address] = EnvConnection(address, EnvClient(address))
        connection.users += 1
        connection.start_watch()
        try:
            yield connection
        finally:
            connection.users -= 1
            if connection.users == 0:
                await connection.stop_watch()
                closing = asyncio.create_task(self._close_if_idle(connection))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _close_if_idle(self, connection: EnvConnection) -> None:
        # Waits first: the next group usually needs it, and requests that abort abandoned rollouts
        # must have been sent before the socket closes. A cancelled wait closes at once:
        # a process cannot end while a socket is open.
        try:
            await asyncio.sleep(IDLE_S)
        finally:
            if connection.users == 0 and not connection.closed:
                connection.closed = True
                if self._open.get(connection.address) is connection:
                    del self._open[connection.address]
                await connection.client.close()
