"""Bridges gaps between verifiers 0.4.0, renderers 0.1.12, vLLM 0.32 and reasoning-gym 0.1.25.

The only module that patches other packages at run time. Four gaps, each closed only if present:

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
"""

import contextvars
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

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
    if not needed() or getattr(TrainClient, "ratchet_compat", False):
        return
    parse = client._parse_completion_logprobs
    get_response = TrainClient.get_response

    def parse_any(choice: Mapping[str, Any], completion_ids: list[int]) -> list[float]:
        _spans.set(choice.get(WEIGHT_VERSIONS))
        content = (choice.get("logprobs") or {}).get("content") or []
        for entry in content:
            if "token" not in entry and "token_id" in entry:
                entry["token"] = f"token_id:{entry['token_id']}"
        logprobs: list[float] = parse(choice, completion_ids)
        return logprobs

    async def get_response_with_spans(self: Any, *args: Any, **kwargs: Any) -> Any:
        _spans.set(None)
        response = await get_response(self, *args, **kwargs)
        turn = kwargs.get("turn")
        if turn is not None:
            turn.trace.info.setdefault(WEIGHT_VERSIONS, []).append(_spans.get())
        return response

    client._parse_completion_logprobs = parse_any
    TrainClient.get_response = get_response_with_spans
    TrainClient.ratchet_compat = True


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
