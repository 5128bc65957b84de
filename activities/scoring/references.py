"""Model references: log-probabilities of exact token ids from a vLLM server.

The server scores the tokens as a prompt, through `/v1/completions`, which every vLLM offers
without special flags. Facts about vLLM 0.32 this rests on:

- `prompt_logprobs: 0` returns the log-probability of each prompt token and of no other; the first
  entry is null. Such a request never reads the prefix cache, so it needs no salt.
- At least one token has to be sampled, so a prompt as long as the model's context is refused. The
  last token of such a sequence is scored as the sampled position instead, by `logprob_token_ids`.
- A token id that the model does not have is answered with 400, a model not served with 404.

Invariants: the key of an endpoint, and its other header values, are read from the environment when
a request is made, go into its headers and nowhere else: they are masked in others' messages before
those become part of an error. One process never has more requests in flight at an endpoint than the
config allows, however many event loops send them. A request goes to the URL of its endpoint with
the fewest in flight, and to one that failed lately only if all have.
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.configs.reference import DEFAULT_KEY_VAR, HIDDEN, FrozenModelConfig

T = TypeVar("T")

LIVE_CONCURRENT = 32
"""Requests in flight at the policy's own engine, which samples rollouts at the same time."""

LIVE_TIMEOUT_S, LIVE_CONNECT_S, LIVE_RETRIES = 60.0, 10.0, 3
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
"""Wait before a request is retried after a server error, which doubles; the longest wait."""
AVOIDED_S = 10.0
"""For how long a URL that failed is used only if there is no other."""
BUSY_S = 2.0
"""Wait before a live engine that is paused or overloaded is queried again."""

_SHOWN = 300
_ACCESS = (401, 403)
_BUSY = (429, 502, 503, 504)
_UNREADABLE = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
"""Errors about the request itself, whose messages repeat parts of it, headers included."""


class ReferenceLost(Exception):
    """Nothing usable answers at a reference's address; a retry may succeed.

    `live` says that it was an engine of the policy, which may have been replaced.
    """

    def __init__(self, message: str, *, live: bool) -> None:
        super().__init__(message)
        self.live = live


