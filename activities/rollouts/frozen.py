"""Rollouts sampled by a frozen model: how it is queried, and its text in the policy's tokens.

A frozen model is queried by chat completions, which every OpenAI-compatible server offers: exact
token ids would require vLLM's `--enable-scale-out`, and the policy's vocabulary. The policy's
renderer lays its text out in the policy's tokens, as if the policy had written it. So its samples
have no log-probabilities (0.0), no policy version (-1) and no weight labels: they never age, and
only supervised losses can use them.

Errors of such a rollout omit the endpoint's key, which HTTP libraries may repeat.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.activities.envs.rendering import load_tokenizer, make_renderer
from ratchet.activities.envs.samples import RolloutSample, UnusableTrace
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.references import Balance, ReferenceLost, without_keys
from ratchet.configs.env import SamplingConfig
from ratchet.configs.reference import HIDDEN, FrozenModelConfig

if TYPE_CHECKING:
    from verifiers.v1.trace import Branch, Trace

TEMPERATURE = 1.0
"""Temperature at which the trainer reads these samples: the frozen model's own sampling does not
describe the policy's distribution."""

_ACCESS = (401, 403)
_BAD_HEADER = "illegal header"
"""Start of HTTP libraries' messages that repeat a header; an env server's key may not be ours."""


class Seats:
    """Limits the rollouts that each frozen model samples at once in a process and event loop."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int], asyncio.Semaphore] = {}
        self._balance = Balance()

    @asynccontextmanager
    async def of(self, frozen: FrozenModelConfig) -> AsyncIterator[str]:
        """A slot at the URL with the fewest taken, of `max_concurrent` in total; equal configs
        share them.
        """
        place = (" ".join(frozen.base_urls), frozen.max_concurrent)
        seats = self._taken.setdefault(place, asyncio.Semaphore(frozen.max_concurrent))
        async with seats:
            with self._balance.least_loaded(frozen.base_urls) as url:
                yield url

    def fail(self, url: str) -> None:
        """Avoids a URL for a while."""
        self._balance.fail(url)


class Renderer(Protocol):
    """The methods of the renderers package's renderer that are used here."""

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of a conversation, optionally up to where a reply begins."""

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a reply."""


@dataclass(frozen=True)
class Turn:
    """A reply of the model, at `place` among a conversation's messages.

    `fresh`: it trains here. `cut`: its token limit ended it, so it has no end to learn.
    """

    place: int
    fresh: bool = True
    cut: bool = False


def request(
    frozen: FrozenModelConfig, sampling: SamplingConfig, task: dict[str, Any]
) -> dict[str, Any]:
    """A request of the env client. The env server reads the key, by its name."""
    client = {
        "type": "eval",
        "base_url": frozen.base_url,
        "api_key_var": frozen.api_key_var,
        "headers_from_env": frozen.headers_from_env,
        "timeout": {"connect": frozen.connect_timeout_s, "read": frozen.timeout_s},
    }
    return {
        "client": client,
        "model": frozen.name,
        "sampling": sampling.request(),
        "task_data": task,
    }


def at(request: dict[str, Any], url: str) -> dict[str, Any]:
    """A request of `request` for the model at one of its URLs."""
    return {**request, "client": {**request["client"], "base_url": url}}


def shown(frozen: FrozenModelConfig, error: dict[str, str]) -> dict[str, str]:
    """An error of a rollout {'type', 'message'} in which the endpoint's key does not occur."""
    message = error["message"]
    unfit = _BAD_HEADER in message.lower()
    return {**error, "message": HIDDEN if unfit else without_keys(message, frozen.variables)}


def trouble(
    frozen: FrozenModelConfig, error: dict[str, str], status: int | None = None
) -> ReferenceLost | CreditError:
    """The activity's error when the frozen model, by HTTP `status`, ended a rollout.

    ReferenceLost is retried, CreditError is the user's to fix.
    """
    places = ", ".join(url.removesuffix("/v1") for url in frozen.base_urls)
    who = f"the frozen model {frozen.name!r} at {places}"
    variables = " or ".join(frozen.variables)
    if _BAD_HEADER in error["message"].lower():
        return CreditError(
            f"the environment variable {variables} of env servers does not hold a valid key or "
            f"header for {who}: it contains white space or a special character"
        )
    if status in _ACCESS:
        return CreditError(
            f"{who} refuses access (HTTP {status}); the environment variable "
            f"{frozen.api_key_var} of env servers must hold a key that it accepts"
        )
    said = f"{error['type']}: {shown(frozen, error)['message'][:300]}"
    if status == 404:
        return CreditError(
            f"{who} is not served there (HTTP 404: {said}); name must be one of its /v1/models, "
            "and base_url that of an OpenAI-compatible endpoint"
        )
    return ReferenceLost(f"{who} ended a rollout ({said}); is it still served there?", live=False)


