"""Follows the histories of runs in Temporal, and pages through their events.

One reader per followed execution serves every watcher: it long-polls Temporal, so that each history
event crosses the wire once per API process. A reader that was not used for a while ends. Nothing
here is state: whatever is lost with the process is read again.
"""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.api.common.v1 import Payload, WorkflowExecution
from temporalio.api.workflowservice.v1 import (
    GetWorkflowExecutionHistoryRequest,
    GetWorkflowExecutionHistoryReverseRequest,
)
from temporalio.service import RPCError

from ratchet.activities.contracts.wire import WIRE
from ratchet.api.http.shared_call import Shared
from ratchet.api.schemas import problems
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.temporal.client import Execution, Temporal
from ratchet.api.temporal.connection import Missing
from ratchet.api.temporal.event_log import EventBuilder, LoggedEvent, parse_cursor

KEEP_ALIVE_S = 15.0
"""A stream that had nothing to say for this long says so."""
IDLE_S = 60.0
"""A reader that is unused for this long ends."""
KEPT_READERS = 64
PAGE = 1000
POLL = timedelta(seconds=30)
CHAIN_FRESH_S = 0.25
GATHER_S = 0.1
"""Between two reads of a history that is still growing."""
CATCH_UP_S = 5.0
"""After this long a page is answered with what was read so far."""
MOST_LOOKED_AT = 100_000
"""Events that one page may skip in search of matching ones."""
MOST_AT_ONCE = 500
"""Events in one piece of a stream."""

Place = tuple[int, int]
FIRST, LAST = (0, 0), (2**60, 0)
Wanted = Callable[[LoggedEvent], bool]


def everything(_: LoggedEvent) -> bool:
    """Matches every event."""
    return True


def unknown_cursor(cursor: str) -> ApiProblem:
    """404: no event of the run has this id."""
    return problems.unknown_cursor(
        f"No event {cursor[:80]!r} is kept of this run; omit `after` to begin with the first."
    )


def _still_reading() -> ApiProblem:
    return ApiProblem(
        503,
        "history-unread",
        "The run's history is still being read",
        f"It is long, or Temporal is slow: nothing could be read of it within {CATCH_UP_S:.0f} s. "
        "Reading continues; try again.",
        retry_after_s=1,
    )


def _unreadable(error: RPCError) -> ApiProblem:
    return ApiProblem(
        503,
        "temporal-unavailable",
        "Temporal does not provide the run's history",
        f"Temporal answered {error.status.name.lower()}: {error.message[:300]}. Trying again.",
        retry_after_s=5,
    )


async def _decode(payload: Payload) -> Any:
    """The plain value of a payload; None if it cannot be read."""
    try:
        return (await WIRE.decode([payload]))[0]
    except (ValueError, RuntimeError):
        # Anyone may signal a run with any payload.
        return None


@dataclass(frozen=True)
class Page:
    """Part of a list of events; `next_after` is where the next page begins, None on the last page.

    It is the id of the last event looked at, so that a page without matches leads on, too.
    """

    events: list[LoggedEvent]
    next_after: str | None = None


def _place(event: LoggedEvent) -> Place:
    return event.place


