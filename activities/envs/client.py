"""Client of an env server, for one event loop: has it play rollouts.

A request is the frames [id, method, msgpack], a reply [id, kind, msgpack], as verifiers' servers
have them. The method ROLLOUT is Ratchet's own (`ratchet.activities.envs.playing`): the server reads
the episode, which it has at hand, and answers with the samples. verifiers' client gets episodes
instead; it is for servers without that method, which an older build of Ratchet started, and for
rollouts that the caller lays out. Its import takes seconds, so others do without.

A server that dies never answers: whoever uses a client watches the server, too.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from ratchet.activities.envs.samples import Reading, Rollout, RolloutSample, from_episode

if TYPE_CHECKING:
    from verifiers.v1.serve import EnvClient as EpisodeClient

ROLLOUT = b"rollout"
ABORTED = "Cancelled: rollout aborted"
"""An env server's answer for rollouts that it was asked to abort, or that end with it."""
UNKNOWN = f"unknown method {ROLLOUT.decode()!r}"


@dataclass(frozen=True)
class Reply:
    """What a server answers: the rollout, or why there is none."""

    success: bool
    error: str | None = None
    rollout: Rollout | None = None


class EnvClient:
    """Of the server at `address`, tcp://host:port."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SocketType.DEALER)
        self._socket.setsockopt(zmq.SocketOption.LINGER, 0)
        # No limit on what waits to be sent: sending never blocks.
        self._socket.setsockopt(zmq.SocketOption.SNDHWM, 0)
        self._socket.setsockopt(zmq.SocketOption.RCVHWM, 0)
        self._socket.connect(address)
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._episodes: EpisodeClient | None = None

    async def play(
        self,
        request: Mapping[str, Any],
        reading: Reading,
        lay_out: Callable[[Any], list[RolloutSample]] | None = None,
    ) -> Rollout:
        """The rollout of a request {'task_data', 'client', 'model', 'sampling'}, configs of
        verifiers as JSON; whoever cancels this ends the rollout. `lay_out` makes the samples of
        traces without tokens.

        Raises RuntimeError with the server's words if it refuses: ABORTED, or what is wrong.
        """
        if lay_out is None and self._episodes is None:
            asked = msgspec.msgpack.encode({**request, "reading": reading})
            reply = msgspec.msgpack.decode(await self._ask(asked), type=Reply)
            if reply.rollout is not None:
                return reply.rollout
            if reply.error != UNKNOWN:
                raise RuntimeError(reply.error)
        episode = await self._episode(request)
        return await asyncio.to_thread(from_episode, episode, reading, lay_out)

    async def _episode(self, request: Mapping[str, Any]) -> Any:
        from verifiers.v1.serve import EnvClient as EpisodeClient
        from verifiers.v1.serve.types import RunRequest

        if self._episodes is None:
            self._episodes = EpisodeClient(self.address)
        wanted = RunRequest.model_validate(request)
        return await self._episodes.run(
            wanted.client, wanted.model, wanted.sampling, wanted.task_data
        )

    async def _ask(self, request: bytes) -> bytes:
        number = uuid.uuid4().hex.encode()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if self._receiver is None:
            self._receiver = asyncio.create_task(self._receive())
        try:
            await self._socket.send_multipart([number, ROLLOUT, request])
            return await future
        except asyncio.CancelledError:
            target = msgspec.msgpack.encode({"request_id": number.decode()})
            self._socket.send_multipart([uuid.uuid4().hex.encode(), b"cancel", target])
            raise
        finally:
            del self._pending[number]

    async def _receive(self) -> None:
        while True:
            # What is no reply to an open request answers one that was cancelled.
            frames = await self._socket.recv_multipart()
            future = self._pending.get(frames[0])
            if future is not None and not future.done():
                future.set_result(frames[-1])

    async def close(self) -> None:
        """Ends the connection; requests that are open never end."""
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        if self._episodes is not None:
            await self._episodes.close()
        self._socket.close()
        self._context.term()
