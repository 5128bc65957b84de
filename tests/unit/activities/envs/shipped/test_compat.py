"""What ratchet_compat keeps of an engine's answers."""

import inspect
import json
import math
import re
import time
from typing import Any

import httpx
import pytest
import renderers.client as client
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import UserMessage

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


SAMPLED = [{"token_id": 7, "logprob": -0.5, "rank": 1}, {"token_id": 8, "logprob": -0.25}]


def choice_of(entries: list[Any]) -> dict[str, Any]:
    """What a reply with such entries says of its tokens 7 and 8."""
    ratchet_compat.apply()
    (choice,) = client.parse_generate_response(reply(entries))["choices"]
    return dict(choice)


def test_logprobs_of_sampled_tokens_are_read_as_they_are() -> None:
    content = choice_of(SAMPLED)["logprobs"]["content"]
    assert ratchet_compat.logprobs_of(content, [7, 8]) == [-0.5, -0.25]
    assert ratchet_compat.logprobs_of(content, [7]) is None
    assert ratchet_compat.logprobs_of([], []) == []
    assert client._parse_completion_logprobs(choice_of(SAMPLED), [7, 8]) == [-0.5, -0.25]


@pytest.mark.parametrize(
    "entry",
    [
        {"token_id": 9, "logprob": -0.5},
        {"token": "token_id:8", "logprob": -0.5},
        {"token_id": 8},
        {"token_id": 8, "logprob": True},
        {"token_id": 8, "logprob": math.nan},
        {"token_id": 8, "logprob": math.inf},
        {"token_id": 8, "logprob": "-0.5"},
        None,
    ],
)
def test_other_entries_are_left_to_renderers(entry: Any) -> None:
    choice = choice_of([SAMPLED[0], entry])
    assert ratchet_compat.logprobs_of(choice["logprobs"]["content"], [7, 8]) is None
    if entry == {"token": "token_id:8", "logprob": -0.5}:
        assert client._parse_completion_logprobs(choice, [7, 8]) == [-0.5, -0.5]
    else:
        with pytest.raises(client.MalformedGenerateResponseError):
            client._parse_completion_logprobs(choice, [7, 8])
    assert ratchet_compat.logprobs_of({"7": SAMPLED}, [7]) is None


def reply(entries: list[Any], **changes: Any) -> bytes:
    """What vLLM answers to a request for tokens."""
    choice = {"index": 0, "logprobs": {"content": entries}, "token_ids": [7, 8], **changes}
    return json.dumps({"request_id": "r", "choices": [choice], "usage": {"a": [1]}}).encode()


@pytest.mark.parametrize("choice", [{"logprobs": None}, {}, {"logprobs": {"content": []}}])
def test_a_reply_without_logprobs_is_explained_by_renderers(choice: dict[str, Any]) -> None:
    ratchet_compat.apply()
    with pytest.raises(client.MalformedGenerateResponseError):
        client._parse_completion_logprobs(choice, [7, 8])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=9))
def test_a_reply_is_read_to_the_bit_without_what_nobody_uses(logprobs: list[float]) -> None:
    ratchet_compat.apply()
    ranked = [{"token_id": 7, "logprob": one, "rank": 1} for one in logprobs]
    raw = reply([{**one, "top_logprobs": [one]} for one in ranked], weight_versions=[{"start": 0}])
    read, whole = client.parse_generate_response(raw), json.loads(raw)
    (choice,) = read["choices"]
    entries = choice.pop("logprobs")["content"]
    assert repr(entries) == repr([ratchet_compat.Entry(7, one) for one in logprobs])
    sent = whole["choices"][0]
    assert choice == {name: sent.get(name) for name in choice}
    assert {**read, "choices": whole["choices"]} == {name: whole.get(name) for name in read}


def test_a_reply_has_all_that_renderers_reads() -> None:
    source = inspect.getsource(client.generate)
    for name, kept in (("choice", ratchet_compat.Choice), ("data", ratchet_compat.Reply)):
        read = set(re.findall(rf'\b{name}\.get\("(\w+)"\)', source))
        assert read and read <= set(kept.__struct_fields__)


@pytest.mark.parametrize("raw", [b'{"choices": [{}]}', reply([], logprobs=None), b'{"a": [1.5]}'])
def test_a_reply_of_another_form_is_left_to_renderers(raw: bytes) -> None:
    ratchet_compat.apply()
    assert client.parse_generate_response(raw) == json.loads(raw)
    with pytest.raises(ValueError):
        client.parse_generate_response(raw[:-1])


def test_routing_of_experts_is_left_to_renderers() -> None:
    ratchet_compat.apply()
    data = "AAEC" * 100
    sent = {"data": data, "start": 0, "shape": [1], "dtype": "uint8"}
    read = client.parse_generate_response(reply([], routed_experts=sent).replace(b": ", b":"))
    routed = read["choices"][0]["routed_experts"]
    assert {**routed, "data": bytes(routed["data"])} == {**sent, "data": data.encode()}


def test_messages_begin_as_verifiers_makes_them() -> None:
    ratchet_compat.apply()
    before = time.time()
    one, other = (MessageNode.model_construct(message=UserMessage(content="x")) for _ in range(2))
    assert before <= one.timestamp <= other.timestamp <= time.time()
    assert one.token_ids == [] and one.token_ids is not other.token_ids
    assert one.model_dump(exclude={"timestamp"}) == MessageNode(
        message=UserMessage(content="x")
    ).model_dump(exclude={"timestamp"})