def key_of(variable: str) -> str:
    """The key in an environment variable, without white space around it; "" if there is none.

    Raises CreditError, which names the variable alone, if no header can hold it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not (key.isascii() and key.isprintable()):
        raise CreditError(
            f"the environment variable {variable} of this worker does not hold a valid key: it "
            "contains characters other than printable ASCII"
        )
    return key


def without_keys(text: str, variables: Iterable[str]) -> str:
    """`text` with the values of environment variables masked wherever they occur."""
    for variable in variables:
        held = os.environ.get(variable, "") if variable else ""
        for key in (held, held.strip()):
            text = text.replace(key, HIDDEN) if key else text
    return text


class Balance:
    """How many requests are in flight at each URL of one event loop, and which failed lately."""

    def __init__(self) -> None:
        self._load: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}

    @contextmanager
    def least_loaded(self, urls: Sequence[str]) -> Iterator[str]:
        """The URL with the fewest in flight, which counts the block as one more; one that failed
        lately only if all have.
        """
        now = time.monotonic()
        late = {url: now < self._failed_at.get(url, -math.inf) + AVOIDED_S for url in urls}
        url = min(urls, key=lambda url: (late[url], self._load[url]))
        self._load[url] += 1
        try:
            yield url
        finally:
            self._load[url] -= 1

    def fail(self, url: str) -> None:
        """Avoids a URL for a while."""
        self._failed_at[url] = time.monotonic()


@dataclass(frozen=True)
class Endpoint:
    """The place of a reference: `root` without '/v1', more such URLs in `others`, and its served
    name. `header_vars` are pairs of a header and the variable with its value.
    """

    root: str
    model: str
    key_var: str = ""
    max_concurrent: int = LIVE_CONCURRENT
    live: bool = False
    others: tuple[str, ...] = ()
    header_vars: tuple[tuple[str, str], ...] = ()
    timeout_s: float = LIVE_TIMEOUT_S
    connect_timeout_s: float = LIVE_CONNECT_S
    max_retries: int = LIVE_RETRIES

    @staticmethod
    def frozen(config: FrozenModelConfig) -> "Endpoint":
        """The endpoint of a frozen model."""
        return Endpoint(
            config.root,
            config.name,
            config.api_key_var,
            config.max_concurrent,
            others=tuple(url.removesuffix("/v1") for url in config.more_urls),
            header_vars=tuple(config.headers_from_env.items()),
            timeout_s=config.timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            max_retries=config.max_retries,
        )

    @property
    def roots(self) -> tuple[str, ...]:
        """Every URL at which it is served."""
        return (self.root, *self.others)

    def headers(self) -> dict[str, str]:
        """Authorization, if the endpoint has a key, and the headers whose variables are set. Raises
        CreditError as `key_of` does.
        """
        key = key_of(self.key_var)
        headers = {name: key_of(variable) for name, variable in self.header_vars}
        headers = {name: value for name, value in headers.items() if value}
        return {**headers, "Authorization": f"Bearer {key}"} if key else headers

    def shown(self, text: str) -> str:
        """The beginning of a message about a request there, without the values of headers."""
        variables = (self.key_var, *(variable for _, variable in self.header_vars))
        return without_keys(text, variables)[:_SHOWN]

    def __str__(self) -> str:
        what = "the policy's engine" if self.live else "the reference"
        return f"{what} {self.model!r} at {', '.join(self.roots)}"


class References:
    """The reference endpoints of one process; HTTP runs in the event loop that `bind` was given."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client = self._outside = httpx.AsyncClient()
        self._slots: dict[tuple[tuple[str, ...], int], asyncio.Semaphore] = {}
        self._balance = Balance()
        self._contexts: dict[tuple[str, str], int] = {}

    def bind(self) -> None:
        """Makes the running event loop the one in which requests are made; safe to repeat."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        # Neither connections nor semaphores survive the loop that they were made in. Engines are
        # reached directly; other servers through the environment's proxies and certificates.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(limits=limits, trust_env=False)
        self._outside = httpx.AsyncClient(limits=limits)
        self._slots = {}

    async def close(self) -> None:
        """Closes all connections; requests in flight fail."""
        await self._client.aclose()
        await self._outside.aclose()

    def frozen(self, config: FrozenModelConfig) -> "VllmReference":
        """A frozen model."""
        return VllmReference(self, Endpoint.frozen(config))

    def live(self, url: str, model: str) -> "VllmReference":
        """The policy as the engine at `url` serves it, under `model`."""
        return VllmReference(self, Endpoint(url.rstrip("/"), model, live=True))

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` in the bound loop; any loop may await this."""
        assert self._loop is not None, "bind() comes before requests"
        if asyncio.get_running_loop() is self._loop:
            return await work()

        async def there() -> T:
            return await work()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), self._loop))

    def slots(self, endpoint: Endpoint) -> asyncio.Semaphore:
        """Limits requests in flight at an endpoint; equal configs share the limit."""
        place = (endpoint.roots, endpoint.max_concurrent)
        return self._slots.setdefault(place, asyncio.Semaphore(endpoint.max_concurrent))

    async def ask(
        self, endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Sends one request; retries it, at another URL if there is one, while the server cannot be
        reached or reports a server error.

        A live engine that is only slow or busy, such as a paused one, is queried for as long as
        the caller waits. Returns an answer below 500 that is not 429. Raises ReferenceLost, and
        CreditError if the endpoint's key is invalid.
        """
        trouble, failures = "", 0
        headers = endpoint.headers()
        timeout = httpx.Timeout(endpoint.timeout_s, connect=endpoint.connect_timeout_s, pool=None)
        client = self._client if endpoint.live else self._outside
        while failures <= endpoint.max_retries:
            if failures:
                await asyncio.sleep(min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** (failures - 1)))
            with self._balance.least_loaded(endpoint.roots) as root:
                try:
                    answer = await client.request(
                        method, f"{root}{path}", json=body, headers=headers, timeout=timeout
                    )
                except httpx.HTTPError as error:
                    busy = isinstance(error, httpx.ReadTimeout)
                    said = "" if isinstance(error, _UNREADABLE) else endpoint.shown(str(error))
                    trouble = f"{type(error).__name__} {said}".strip()
                else:
                    if answer.status_code < 500 and answer.status_code != 429:
                        return answer
                    busy = answer.status_code in _BUSY
                    trouble = f"HTTP {answer.status_code}: {endpoint.shown(answer.text)}"
            if endpoint.live and busy:
                failures = 0
                await asyncio.sleep(BUSY_S)
                continue
            self._balance.fail(root)
            trouble = f"{trouble}, from {root}" if endpoint.others else trouble
            failures += 1
        raise ReferenceLost(
            f"{endpoint} does not answer ({trouble}); is a server running there?",
            live=endpoint.live,
        )

    async def models(self, endpoint: Endpoint) -> dict[str, int | None]:
        """Context length in tokens of each model served there; None where it is not reported.

        Raises ReferenceLost and CreditError.
        """
        answer = await self.ask(endpoint, "GET", "/v1/models")
        if answer.status_code != 200:
            raise refused(endpoint, answer)
        result = read_json(answer)
        cards = result.get("data") if isinstance(result, dict) else None
        if not isinstance(cards, list):
            raise CreditError(
                f"{endpoint}: /v1/models does not return a list of models; base_url must be that "
                "of an OpenAI-compatible endpoint"
            )
        lengths = {
            str(card.get("id")): card.get("max_model_len")
            for card in cards
            if isinstance(card, dict)
        }
        return {
            name: length if isinstance(length, int) else None for name, length in lengths.items()
        }

    async def context(self, endpoint: Endpoint, length: int) -> int | None:
        """The context of the endpoint's model in tokens; None if it is not reported.

        A cached value is used for a sequence of `length` that fits into it; otherwise the server is
        queried again, since another one may listen there by then.
        """
        place = (endpoint.root, endpoint.model)
        known = self._contexts.get(place)
        if known is not None and length <= known:
            return known
        reported = (await self.models(endpoint)).get(endpoint.model)
        if reported is not None:
            self._contexts[place] = reported
        return reported


class VllmReference:
    """Scores sequences of exact token ids by one model; made by `References`."""

    def __init__(self, references: References, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._references = references

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each token given those before it [T].

        The first is 0.0: nothing precedes it. Raises CreditError if a retry would not help,
        ReferenceLost if it may.
        """
        ids = list(token_ids)
        if len(ids) < 2:
            return [0.0] * len(ids)
        return await self._references.run(lambda: self._score(ids))

    async def _score(self, ids: list[int]) -> list[float]:
        references, endpoint = self._references, self.endpoint
        async with references.slots(endpoint):
            context = await references.context(endpoint, len(ids))
            if context is not None and len(ids) > context:
                raise too_long(endpoint, context, len(ids))
            full = context is not None and len(ids) == context
            body = score_request(endpoint.model, ids, full=full)
            answer = await references.ask(endpoint, "POST", "/v1/completions", body)
        if answer.status_code != 200:
            raise refused(endpoint, answer)
        try:
            return scores(read_json(answer), ids, full=full)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CreditError(
                f"{endpoint} does not score every token of a prompt ({error}); use a vLLM server, "
                "which supports `prompt_logprobs`"
            ) from None


def too_long(endpoint: Endpoint, context: int, length: int) -> CreditError:
    """The error for a sequence that does not fit into the model."""
    remedy = (
        "raise the algorithm's demo_tokens to the longest demonstration"
        if endpoint.live
        else "serve it with a longer --max-model-len, or lower trainer.seq_len"
    )
    message = f"{endpoint} has a context of {context} tokens and cannot score {length}; {remedy}"
    return CreditError(message)


def score_request(model: str, ids: list[int], *, full: bool) -> dict[str, Any]:
    """Body of a completion request that scores `ids` [T]; `full`: they fill the context."""
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}
    body |= {"prompt": ids, "prompt_logprobs": 0}
    if full:
        body |= {"prompt": ids[:-1], "logprobs": 0, "logprob_token_ids": [ids[-1]]}
        body |= {"return_tokens_as_token_ids": True}
    return body


