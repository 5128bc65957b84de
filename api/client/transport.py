"""One HTTP connection pool to the API: its address, its key, and the rules for retries.

Every request may be sent again after a lost connection: reads change nothing, repeating a change
has no further effect, and every POST and PATCH has an `Idempotency-Key` that all its tries share.
"""

import hashlib
import json
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from ratchet.activities.contracts.names import LOOPBACK
from ratchet.api.client.errors import SHORT_WAIT_S, Refused, Unreachable, refusal, why_lost
from ratchet.configs.home import STACK_FILE, home_folder

DEFAULT_ADDRESS = "http://127.0.0.1:8080"
CONNECT_S = 5.0
IDEMPOTENCY = "Idempotency-Key"

Answer = TypeVar("Answer", bound=BaseModel)
T = TypeVar("T")


def default_address(env: Mapping[str, str] = os.environ) -> str:
    """RATCHET_API, else the address of the stack under RATCHET_HOME, whether it is up or down, else
    this machine's port 8080.

    Raises ValueError if the stack's record cannot be read.
    """
    if input := env.get("RATCHET_API"):
        return input
    record = home_folder(env) / STACK_FILE
    if not record.is_file():
        return DEFAULT_ADDRESS
    port = json.loads(record.read_text())["ports"].get("api")
    # The port of one that is down: on 8080 there may be the stack of somebody else.
    return DEFAULT_ADDRESS if port is None else f"http://127.0.0.1:{port}"


def backoff_s(attempt: int) -> float:
    """Seconds to wait before try `attempt` (1, 2, …), randomized so that clients spread out."""
    return min(0.5 * 2.0 ** (attempt - 1), 10.0) * random.uniform(0.5, 1.0)


class Transport:
    """Sends requests to one API. Safe to share between threads."""

    def __init__(
        self, address: str, api_key: str | None, *, timeout_s: float, max_retries: int
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{address!r} is not an API address; it looks like http://host:8080")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has invalid characters; check RATCHET_API_KEY")
        self.address = address.rstrip("/")
        self._retries = max_retries
        self._http = httpx.Client(
            base_url=self.address,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            # A proxy from the environment would not lead to this machine's own ports.
            trust_env=parts.hostname not in LOOPBACK,
        )

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return self._http.is_closed

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> httpx.Response:
        """The answer to a request; parameters and headers that are None are left out. A POST or
        PATCH gets an idempotency key of its own unless `headers` has one.

        Raises Refused and Unreachable, after retrying where that could help.
        """
        input = {name: value for name, value in (params or {}).items() if value is not None}
        sent = {name: value for name, value in (headers or {}).items() if value is not None}
        if method in ("POST", "PATCH"):
            sent.setdefault(IDEMPOTENCY, str(uuid.uuid4()))
        request = self._http.build_request(method, path, params=input, json=body, headers=sent)

        def send() -> httpx.Response:
            answer = self._http.send(request)
            if answer.is_success:
                return answer
            raise refusal(answer)

        return self._until_answered(send)

    def _until_answered(self, send: Callable[[], T]) -> T:
        """What `send` returns; calls it again where that could help."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return send()
            except httpx.TransportError as error:
                if attempt > self._retries:
                    raise Unreachable(self.address, why_lost(error)) from None
                time.sleep(backoff_s(attempt))
            except Refused as refused:
                wait_s = refused.retry_after_s or backoff_s(attempt)
                if attempt > self._retries or not refused.transient or wait_s > SHORT_WAIT_S:
                    raise
                time.sleep(wait_s)

    def ask_for(self, model: type[Answer], method: str, path: str, **request: Any) -> Answer:
        """The answer as `model`; raises Refused and Unreachable."""
        answer = self.ask(method, path, **request)
        try:
            return model.model_validate_json(answer.content)
        except ValidationError:
            why = f"what answers {method} {path} is not Ratchet's API, or is another version of it"
            raise Unreachable(self.address, why) from None

    def download(
        self,
        path: str,
        file: Path,
        *,
        params: Mapping[str, Any],
        progress: Callable[[int], None] = lambda done: None,
    ) -> str:
        """Writes an answer to `file` as it arrives and returns its sha256; `progress` is called
        with the bytes so far. Raises Refused, Unreachable, and OSError if it cannot be written.
        """

        def send() -> str:
            sha, done = hashlib.sha256(), 0
            with self._http.stream("GET", path, params=params) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refusal(answer)
                with file.open("wb") as out:
                    for piece in answer.iter_bytes():
                        out.write(piece)
                        sha.update(piece)
                        done += len(piece)
                        progress(done)
                    out.flush()
                    os.fsync(out.fileno())
            return sha.hexdigest()

        return self._until_answered(send)

    @contextmanager
    def stream(
        self, path: str, params: Mapping[str, Any], headers: Mapping[str, str], silence_s: float
    ) -> Iterator[httpx.Response]:
        """One answer that is read as it arrives, whatever its status.

        Raises httpx.TransportError, also where nothing arrives for `silence_s` seconds.
        """
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
        with self._http.stream(
            "GET", path, params=dict(params), headers=dict(headers), timeout=timeout
        ) as answer:
            yield answer
