"""Bridges gaps between verifiers 0.4.0, renderers 0.1.12, vLLM 0.32 and reasoning-gym 0.1.25.

The only module that patches other packages at run time. Seven gaps, each closed only if present:

1. vLLM 0.32 names a sampled token by an integer `token_id` in `/inference/v1/generate`, where
   renderers up to 0.1.12 insists on the text 'token_id:<n>' and refuses every response. Can go
   once the oldest supported renderers has `renderers.client._logprob_token_id`.
2. vLLM 0.32 says which weights sampled which tokens (`weight_versions`), and verifiers 0.4.0
   drops it. It is kept in `trace.info['weight_versions']`: per model call, in order, the list of
   {'version', 'start', 'end'} spans over that call's sampled tokens. Can go once the oldest
   supported verifiers has `MessageNode.weight_versions`.
3. reasoning-gym 0.1.25 imports what any of its tasks needs, including three packages that
   registries have as source only. Stub modules replace those that are not installed, during that
   import. Can go once these have wheels.
4. vLLM returns the token ids of a chat completion on request (`return_token_ids`), and verifiers
   0.4.0 drops them and the log-probabilities. They become the tokens of the response, as those of
   `/inference/v1/generate` are. Can go once verifiers' EvalClient does it.
5. vLLM sends rank and candidates with each sampled token, and renderers makes objects of them all,
   the largest part of what a token costs in an env server. `parse_reply` leaves them out. Can go
   once renderers reads no more than it uses.
6. pydantic reads the signature of a default's factory each time that it makes a message without
   validation, and those of builtins take it longer than all else: half a millisecond a rollout.
   Equal functions of Python take their places. Can go once pydantic keeps what it has read.
7. verifiers asks an engine through the OpenAI SDK over httpx, the dearest part of a short rollout.
   `ratchet_http.EngineClient` takes that place where it suits. Can go once verifiers' train client
   takes a client of ours.
"""

import contextvars
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

WEIGHT_VERSIONS = "weight_versions"
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")
"""What requirements/*.lock leaves out, so that nothing is compiled at set-up."""

_spans: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar(
    "ratchet_weight_versions", default=None
)


def needed() -> bool:
    """Whether the installed packages have the gaps."""
    import renderers.client
    from verifiers.v1.graph import MessageNode

    return (
        not hasattr(renderers.client, "_logprob_token_id")
        or WEIGHT_VERSIONS not in MessageNode.model_fields
    )


def apply() -> None:
    """Closes the gaps in this process; does nothing if there are none, or when repeated."""
    import renderers.client as client
    from verifiers.v1.clients.train import TrainClient

    _keep_tokens_of_chats()
    _name_factories()
    _ask_leanly()
    if not needed() or getattr(TrainClient, "ratchet_compat", False):
        return
    parse, parse_whole = client._parse_completion_logprobs, client.parse_generate_response
    get_response = TrainClient.get_response

    def parse_any(choice: Mapping[str, Any], completion_ids: list[int]) -> list[float]:
        _spans.set(choice.get(WEIGHT_VERSIONS))
        content = (choice.get("logprobs") or {}).get("content") or []
        plain = logprobs_of(content, completion_ids)
        if plain is not None:
            return plain
        if isinstance(content, list) and content:
            entries = list(map(_named, content))
            choice = {**choice, "logprobs": {**choice["logprobs"], "content": entries}}
        logprobs: list[float] = parse(choice, completion_ids)
        return logprobs

    async def get_response_with_spans(self: Any, *args: Any, **kwargs: Any) -> Any:
        _spans.set(None)
        response = await get_response(self, *args, **kwargs)
        turn = kwargs.get("turn")
        if turn is not None:
            turn.trace.info.setdefault(WEIGHT_VERSIONS, []).append(_spans.get())
        return response

    def parse_reply(raw: bytes) -> dict[str, Any]:
        # What it has besides, or lacks, is for renderers to read, or to explain.
        if client.ROUTED_EXPERTS_DATA_PREFIX in raw:
            whole: dict[str, Any] = parse_whole(raw)
            return whole
        try:
            return read_reply(raw)
        except ValueError:
            whole = parse_whole(raw)
            return whole

    client._parse_completion_logprobs = parse_any
    client.parse_generate_response = parse_reply
    TrainClient.get_response = get_response_with_spans
    TrainClient.ratchet_compat = True


