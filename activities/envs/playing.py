"""verifiers' env server with a method more: ROLLOUT plays a rollout and answers with its samples.

verifiers' own method sends every change of a trace as it happens, and whoever receives it puts the
episode together and validates it. Nobody watches traces here, so an episode is read where it is,
once, when it has ended. The other methods, by which older builds of Ratchet ask, stay.
"""

import asyncio
import logging
from typing import Any

import zmq
from verifiers.v1.serve import EnvServer
from verifiers.v1.serve.delta import pack, unpack
from verifiers.v1.serve.types import RunRequest

from ratchet.activities.envs.client import ABORTED, ROLLOUT
from ratchet.activities.envs.samples import Reading, Rollout, from_episode

log = logging.getLogger(__name__)


def reply_of(rollout: Rollout) -> bytes:
    """What the server answers with."""
    # `asdict` would copy every token.
    samples = [vars(sample) for sample in rollout.samples]
    data: bytes = pack({"success": True, "rollout": {**vars(rollout), "samples": samples}})
    return data


def _refusal(error: str) -> bytes:
    data: bytes = pack({"success": False, "error": error})
    return data


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
            data = reply_of(await self._play(unpack(payload)))
        except asyncio.CancelledError:
            data = _refusal(ABORTED)
        except Exception as error:
            log.warning("rollout failed: %s", error, exc_info=True)
            data = _refusal(f"{type(error).__name__}: {error}")
        finally:
            del self._running[number]
        try:
            await self.frontend.send_multipart([client_id, request_id, b"reply", data], copy=False)
        except zmq.ZMQError as error:
            log.warning("the reply to a rollout cannot be sent: %s", error)

    async def _play(self, asked: dict[str, Any]) -> Rollout:
        wanted = RunRequest.model_validate(asked)
        (slot,) = self.env.slots(self._build_task(wanted.task_data))
        context = self._context(wanted.client, wanted.model, wanted.sampling)
        episode = await self.env.run_slot(slot, context)
        return from_episode(episode, Reading(**asked["reading"]))