def lay_out(
    messages: Sequence[Any], turns: Sequence[Turn], renderer: Renderer, tools: Any = None
) -> list[RolloutSample]:
    """Samples of a conversation in which the model said the messages at `turns`, in order.

    A turn extends the sample before it if its prompt starts with all of that sample's tokens;
    else, as with templates that drop what was thought earlier, it begins another. The tokens that
    train are those which a reply adds to its prompt, through the token that ends it. Samples in
    which nothing trains are dropped.
    """
    messages = list(messages)
    ends = set(renderer.get_stop_token_ids())
    samples: list[RolloutSample] = []
    ids: list[int] = []
    mask: list[bool] = []

    def close() -> None:
        if any(mask):
            samples.append(RolloutSample(ids, mask, [0.0] * len(ids), [-1] * len(ids)))

    for turn in turns:
        asked = messages[: turn.place]
        prompt = list(renderer.render_ids(asked, tools=tools, add_generation_prompt=True))
        said = list(renderer.render_ids(messages[: turn.place + 1], tools=tools))
        shared = 0
        while shared < min(len(prompt), len(said)) and prompt[shared] == said[shared]:
            shared += 1
        prompt, reply = prompt[:shared], said[shared:]
        last = max((place for place, token in enumerate(reply) if token in ends), default=None)
        if last is not None:
            reply = reply[: last if turn.cut else last + 1]
        if prompt[: len(ids)] != ids:
            close()
            ids, mask = [], []
        mask = mask + [False] * (len(prompt) - len(ids)) + [turn.fresh] * len(reply)
        ids = prompt + reply
    close()
    return samples


class Layout:
    """Lays episodes out in the policy's tokens. Methods may be called from any thread."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # Encoding changes the state of a fast tokenizer.
        self._lock = threading.Lock()

    def samples(self, trace: "Trace[Any, Any, Any]") -> list[RolloutSample]:
        """Samples of one trace; each reply trains once, in the first branch that holds it.

        Raises UnusableTrace if the renderer cannot lay it out.
        """
        cut = {
            id(trace.nodes[call.node])
            for call in trace.calls
            if call.node is not None and call.finish_reason == "length"
        }
        trained: set[int] = set()
        samples: list[RolloutSample] = []
        for branch in trace.branches:
            if branch.trainable:
                with self._lock:
                    samples += self._branch(branch, trained, cut)
        return samples

    def _branch(self, branch: "Branch", trained: set[int], cut: set[int]) -> list[RolloutSample]:
        from verifiers.v1.clients.train import tool_to_wire
        from verifiers.v1.dialects.chat import message_to_wire

        turns = []
        for place, node in enumerate(branch.nodes):
            if node.sampled:
                turns.append(Turn(place, id(node) not in trained, id(node) in cut))
                trained.add(id(node))
        messages = [message_to_wire(message) for message in branch.messages]
        tools = [tool_to_wire(tool) for tool in branch.tools] or None
        try:
            return lay_out(messages, turns, self._renderer, tools)
        except (ValueError, NotImplementedError) as error:
            raise UnusableTrace(f"the policy's renderer cannot lay it out: {error}") from error


class Layouts:
    """The layouts of all runs of a process; each tokenizer and renderer is loaded once."""

    def __init__(self) -> None:
        self._loading: dict[tuple[str, str], asyncio.Task[Layout]] = {}

    async def layout(self, tokenizer: str, renderer: dict[str, Any]) -> Layout:
        """The layout for a folder with the policy's tokenizer; a failed load is tried again."""
        key = (tokenizer, json.dumps(renderer, sort_keys=True))
        result = self._loading.get(key)
        if result is None or (result.done() and (result.cancelled() or result.exception())):
            work = asyncio.to_thread(
                lambda: Layout(make_renderer(load_tokenizer(Path(tokenizer)), renderer))
            )
            result = self._loading[key] = asyncio.create_task(work)
        # Shielded: a cancelled caller must not cancel the load for the others.
        return await asyncio.shield(result)
