"""verifiers' env server with a method more: ROLLOUT plays a rollout and answers with its samples.

verifiers' own method sends every change of a trace as it happens, and whoever receives it puts the
episode together and validates it. Nobody watches traces here, so an episode is read where it is,
once, when it has ended. The other methods, by which older builds of Ratchet ask, stay.
"""

import asyncio
import logging
from typing import Any

import msgspec
import zmq
from verifiers.v1.serve import EnvServer
from verifiers.v1.serve.encoding import msgpack_encoder
from verifiers.v1.serve.types import RunRequest

from ratchet.activities.envs.client import ABORTED, ROLLOUT, Reply
from ratchet.activities.envs.samples import Reading, from_episode

log = logging.getLogger(__name__)


def encode(reply: Reply) -> bytes:
    """The reply as it is sent. Environments may put any numbers and objects into a record."""
    return msgspec.msgpack.encode(reply, enc_hook=msgpack_encoder)


def _text(error: Exception) -> str:
    """Its type and message, without what cannot be sent."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()


class RolloutServer(EnvServer):  # type: ignore[misc]
    """Serves one environment; see `ratchet.activities.envs.client` for the frames."""

    async def _handle(
        self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes
    ) -> None:
        if method != ROLLOUT:
            await super()._handle(client_id, request_id, method, payload)
            return
        task = asyncio.current_task()
        assert task is not None
        number = request_id.decode()
        # Requests start in the order in which they came, so whoever cancels one finds it.
        self._running[number] = task
        try:
            data = await self._answer(msgspec.msgpack.decode(payload))
        finally:
            del self._running[number]
        try:
            await self.frontend.send_multipart([client_id, request_id, b"reply", data], copy=False)
        except zmq.ZMQError as error:
            log.warning("the reply to a rollout cannot be sent: %s", error)

    async def _answer(self, asked: dict[str, Any]) -> bytes:
        try:
            reading = msgspec.convert(asked["reading"], Reading)
            episode = await self._play(RunRequest.model_validate(asked))
        except asyncio.CancelledError:
            return encode(Reply(ABORTED))
        except Exception as error:
            log.warning("a rollout was refused: %s", error, exc_info=True)
            return encode(Reply(_text(error)))
        try:
            return encode(Reply(rollout=from_episode(episode, reading)))
        except Exception as error:
            log.exception("an episode cannot be read")
            return encode(Reply(_text(error), played=True))

    async def _play(self, wanted: RunRequest) -> Any:
        (slot,) = self.env.slots(self._build_task(wanted.task_data))
        context = self._context(wanted.client, wanted.model, wanted.sampling)
        return await self.env.run_slot(slot, context)
