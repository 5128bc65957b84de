"""HTTP of an env server, with an engine on the one side and its own harness on the other.

httpx below the OpenAI SDK takes much of what a short rollout costs an env server; the aiohttp that
verifiers brings along takes a fraction of it. `EngineClient` is what verifiers and renderers use of
an `AsyncOpenAI`: it sends the same requests and raises the SDK's errors, with the same texts.

Invariants: nothing is sent twice; time-outs and the number of connections are those of verifiers'
own client; whoever cancels a call ends its request.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from openai import APIConnectionError, APIStatusError, APITimeoutError
from verifiers.v1.clients.base import DEFAULT_LIMITS
from verifiers.v1.configs.client import BaseClientConfig, resolve_api_key, resolve_headers

KEEPALIVE_S = 5.0
"""As long as httpx keeps an idle connection; engines keep them for longer."""
UNBOUNDED = aiohttp.ClientTimeout(total=None, sock_connect=None)


def session(
    connections: int, timeout: aiohttp.ClientTimeout = UNBOUNDED, **more: Any
) -> aiohttp.ClientSession:
    """A pool of at most so many connections, by no proxy, of the event loop that runs."""
    connector = aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, **more)


def suits(config: BaseClientConfig) -> bool:
    """Whether `EngineClient` reaches an endpoint: by plain HTTP, and by no proxy."""
    url = urlsplit(config.base_url)
    proxies = getproxies()
    proxied = "http" in proxies or "all" in proxies
    return url.scheme == "http" and not (proxied and not proxy_bypass(url.hostname or ""))


@dataclass(frozen=True)
class Reply:
    """The body of an answer."""

    content: bytes


class EngineClient:
    """Requests to one engine."""

    def __init__(self, config: BaseClientConfig) -> None:
        self.base_url = f"{config.base_url.rstrip('/')}/"
        self._config = config
        key = {"Authorization": f"Bearer {resolve_api_key(config)}", "Accept": "application/json"}
        self._headers = {**key, **resolve_headers(config)}
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, *, body: Any, options: Any = None, cast_to: Any = None
    ) -> Reply:
        """What the engine answers to `body` at a whole URL."""
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        headers = {"Content-Type": "application/json", **((options or {}).get("headers") or {})}
        return await self._ask("POST", path, data=data.encode(), headers=headers)

    async def get(self, path: str, *, cast_to: Any = None) -> Any:
        """The JSON at a path below the base URL."""
        reply = await self._ask("GET", self.base_url + path.removeprefix("/"))
        return json.loads(reply.content)

    async def _ask(self, method: str, url: str, **request: Any) -> Reply:
        try:
            async with self._pool().request(
                method, url, allow_redirects=False, **request
            ) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise APITimeoutError(request=httpx.Request(method, url)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise APIConnectionError(request=httpx.Request(method, url)) from error
        if answer.status >= 300:
            raise _refusal(method, url, answer.status, content)
        return Reply(content)

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self._config.timeout
            timeout = aiohttp.ClientTimeout(
                total=None,
                connect=limits.pool,
                sock_connect=limits.connect,
                sock_read=limits.read,
            )
            connections = DEFAULT_LIMITS.max_connections or 0
            self._session = session(connections, timeout, headers=self._headers)
        return self._session

    async def close(self) -> None:
        """Ends its connections."""
        if self._session is not None:
            await self._session.close()


def _refusal(method: str, url: str, status: int, content: bytes) -> APIStatusError:
    """As the SDK words it."""
    text = content.decode(errors="replace").strip()
    body: Any = text
    try:
        body = json.loads(text)
        said = f"Error code: {status} - {body}"
    except ValueError:
        said = text or f"Error code: {status}"
    response = httpx.Response(status, content=content, request=httpx.Request(method, url))
    return APIStatusError(said, response=response, body=body)
