"""ratchet-chat: a chat harness inside the env server's own process.

One chat completion per segment, over the rollout's interception endpoint. No program is
launched, so a rollout costs milliseconds of CPU and needs no sandbox.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from ratchet.activities.envs.shipped import ratchet_compat, ratchet_http

ratchet_compat.apply()

RETRIED = (502, 503)
"""An engine's idle connection may close under a request; such a call never reached it."""
BACKOFFS_S = (0.05, 0.5)
"""Waits before the second and third try; together far below any rollout's time limit."""


class RatchetChatConfig(vf.HarnessConfig):
    """Nothing beyond the common options."""


CONNECTIONS = 2000


@functools.cache
def _clients() -> AsyncGenerator[aiohttp.ClientSession, None]:
    # One pool for the server's one event loop: building a client costs more than a rollout.
    # A rollout's deadline bounds its calls, so the pool sets no timeout of its own.
    async def one() -> AsyncGenerator[aiohttp.ClientSession, None]:
        async with ratchet_http.session(CONNECTIONS) as client:
            while True:
                yield client

    # The loop closes its generators before it ends, and with this one the pool.
    return one()


class RatchetChatHarness(vf.Harness[RatchetChatConfig]):
    """Speaks for the policy: sends the conversation so far, takes one reply."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **_: Any,
    ) -> vf.ProgramResult:
        """One model call; exit code 1 passes the recorded provider error to the rollout."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        url = f"{endpoint.rstrip('/')}/chat/completions"
        body = {"model": ctx.model, "messages": messages}
        status, text = 0, ""
        client = await anext(_clients())
        for attempt, wait in enumerate((0.0, *BACKOFFS_S)):
            await asyncio.sleep(wait)
            headers = {"Authorization": f"Bearer {secret}"}
            if attempt:
                # Identifies a repeat of the same call, so that it commits at most one turn.
                headers["x-stainless-retry-count"] = str(attempt)
            async with client.post(url, headers=headers, json=body) as response:
                # Read in any case, so that the connection can be used again.
                status, text = response.status, await response.text(errors="replace")
            if status not in RETRIED:
                break
        if status >= 400:
            detail = f"HTTP {status}: {text[:500]}"
            return vf.ProgramResult(exit_code=1, stdout="", stderr=detail)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["RatchetChatHarness"]
