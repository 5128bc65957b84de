"""Serves a folder of weights with a plain vLLM, as the frozen model of a test.

The server is what anyone would start by hand: no control endpoints, no token-in-token-out. It is
bound to no core, so that it may stand beside an engine, and nothing of it is left afterwards.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ratchet.worker.teacher import server_of, start


@asynccontextmanager
async def frozen_model(
    weights: Path, name: str, home: Path, *, seq_len: int = 256, key: str = ""
) -> AsyncIterator[str]:
    """The address (http://host:port) of a server of `weights` under `name`, healthy.

    It asks for `key`, if one is given. State and logs are in `home`.
    """
    server = server_of(weights, name, home, context=seq_len, key=key)
    try:
        await start(server)
        yield server.spec.address
    finally:
        await server.stop()
