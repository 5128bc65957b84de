"""What ratchet_compat keeps of an engine's answers."""

from typing import Any

import httpx
import pytest
import verifiers.v1 as vf
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects import ChatDialect

from ratchet.activities.envs.shipped import ratchet_compat

ENTRIES = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]


def answer(**changes: Any) -> dict[str, Any]:
    """A chat completion, as vLLM gives it to those who ask for token ids."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": ENTRIES},
        **changes,
    }
    whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return {**whole, "choices": [choice], "prompt_token_ids": [1, 2, 3]}


async def asked(raw: dict[str, Any]) -> Any:
    """The tokens of the response to a chat that the provider answers with `raw`."""
    ratchet_compat.apply()
    ratchet_compat.apply()
    client = EvalClient(vf.EvalClientConfig(base_url="http://e/v1", api_key_var="NO_KEY"))
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=raw))
    await client.close()
    client.client = httpx.AsyncClient(transport=transport)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    response = await client.get_response(ChatDialect(), body, vf.SamplingConfig())
    assert response.message.content == "ab"
    return response.tokens


async def test_token_ids_and_logprobs_of_a_chat_are_kept() -> None:
    tokens = await asked(answer())
    assert (tokens.prompt_ids, tokens.completion_ids) == ([1, 2, 3], [7, 8])
    assert tokens.completion_logprobs == [-0.5, -0.25]


@pytest.mark.parametrize("logprobs", [None, {"content": ENTRIES[:1]}])
async def test_logprobs_that_are_not_of_all_tokens_are_none(logprobs: Any) -> None:
    tokens = await asked(answer(logprobs=logprobs))
    assert tokens.completion_ids == [7, 8] and tokens.completion_logprobs == []


async def test_a_provider_that_names_no_token_ids_is_left_as_it_is() -> None:
    assert await asked(answer(token_ids=None)) is None