class Reader:
    """The events that one execution has had so far."""

    def __init__(self, temporal: Temporal, workflow: str, execution: str) -> None:
        self._temporal = temporal
        self._request = GetWorkflowExecutionHistoryRequest(
            namespace=temporal.namespace,
            execution=WorkflowExecution(workflow_id=workflow, run_id=execution),
            maximum_page_size=PAGE,
            wait_new_event=True,
        )
        self.execution = execution
        self.builder = EventBuilder(execution, _decode)
        self.events: list[LoggedEvent] = []
        self.seen = 0
        self.used = time.monotonic()
        self.failure: ApiProblem | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Continues reading, unless it is already or nothing is left to read."""
        self.used = time.monotonic()
        if not self.builder.ended and (self._task is None or self._task.done()):
            self.failure = None
            self._task = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Stops reading."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        token = b""
        while not self.builder.ended and time.monotonic() - self.used < IDLE_S:
            self._request.next_page_token = token
            try:
                answer = await self._temporal.poll(
                    "get_workflow_execution_history", self._request, POLL
                )
            except Missing:
                self.failure = unknown_cursor(self.execution)
                break
            except (RPCError, ApiProblem) as error:
                # Temporal is away: waiting requests are notified, watchers keep waiting.
                self.failure = _unreadable(error) if isinstance(error, RPCError) else error
                self._notify()
                await asyncio.sleep(1.0)
                token = b""
                continue
            self.failure = None
            for event in answer.history.events:
                # Events of a page that is read again after a fault were passed on already.
                if event.event_id > self.seen:
                    self.events += await self.builder.take(event)
                    self.seen = event.event_id
            self._notify()
            token = answer.next_page_token
            if not token and not answer.history.events:
                await asyncio.sleep(0.2)
            elif len(answer.history.events) < PAGE:
                # Events in quick succession are passed on to all watchers at once.
                await asyncio.sleep(GATHER_S)
        self._notify()

    async def wait(self, timeout_s: float) -> bool:
        """Waits for new events; False if none came in time."""
        self.start()
        if self.builder.ended:
            return True
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def lost(self) -> bool:
        """Whether Temporal no longer keeps this execution."""
        return self.failure is not None and self.failure.document.status == 404

    async def caught_up(self, length: int, deadline: float) -> bool:
        """Waits until `length` history events were read; False if some were not by `deadline`.

        Raises ApiProblem if Temporal is away.
        """
        while self.seen < length and not self.builder.ended:
            await self.wait(max(deadline - time.monotonic(), 0.0))
            if self.failure is not None:
                raise self.failure
            if time.monotonic() >= deadline and self.seen < length and not self.builder.ended:
                # Temporal's count may include events that it has not settled yet.
                return self.seen >= await self.settled()
        return True

    async def settled(self, enough: int = 2**60) -> int:
        """Number of the last event that Temporal provides, or of the last one read if that is
        `enough`; 0 if Temporal does not keep the execution.
        """
        if self.seen >= enough:
            return self.seen
        request = GetWorkflowExecutionHistoryReverseRequest(
            namespace=self._temporal.namespace,
            execution=self._request.execution,
            maximum_page_size=1,
        )
        try:
            answer = await self._temporal.call("get_workflow_execution_history_reverse", request)
        except Missing:
            return 0
        return max((event.event_id for event in answer.history.events), default=0)

    def after(self, place: Place | None) -> list[LoggedEvent]:
        """The events after `place`, in order."""
        return self.events[bisect_right(self.events, place or FIRST, key=_place) :]

    def before(self, place: Place | None) -> list[LoggedEvent]:
        """The events before `place`, the last one first."""
        return self.events[: bisect_left(self.events, place or LAST, key=_place)][::-1]


class Histories:
    """Events of runs, in either order."""

    def __init__(self, temporal: Temporal) -> None:
        self._temporal = temporal
        self._readers: OrderedDict[tuple[str, str], Reader] = OrderedDict()
        self._chains: Shared[list[Execution]] = Shared(CHAIN_FRESH_S)

    def _reader(self, workflow: str, execution: str) -> Reader:
        key = (workflow, execution)
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = Reader(self._temporal, workflow, execution)
            while len(self._readers) > KEPT_READERS:
                self._readers.popitem(last=False)[1].stop()
        self._readers.move_to_end(key)
        reader.start()
        return reader

    def close(self) -> None:
        """Stops all reading."""
        for reader in self._readers.values():
            reader.stop()

    async def _chain(self, run_id: str) -> list[Execution]:
        """All executions of a run that Temporal keeps, oldest first."""
        return await self._chains.get(run_id, lambda: self._look_up(run_id))

    async def _look_up(self, run_id: str) -> list[Execution]:
        result = await self._temporal.listed(f"WorkflowId = '{run_id}'")
        newest = await self._temporal.describe(run_id)
        if newest is not None and newest.run not in {execution.run for execution in result}:
            # The list of executions lags a moment behind the executions themselves.
            result.append(newest)
        return sorted(result, key=lambda execution: execution.started)

    async def _beside(self, run_id: str, reader: Reader, *, before: bool) -> str:
        """The execution that continues `reader`'s, or the one that it continues; '' if there is
        none.
        """
        builder = reader.builder
        known, began = builder.predecessor if before else builder.successor, builder.began
        if known or began is None:
            return known
        chain = [one for one in await self._chain(run_id) if one.run != reader.execution]
        if before:
            return next((one.run for one in reversed(chain) if one.started < began), "")
        return next((one.run for one in chain if one.started > began), "")

    async def _begin(
        self, newest: Execution, after: str | None, deadline: float, *, desc: bool = False
    ) -> tuple[Reader, Place | None]:
        """Where a list or a stream begins; raises ApiProblem 404 for an unknown cursor."""
        run_id = newest.id
        if after is None:
            chain = [] if desc else await self._chain(run_id)
            return self._reader(run_id, chain[0].run if chain else newest.run), None
        try:
            execution, place = parse_cursor(after)
        except ValueError:
            raise unknown_cursor(after) from None
        reader = self._reader(run_id, execution)
        settled = 0
        try:
            # An invented id would otherwise be waited for.
            settled = await reader.settled(place[0])
            if place[0] > settled:
                raise unknown_cursor(after)
            whole = await reader.caught_up(place[0], deadline)
        finally:
            if reader.lost or place[0] > settled == 0:
                self._readers.pop((run_id, execution), None)
        if reader.seen < place[0]:
            raise unknown_cursor(after) if whole else _still_reading()
        return reader, place

    async def latest(self, newest: Execution) -> str:
        """A cursor after everything that has happened so far: the id of the last event of the
        newest execution, or where that begins if it has none.
        """
        reader = self._reader(newest.id, newest.run)
        if not await reader.caught_up(newest.events, time.monotonic() + CATCH_UP_S):
            raise _still_reading()
        return reader.events[-1].id if reader.events else f"{newest.run}.0.0"

    async def ends_at(self, newest: Execution, after: str) -> bool:
        """Whether the run has ended with the event with id `after`, judging by its history alone.

        Raises ApiProblem 404 for an unknown cursor.
        """
        reader, place = await self._begin(newest, after, time.monotonic() + CATCH_UP_S)
        if not reader.builder.ended or reader.after(place):
            return False
        return not await self._beside(newest.id, reader, before=False)

    async def page(
        self,
        newest: Execution,
        after: str | None,
        limit: int,
        *,
        desc: bool = False,
        wanted: Wanted = everything,
    ) -> Page:
        """The matching events after the one with id `after`, at most `limit`, oldest first; with
        `desc` newest first, so that those after it are the ones that happened before.

        Bounded in time and in events looked at, so that a page may have fewer, or none, and yet
        lead on. Raises ApiProblem 404 for an unknown cursor, 503 if nothing was read in time.
        """
        run_id = newest.id
        deadline = time.monotonic() + CATCH_UP_S
        reader, place = await self._begin(newest, after, deadline, desc=desc)
        result: list[LoggedEvent] = []
        last: str | None = None
        looked = 0
        while True:
            length = newest.events if reader.execution == newest.run else 2**60
            if desc and place is not None:
                length = place[0]
            whole = await reader.caught_up(length, deadline)
            events = reader.before(place) if desc else reader.after(place)
            # The newest event, with which this order begins or continues, may not be read yet.
            for event in [] if desc and not whole else events:
                if looked >= MOST_LOOKED_AT or (len(result) >= limit and wanted(event)):
                    return Page(result, last)
                looked += 1
                last = event.id
                if wanted(event):
                    result.append(event)
            if not whole:
                if last is None:
                    raise _still_reading()
                return Page(result, last)
            following = ""
            if desc or reader.builder.ended:
                following = await self._beside(run_id, reader, before=desc)
            if not following:
                return Page(result)
            reader, place = self._reader(run_id, following), None

    async def stream(
        self,
        newest: Execution,
        after: str | None,
        *,
        hello: bytes = b"",
        wanted: Wanted = everything,
    ) -> AsyncIterator[bytes]:
        """`hello`, and server-sent events after the one with id `after`, as they happen.

        Ends once the run has ended and all events were sent. Raises ApiProblem here, before
        anything is sent, for an unknown cursor.
        """
        reader, place = await self._begin(newest, after, time.monotonic() + CATCH_UP_S)
        return self._reported(newest.id, reader, place, hello, wanted)

    async def _reported(
        self,
        run_id: str,
        reader: Reader,
        place: Place | None,
        hello: bytes,
        wanted: Wanted,
    ) -> AsyncIterator[bytes]:
        if hello:
            yield hello
        said_at = time.monotonic()
        while True:
            while reported := reader.after(place)[:MOST_AT_ONCE]:
                place = reported[-1].place
                if piece := b"".join(event.sse for event in reported if wanted(event)):
                    yield piece
                    said_at = time.monotonic()
            if reader.builder.ended:
                try:
                    following = await self._beside(run_id, reader, before=False)
                except ApiProblem:
                    # Temporal is away. What is being sent can no longer become an error.
                    await asyncio.sleep(1.0)
                else:
                    if not following:
                        return
                    reader, place = self._reader(run_id, following), None
                    continue
            elif reader.lost:
                return
            else:
                # The news may be that Temporal is away, or an event that does not match.
                await reader.wait(max(said_at + KEEP_ALIVE_S - time.monotonic(), 0.0))
            if time.monotonic() >= said_at + KEEP_ALIVE_S:
                yield b": still here\n\n"
                said_at = time.monotonic()
