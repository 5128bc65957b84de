"""Rollouts of evals through chat completions, as a user of the model would ask it.

The engine renders messages with the model's own chat template. A chat reply carries no weight
label, so the worker reads the engine's label before and after each rollout. Labels are never
reused: if both are equal, those weights sampled the whole rollout; if they differ, it is mixed.
"""

import asyncio
from typing import Any

import httpx

from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.runtime.tls import shared_context
from ratchet.configs.env import SamplingConfig

READ_S = 60.0
"""An engine that is loading new weights answers only once it has them."""
GATHERED_S = 0.01
"""How long a reading waits for others who ask: rollouts of a group begin and end together."""


def request(
    engine: EngineTarget,
    sampling: SamplingConfig,
    options: dict[str, Any],
    task: dict[str, Any],
) -> dict[str, Any]:
    """A request of the env client; `options` are the chat template's own."""
    # The salt keeps cached keys and values of one version from serving another.
    extra = {"cache_salt": str(engine.version), "return_token_ids": True, "logprobs": True}
    template = {"chat_template_kwargs": options} if options else {}
    return {
        "client": {
            "type": "eval",
            "base_url": f"{engine.url.rstrip('/')}/v1",
            "api_key_var": "RATCHET_ENGINE_KEY",
        },
        "model": engine.model,
        "sampling": sampling.request() | extra | template,
        "task_data": task,
    }


class Labels:
    """Labels of the weights that engines have. Whoever asks at nearly the same time shares a
    reading, which begins after each of them has asked.
    """

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Task[str]] = {}

    async def read(self, url: str) -> str:
        """That of the engine at `url`; raises as `read_label` does."""
        if url not in self._next:
            self._next[url] = asyncio.create_task(self._read(url))
        return await asyncio.shield(self._next[url])

    async def _read(self, url: str) -> str:
        await asyncio.sleep(GATHERED_S)
        del self._next[url]
        return await read_label(url)


async def read_label(url: str) -> str:
    """The label of the weights that the engine at `url` has; raises httpx.HTTPError."""
    async with httpx.AsyncClient(
        timeout=READ_S, verify=shared_context(), trust_env=False
    ) as client:
        answer = await client.get(f"{url.rstrip('/')}/weight_info")
    return str(answer.raise_for_status().json()["weight_version"])
