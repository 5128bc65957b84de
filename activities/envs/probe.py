"""Checks the health of an env server, without importing verifiers.

An env server's client waits forever when its server dies, so its users check here, too.
"""

import asyncio
import uuid
from typing import Literal
from urllib.parse import urlparse

Health = Literal["up", "silent", "refused"]


async def probe(address: str, timeout_s: float) -> Health:
    """One health request to tcp://host:port, bounded by `timeout_s` seconds.

    'refused': nothing listens there (the process is gone). 'silent': something accepts connections
    but does not answer in time.
    """
    url = urlparse(address)
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except TimeoutError:
        return "silent"
    except OSError:
        return "refused"
    writer.close()
    left = deadline - asyncio.get_running_loop().time()
    return "up" if await _answers(address, max(left, 0.05)) else "silent"


async def _answers(address: str, timeout_s: float) -> bool:
    import msgpack
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SocketType.DEALER)
    socket.setsockopt(zmq.SocketOption.LINGER, 0)
    socket.connect(address)
    try:
        async with asyncio.timeout(timeout_s):
            request = uuid.uuid4().hex.encode()
            await socket.send_multipart([request, b"health", msgpack.packb({})])
            frames = await socket.recv_multipart()
            return len(frames) == 3 and frames[0] == request
    except TimeoutError:
        return False
    finally:
        socket.close()
        context.term()
