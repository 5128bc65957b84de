"""Access control: bearer keys, rate limits, and requests made by foreign web pages.

Plain ASGI, so that streams pass untouched. Keys guard everything below /v1 and /metrics; what is
open without one (health, docs, the dashboard's files) reveals nothing about any run. A stream ends
once its key is no longer valid.
"""

import asyncio
import ipaddress
import math
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.api.http.keyring import Keyring
from ratchet.api.http.problems import reply
from ratchet.api.schemas.keys import ApiKey
from ratchet.api.schemas.problems import ApiProblem

SAFE = ("GET", "HEAD", "OPTIONS")
GUARDED = ("/v1", "/metrics")
STREAM = b"text/event-stream"
MOST_STREAMS = 32
"""Of one key."""
MOST_OPEN_STREAMS = 512
"""Of an API without keys."""
MOST_HEAD = 32 * 1024
"""Bytes of a request's address and headers, which are read before any key is checked."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
UNFRAMED = (b"content-security-policy", b"frame-ancestors 'none'")
"""For replies without a policy of their own; the dashboard's policy includes it, too."""


def is_loopback(host: str) -> bool:
    """Whether a bound address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """The scheme, host and port of an address as browsers write them; '' if it has none."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    usual = {"http": 80, "https": 443}
    if parts.scheme not in usual or not host:
        return ""
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + (f":{port}" if port and port != usual[parts.scheme] else "")


class Bucket:
    """A token bucket: `per_minute` requests, a tenth of a minute's worth of them at once."""

    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60.0
        self._most = max(per_minute / 10.0, 1.0)
        self._left = self._most
        self._at = time.monotonic()

    def take(self) -> float:
        """0.0 if a request may pass, else the seconds until one may."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._rate


def _head_of(scope: Scope) -> int:
    """How many bytes a request's head has, but for its method and version."""
    headers = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) + headers


def _refused(status: int, kind: str, title: str, detail: str, wait_s: float = 0.0) -> ApiProblem:
    return ApiProblem(status, kind, title, detail, retry_after_s=math.ceil(wait_s) or None)


