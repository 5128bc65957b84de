"""Events of a run as they happen: each once and in order, across broken connections and restarts.

Uses server-sent events where they get through; where a proxy refuses or withholds them, the same
events are requested page by page. The cursor advances only by whole events, so that what a broken
connection cut off is sent again, and nothing else.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from httpx_sse import EventSource

from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.client.errors import Refused, Unreachable, refusal, why_lost
from ratchet.api.client.transport import Transport, backoff_s
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.events import Event
from ratchet.api.schemas.run import Run

MEDIA = "text/event-stream"
LATEST = "latest"
SILENCE_S = 45.0
"""The API sends something every 15 s."""
POLL_S = 1.0
PAGE = 1000
REFUSES_STREAMS = (405, 406, 415, 501)
SILENT_TRIES = 2
"""After so many streams in a row that open but do not deliver even the hello, or break right after
it, streams count as withheld: pages either get through, or are refused with a reason."""
BREAKS_S = 1.0
"""A stream that ends this soon without an event broke at its hello."""
IDLE_POLLS = 3


class EventStream:
    """Iterates over the events of a run after the one with id `cursor`, until the run has ended or
    its client is closed.

    `cursor` None: from the first event; 'latest': only new ones. It advances, and is where another
    stream would continue. `on_trouble` is called once with the reason why nothing arrives, and with
    '' once something does again. A stream silent for `silence_s` seconds counts as broken. Raises
    Refused, and Unreachable after `patience_s` seconds without any sign of the API.
    """

    def __init__(
        self,
        transport: Transport,
        path: str,
        cursor: str | None,
        patience_s: float,
        on_trouble: Callable[[str], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self.cursor = cursor
        self._transport = transport
        self._path = path
        self._patience_s = patience_s
        self._on_trouble = on_trouble
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._failures = 0

    def __iter__(self) -> Iterator[Event]:
        silent = 0
        while silent < SILENT_TRIES:
            if self._transport.closed:
                return
            heard, reported, why = False, False, "the stream was closed"
            began = time.monotonic()
            try:
                with self._open() as answer:
                    if answer.status_code == 204:
                        return
                    if not _streams(answer):
                        break
                    for message in EventSource(answer).iter_sse():
                        heard = True
                        self._hears()
                        self.cursor = message.id or self.cursor
                        # A hello, and a message that only sets the cursor, are not events.
                        if message.data and message.event != "ready":
                            reported, silent = True, 0
                            yield Event.model_validate_json(message.data)
            except httpx.TransportError as error:
                why = why_lost(error)
                silent += isinstance(error, httpx.ReadTimeout) and not heard
            except Refused as refused:
                self._wait_out(refused)
                continue
            if heard:
                # Between events the API has shown, up to now, that it is still there.
                self._heard_at = time.monotonic()
            if not reported:
                silent += heard and time.monotonic() - began < BREAKS_S
                self._wait(why)
        yield from self._polled()

    def _open(self) -> Any:
        headers = {"Accept": MEDIA, "Accept-Encoding": "identity", "Cache-Control": "no-cache"}
        params: dict[str, str] = {}
        if self.cursor == LATEST:
            params["after"] = LATEST
        elif self.cursor is not None:
            headers["Last-Event-ID"] = self.cursor
        return self._transport.stream(self._path, params, headers, self._silence_s)

    def _hears(self) -> None:
        self._heard_at = time.monotonic()
        if self._failures:
            self._failures = 0
            self._on_trouble("")

    def _wait(self, why: str) -> None:
        """Waits before the next try; raises Unreachable once `patience_s` is used up."""
        if time.monotonic() - self._heard_at > self._patience_s:
            raise Unreachable(self._transport.address, why)
        self._failures += 1
        if self._failures == 1:
            self._on_trouble(why)
        time.sleep(backoff_s(self._failures))

    def _wait_out(self, refused: Refused) -> None:
        if not refused.transient:
            raise refused
        self._wait(refused.problem.detail)

    # -- page by page -----------------------------------------------------------------------

    def _page(self) -> ListOf[Event]:
        params = {"after": self.cursor, "limit": PAGE}
        return self._transport.ask_for(ListOf[Event], "GET", self._path, params=params)

    def _polled(self) -> Iterator[Event]:
        skipping = self.cursor == LATEST
        if skipping:
            self.cursor = None
        idle, over = 0, False
        while idle < IDLE_POLLS and not over and not self._transport.closed:
            try:
                # The status is requested first: then the page has everything before the end.
                run = self._transport.ask_for(Run, "GET", self._path.removesuffix("/events"))
                page = self._page()
            except Refused as refused:
                self._wait_out(refused)
                continue
            except Unreachable as lost:
                self._wait(lost.why)
                continue
            self._hears()
            for event in page.data:
                self.cursor = event.id
                if not skipping:
                    yield event
            if page.has_more:
                continue
            skipping = False
            ended = run.status in ENDED
            over = ended and bool(page.data) and page.data[-1].type == "run.ended"
            idle = idle + 1 if ended and not page.data else 0
            if not over:
                time.sleep(POLL_S)


def _streams(answer: httpx.Response) -> bool:
    """Whether a stream follows; False where streams are refused. Raises Refused otherwise."""
    if answer.status_code in REFUSES_STREAMS:
        return False
    if not answer.is_success:
        answer.read()
        raise refusal(answer)
    return bool(answer.headers.get("content-type", "").startswith(MEDIA))
