"""The audit log: every request has an id; each change and each refusal is a line of a log.

A line is one JSON object of the logger `ratchet.audit`: {time, request, key, client, method,
action, run, status, refused}. `key` is a key's name, '' without one; `action` the route's name.
No line contains a body or a header. Refusals of unidentified callers are logged MOST_REFUSED a
minute, so that nobody can fill the disk with them; `/metrics` counts all of them. The run's events
show the same for requests that reached the run, from what Temporal records about the caller.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.api.http.security import SAFE, Bucket
from ratchet.api.schemas.problems import printable

HEADER = b"x-request-id"
MOST_REFUSED = 600
RUN = re.compile(r"/v1/runs/([a-z0-9][a-z0-9-]{0,63})(?:/|$)")

logger = logging.getLogger("ratchet.audit")


@dataclass(frozen=True)
class Caller:
    """Who sends a request: the name of a key ('' without one), and the request's id."""

    key: str
    request: str

    @staticmethod
    def of(request: Request) -> "Caller":
        """The caller of a request."""
        key = getattr(request.state, "key", None)
        return Caller(key.name if key else "", request.state.request_id)

    @property
    def record(self) -> dict[str, str]:
        """As events show it."""
        return {"by": self.key, "request_id": self.request}

    @property
    def identity(self) -> str:
        """The identity that the API sends to Temporal with each request."""
        return f"ratchet-api key={self.key} request={self.request}"


IDENTITY = re.compile(r"ratchet-api key=([A-Za-z0-9._-]{0,64}) request=([0-9a-f-]{36})", re.ASCII)


def record_of(identity: str) -> dict[str, str]:
    """The `record` of the caller with this identity; empty if it was not the API."""
    match = IDENTITY.fullmatch(identity)
    return Caller(match[1], match[2]).record if match else {}


class Audit:
    """Middleware that assigns ids to requests and logs them; the outermost of all."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is called with the kind of problem that a request was refused with."""
        self._app = app
        self._on_refused = on_refused
        self._lines = Bucket(MOST_REFUSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id = str(uuid.uuid4())
        status, where = 500, ""

        async def send_named(message: Message) -> None:
            nonlocal status, where
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", ()))
                where = dict(headers).get(b"location", b"").decode("latin-1")
                message["headers"] = [*headers, (HEADER, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            refused = state.get("refused", "")
            if refused:
                self._on_refused(refused)
            acts = scope["method"] not in SAFE and scope["path"].startswith("/v1")
            if (acts and not refused) or (refused and not self._lines.take()):
                logger.info(json.dumps(self._line(scope, status, where)))

    def _line(self, scope: Scope, status: int, where: str) -> dict[str, Any]:
        state, route = scope["state"], scope.get("route")
        run = RUN.match(where) or RUN.match(scope["path"])
        key = state.get("key")
        path = printable(scope["path"])[:200]
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request": state["request_id"],
            "key": key.name if key else "",
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "action": getattr(route, "name", "") or path,
            "run": run[1] if run else "",
            "status": status,
            "refused": state.get("refused", ""),
        }