class Guard:
    """Middleware that lets a request pass or answers it with a problem document."""

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring | None,
        hosts: tuple[str, ...],
        public_url: str = "",
    ) -> None:
        """Without a `keyring` no key is needed."""
        self._app = app
        self._public = public_url
        self._keyring = keyring
        self._hosts = hosts
        self._buckets: dict[ApiKey, Bucket] = {}
        self._streams: Counter[ApiKey | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        key: ApiKey | None = None
        streams = False

        async def send_safely(message: Message) -> None:
            nonlocal streams
            if streams and key and self._keyring and not self._keyring.holds(key):
                # The timeout below ends the stream instead of sending more.
                limit.reschedule(0.0)
                await asyncio.get_running_loop().create_future()
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                streams = any(
                    name.lower() == b"content-type" and value.startswith(STREAM)
                    for name, value in given
                )
                policy = any(name.lower() == UNFRAMED[0] for name, _ in given)
                message["headers"] = [*given, *HEADERS, *([] if policy else [UNFRAMED])]
            await send(message)

        state = scope.setdefault("state", {})
        try:
            self._require_accepted(scope)
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            self._require_here(scope["method"], headers)
            if scope["path"].startswith(GUARDED) and self._keyring:
                key = state["key"] = self._known(self._keyring, headers)
                self._require_allowed(self._keyring, key, scope["method"])
            accepted = (value for name, value in scope["headers"] if name.lower() == b"accept")
            asks_stream = any(STREAM in value for value in accepted)
            if asks_stream:
                self._require_room(key)
        except ApiProblem as problem:
            state["refused"] = problem.document.type.rpartition(":")[2]
            response = reply(problem)
            if problem.document.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send_safely)
            return
        self._streams[key] += asks_stream
        try:
            async with asyncio.timeout(None) as limit:
                await self._app(scope, receive, send_safely)
        except TimeoutError:
            if not limit.expired():
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams[key] -= asks_stream
            self._streams += Counter()

    def _require_accepted(self, scope: Scope) -> None:
        """Raises 431 for a head that is too large, 503 on a connection too many, and 400 for a body
        that was not read because the request asks for another protocol.
        """
        why = scope["state"].get("refuse")
        if why == "head" or _head_of(scope) > MOST_HEAD:
            raise _refused(
                431,
                "head-too-large",
                "The head of the request is too large",
                f"Address and headers of a request may have at most {MOST_HEAD} bytes together; "
                "send fewer or shorter parameters, cookies and headers.",
            )
        if why == "upgrade":
            raise _refused(
                400,
                "upgrade-with-body",
                "The request asks for another protocol",
                "The API speaks HTTP/1.1 only and does not read the body of a request that has the "
                "header Upgrade; send it without Upgrade (curl: --http1.1, Java's HttpClient: "
                "version(HTTP_1_1)).",
            )
        if why == "connections":
            raise _refused(
                503,
                "too-many-connections",
                "Too many connections",
                "The API has as many connections as it takes from all clients together; close "
                "some, and try again.",
                5.0,
            )

    def _require_room(self, key: ApiKey | None) -> None:
        """Raises 429 if the key, or an API without keys, has reached its limit of streams."""
        most = MOST_STREAMS if key else MOST_OPEN_STREAMS
        if self._streams[key] >= most:
            raise _refused(
                429,
                "too-many-streams",
                "Too many streams",
                f"{most} event streams are open{' with this key' if key else ''}; close one.",
                5.0,
            )

    def _require_here(self, method: str, headers: MutableMapping[bytes, str]) -> None:
        """Refuses what another site's page sends, or what is sent under a misleading host name."""
        host = headers.get(b"host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            sender = urlsplit(headers.get(b"origin", "")).netloc
        except ValueError:
            raise _refused(
                400,
                "bad-header",
                "A header cannot be read",
                "Host and Origin must each name a host and may name a port; one of them does not.",
            ) from None
        if self._hosts and name not in self._hosts:
            raise _refused(
                403,
                "unknown-host",
                "The Host header is not accepted",
                "This API has no keys, so it only accepts requests addressed to "
                f"{', '.join(self._hosts)}. Use one of these names, or create an API key.",
            )
        origin = headers.get(b"origin")
        own = origin is None or sender == host
        # A proxy may forward under another name what was sent to the public one.
        if (
            method not in SAFE
            and not own
            and (not self._public or origin_of(origin or "") != self._public)
        ):
            raise _refused(
                403,
                "foreign-origin",
                "The request comes from another site",
                "Pages of other sites may not change anything here. If a proxy in front of the API "
                "rewrites the Host header, set RATCHET_PUBLIC_URL of the API to the address that "
                "browsers use.",
            )

    def _known(self, keyring: Keyring, headers: MutableMapping[bytes, str]) -> ApiKey:
        sent = headers.get(b"authorization", "")
        key = keyring.bearer(sent)
        if key is None:
            raise _refused(
                401,
                "no-key",
                "The API key is not valid" if sent else "An API key is required",
                "Send `Authorization: Bearer KEY`; the operator of this API creates keys with "
                "`ratchet keys new NAME`.",
            )
        return key

    def _require_allowed(self, keyring: Keyring, key: ApiKey, method: str) -> None:
        needed = "read" if method in SAFE else "write"
        if needed not in key.scopes:
            raise _refused(
                403,
                "scope-missing",
                "The key lacks a scope",
                f"Key {key.name!r} does not have the scope {needed!r}.",
            )
        if key not in self._buckets:
            self._buckets = {k: b for k, b in self._buckets.items() if keyring.holds(k)}
            self._buckets[key] = Bucket(key.per_minute)
        wait = self._buckets[key].take()
        if wait:
            raise _refused(
                429,
                "too-many-requests",
                "Too many requests",
                f"Key {key.name!r} may send {key.per_minute} requests a minute.",
                wait,
            )


def documented_security(document: dict[str, Any]) -> None:
    """Adds to an OpenAPI document that keys may be required, and which paths need none."""
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "Required where the API has keys; scope 'write' for all but reads.",
        }
    }
    schema = {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}
    reported = {
        "400": "Host, Origin or the body cannot be parsed.",
        "401": "No key, or an unknown one.",
        "403": "The key lacks the scope, or a page of another site sent the request.",
        "429": "The key's rate limit is exceeded; Retry-After says when to try again.",
        "431": "Address and headers are too large together.",
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            guarded = path.startswith(GUARDED)
            wanted = reported if guarded else {s: reported[s] for s in ("400", "403", "431")}
            operation["security"] = [{}, {"key": []}] if guarded else []
            for status, description in wanted.items():
                content = {"application/problem+json": schema}
                operation["responses"].setdefault(
                    status, {"description": description, "content": content}
                )