def _ask_leanly() -> None:
    from verifiers.v1.clients import train

    from ratchet.activities.envs.shipped.ratchet_http import EngineClient, suits

    stock = train.build_async_openai
    if getattr(stock, "ratchet_compat", False):
        return

    def build(config: Any) -> Any:
        return EngineClient(config) if suits(config) else stock(config)

    build.ratchet_compat = True  # type: ignore[attr-defined]
    train.build_async_openai = build


def _now() -> float:
    return time.time()


def _empty() -> list[Any]:
    return []


def _name_factories() -> None:
    from verifiers.v1.graph import MessageNode

    equal = {time.time: _now, list: _empty}
    for field in MessageNode.model_fields.values():
        if field.default_factory in equal:
            field.default_factory = equal[field.default_factory]


class Entry(msgspec.Struct):
    """What is read of a sampled token; the rest is dropped."""

    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[Entry]


class Choice(msgspec.Struct):
    """What is read of a choice, here and by renderers."""

    logprobs: _Logprobs
    token_ids: Any = None
    finish_reason: Any = None
    weight_versions: Any = None
    routed_experts: Any = None
    sampling_mask: Any = None


class Reply(msgspec.Struct):
    """What is read of vLLM's answer to a request for tokens."""

    choices: list[Choice]
    request_id: Any = None
    usage: Any = None
    prompt_token_ids: Any = None
    mm_placeholders: Any = None


_replies = msgspec.json.Decoder(Reply)


def read_reply(raw: bytes) -> dict[str, Any]:
    """The answer as renderers takes it, with entries instead of objects for sampled tokens. Raises
    ValueError for an answer of another form.
    """
    reply = _replies.decode(raw)
    choices = [
        {**msgspec.structs.asdict(choice), "logprobs": {"content": choice.logprobs.content}}
        for choice in reply.choices
    ]
    return {**msgspec.structs.asdict(reply), "choices": choices}


def _named(entry: Any) -> Any:
    """The entry of a sampled token with the name by which renderers knows it."""
    plain = msgspec.to_builtins(entry)
    if isinstance(plain, dict) and "token" not in plain and "token_id" in plain:
        return {**plain, "token": f"token_id:{plain['token_id']}"}
    return plain


def logprobs_of(content: Any, completion_ids: list[int]) -> list[float] | None:
    """The log-probabilities (nats) of sampled tokens [T], by the entries for them; None if these
    are not all that they should be, which renderers explains better.
    """
    if not isinstance(content, list) or not all(type(entry) is Entry for entry in content):
        return None
    logprobs = [entry.logprob for entry in content]
    sound = [entry.token_id for entry in content] == completion_ids
    return logprobs if sound and all(map(math.isfinite, logprobs)) else None


def _keep_tokens_of_chats() -> None:
    from verifiers.v1.clients.eval import EvalClient

    if getattr(EvalClient, "ratchet_compat", False):
        return
    get_response = EvalClient.get_response

    async def get_response_with_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = await get_response(self, *args, **kwargs)
        if response.tokens is None:
            response.tokens = tokens_of_chat(response.raw)
        return response

    EvalClient.get_response = get_response_with_tokens
    EvalClient.ratchet_compat = True


def tokens_of_chat(raw: Mapping[str, Any]) -> Any:
    """The TurnTokens of a provider's reply; None if it has no token ids."""
    from verifiers.v1.types import TurnTokens

    choice = (raw.get("choices") or [{}])[0]
    prompt, reply = raw.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or reply is None:
        return None
    entries = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in entries]
    return TurnTokens(
        prompt_ids=prompt,
        completion_ids=reply,
        completion_logprobs=logprobs if len(logprobs) == len(reply) else [],
    )


class _Absent(ModuleType):
    """A stub for a module that one task of the package needs and no other."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"this task needs {self.__name__}, which registries have as source only "
            f"(pip install {self.__name__})"
        )


def reasoning_gym() -> Any:
    """The package. Raises ModuleNotFoundError if it is not installed."""
    absent = [name for name in SOURCE_ONLY if importlib.util.find_spec(name) is None]
    sys.modules.update({name: _Absent(name) for name in absent})
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        for name in absent:
            del sys.modules[name]
