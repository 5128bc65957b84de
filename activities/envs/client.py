"""Client of an env server, for one event loop: has it play rollouts.

A request is the frames [id, method, msgpack], a reply [id, kind, msgpack], as verifiers' servers
have them. The method ROLLOUT is Ratchet's own (`ratchet.activities.envs.playing`): the server reads
the episode, which it has at hand, and answers with the samples. verifiers' client gets episodes
instead; it is for servers without that method, which an older build of Ratchet started, and for
callers who read episodes in their own way. Its import takes seconds, so others do without.

A server that dies never answers: whoever uses a client watches the server, too.
"""

import asyncio
import importlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from ratchet.activities.envs.samples import Reading, Rollout, from_episode

if TYPE_CHECKING:
    from verifiers.v1.serve import EnvClient as EpisodeClient

ROLLOUT = b"rollout"
ABORTED = "Cancelled: rollout aborted"
"""An env server's answer for rollouts that it was asked to abort, or that end with it."""
UNKNOWN = f"unknown method {ROLLOUT.decode()!r}"


class UnreadEpisode(Exception):
    """An episode ended that the server can neither read nor send: no fault of the environment."""


@dataclass(frozen=True)
class Reply:
    """What a server answers: the rollout, or why there is none. `played`: there is an episode."""

    error: str | None = None
    rollout: Rollout | None = None
    played: bool = False


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
        self._sends_episodes = False

    async def play(self, request: Mapping[str, Any], reading: Reading) -> Rollout:
        """The rollout of a request {'task_data', 'client', 'model', 'sampling'}, configs of
        verifiers as JSON; whoever cancels this ends the rollout.

        Raises RuntimeError with the server's words if it refuses: ABORTED, or what is wrong;
        UnreadEpisode.
        """
        if not self._sends_episodes:
            asked = msgspec.msgpack.encode({**request, "reading": reading})
            reply = msgspec.msgpack.decode(await self._ask(asked), type=Reply)
            if reply.rollout is not None:
                return reply.rollout
            if reply.played:
                raise UnreadEpisode(reply.error)
            if reply.error != UNKNOWN:
                raise RuntimeError(reply.error)
            self._sends_episodes = True
            await self.import_episodes()
        return from_episode(await self.episode(request), reading)

    async def import_episodes(self) -> None:
        """Imports what `episode` needs, for which no time limit should run."""
        await asyncio.to_thread(importlib.import_module, "verifiers.v1.serve")

    async def episode(self, request: Mapping[str, Any]) -> Any:
        """The episode of a request, as verifiers has it; whoever cancels this ends the rollout.

        Raises RuntimeError as `play` does, and pydantic's ValidationError for a wrong request.
        """
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