def scores(answer: dict[str, Any], ids: list[int], *, full: bool) -> list[float]:
    """Log-probabilities [T] from the answer to `score_request`; the first is 0.0.

    Raises KeyError, IndexError, TypeError or ValueError if a token has none.
    """
    choice = answer["choices"][0]
    scored = ids[1:-1] if full else ids[1:]
    entries = choice["prompt_logprobs"][1:]
    pairs = zip(entries, scored, strict=True)
    result = [float(entry[str(token)]["logprob"]) for entry, token in pairs]
    if full:
        result.append(float(choice["logprobs"]["top_logprobs"][0][f"token_id:{ids[-1]}"]))
    if not all(map(math.isfinite, result)):
        raise ValueError("a log-probability is not a finite number")
    return [0.0, *result]


def refused(endpoint: Endpoint, answer: httpx.Response) -> CreditError | ReferenceLost:
    """The error for an answer that is not a success: what, where, and how to fix it."""
    code = answer.status_code
    if endpoint.live and code in (403, 404):
        # Another epoch of the engine, or another server, listens there.
        return ReferenceLost(f"{endpoint} is no longer served (HTTP {code})", live=True)
    if code in _ACCESS:
        state = "holds a key that it does not accept" if key_of(endpoint.key_var) else "is not set"
        return CreditError(
            f"{endpoint} requires a key (HTTP {code}), and the environment variable "
            f"{endpoint.key_var or DEFAULT_KEY_VAR} of this worker {state}"
        )
    said = endpoint.shown(answer.text)
    if code == 404:
        return CreditError(
            f"{endpoint} is not served there (HTTP 404: {said}); name must be one of its "
            "/v1/models, and base_url that of an OpenAI-compatible endpoint"
        )
    remedy = ""
    if "vocabulary" in said:
        remedy = "; the reference must have the policy's tokenizer"
    return CreditError(f"{endpoint} refuses to score a sample (HTTP {code}: {said}){remedy}")


def read_json(answer: httpx.Response) -> Any:
    """The answer's JSON value, of any type; {} if it is no JSON."""
    try:
        return answer.json()
    except ValueError:
        return {}
