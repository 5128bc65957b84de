"""Lists of runs, the newest first, each run once: paged by the store's index, shown by Temporal.

Temporal's SQL visibility sorts by the end and lists executions, so that it cannot page runs. The
index can, and Temporal is asked only about the rows of a page. Invariants:

- A list lacks no run that Temporal retains: before a list is served, the index catches up, within
  CAUGHT_UP_S, with the executions that began since it last did; the first time, with all of them.
- The cost of a request is bounded, however many runs there are: it looks at no more than
  MOST_LOOKED_AT rows. A filtered page may be empty although more pages follow.
- Runs that have not ended are queried directly as long as there are fewer than MOST_OPEN; of more
  the index knows all.
"""

import asyncio
import base64
import binascii
import math
import re
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from operator import itemgetter

from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.http.shared_call import Shared
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.schemas.run import Run
from ratchet.api.services.ended import MARGIN
from ratchet.api.services.run_view import run_object, status_of
from ratchet.api.store.run_index import Row, RunIndex, row_of
from ratchet.api.temporal.client import Execution, Temporal

CAUGHT_UP_S = 60.0
PATIENCE_S = 8.0
LAG = timedelta(minutes=2)
"""For how long after its creation a run may be missing in Temporal's list of executions."""
MOST_LOOKED_AT = 150
MOST_OPEN = 2000
FRESH_S = 0.25

CURSOR = re.compile(r"([0-9]{13})-([a-z0-9][a-z0-9-]{0,63})", re.ASCII)


def cursor_of(row: Row) -> str:
    """The cursor of a list that continues after `row`."""
    return base64.urlsafe_b64encode(f"{row[0]:013d}-{row[1]}".encode()).decode().rstrip("=")


def row_at(cursor: str) -> Row | None:
    """The row of a cursor; None if it is not one, such as a run's id."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        match = CURSOR.fullmatch(text.decode())
    except (binascii.Error, ValueError):
        return None
    return (int(match[1]), match[2]) if match else None


class RunList:
    """All runs."""

    def __init__(self, temporal: Temporal, index: RunIndex, ui: str) -> None:
        self._temporal = temporal
        self.index = index
        self._ui = ui
        self._catching: Shared[int] = Shared(0.0)
        self._caught_up_at = -math.inf
        self._ahead: asyncio.Future[int] | None = None
        self._open: Shared[list[Execution]] = Shared(FRESH_S)

    def touched(self) -> None:
        """Drops what is cached about runs that have not ended."""
        self._open.forget("")

    async def open(self) -> list[Execution]:
        """The runs that have not ended; raises ApiProblem 503."""
        return await self._open.get("", lambda: self._temporal.open_runs(MOST_OPEN))

    async def page(
        self,
        after: Row | None,
        limit: int,
        status: str | None = None,
        fits: Callable[[Run], bool] | None = None,
        *,
        archived: bool = False,
    ) -> tuple[list[Run], Row | None]:
        """The newest matching runs after the row `after`, and where the next page begins; None: on
        the last page. With `archived` only archived runs, else only others. Raises ApiProblem 503.
        """
        if status is not None and status not in ENDED:
            if archived:
                return [], None
            open_runs = await self.open()
            if len(open_runs) < MOST_OPEN:
                these = [run for run in open_runs if status_of(run) == status]
                return self._page_of(these, after, limit, fits)
        await self._caught_up()
        found: list[Run] = []
        place, looked = after, 0
        filtered = status is not None or fits is not None
        while looked < MOST_LOOKED_AT:
            count = MOST_LOOKED_AT if filtered else limit + 1
            rows = await asyncio.to_thread(self.index.before, place, count, archived=archived)
            for row, run in await self._runs_of(rows):
                if (
                    run is not None
                    and run.status == (status or run.status)
                    and (fits is None or fits(run))
                ):
                    if len(found) == limit:
                        return found, place
                    found.append(run.model_copy(update={"archived": archived}))
                place = row
            if len(rows) < count:
                return found, None
            looked, filtered = looked + count, True
        return found, place

    def _page_of(
        self,
        executions: list[Execution],
        after: Row | None,
        limit: int,
        fits: Callable[[Run], bool] | None,
    ) -> tuple[list[Run], Row | None]:
        """The same for `executions`, of which it shows no more than MOST_LOOKED_AT."""
        rows = [(self.row_of(execution), execution) for execution in executions]
        rows = [(row, execution) for row, execution in rows if after is None or row < after]
        rows.sort(key=itemgetter(0), reverse=True)
        found: list[Run] = []
        for looked, (_, execution) in enumerate(rows):
            if len(found) == limit or looked == MOST_LOOKED_AT:
                return found, rows[looked - 1][0]
            run = self._shown(execution)
            if fits is None or fits(run):
                found.append(run)
        return found, None

    def row_of(self, execution: Execution) -> Row:
        """The row of a run in the list."""
        created = execution.memo.get("created_at")
        at = datetime.fromisoformat(created) if created else execution.started
        return row_of(execution.id, at)

    async def _runs_of(self, rows: list[Row]) -> Iterable[tuple[Row, Run | None]]:
        deleted = await asyncio.to_thread(self.index.deleted)
        rows = [row for row in rows if row[1] not in deleted]
        known = await self._temporal.newest([run_id for _, run_id in rows])
        since = (datetime.now(UTC) - LAG).timestamp() * 1000
        fresh = [run_id for at, run_id in rows if run_id not in known and at > since]
        for execution in await asyncio.gather(*map(self._temporal.describe, fresh)):
            if execution is not None:
                known[execution.id] = execution
        # A row of a moment other than the run's own comes from a request that was sent twice.
        return [
            (
                row,
                self._shown(run)
                if (run := known.get(row[1])) and self.row_of(run) == row
                else None,
            )
            for row in rows
        ]

    def _shown(self, execution: Execution) -> Run:
        return run_object(execution, ui=self._ui, namespace=self._temporal.namespace)

    async def _caught_up(self) -> None:
        age = time.monotonic() - self._caught_up_at
        if age < CAUGHT_UP_S / 2:
            return
        catching = asyncio.ensure_future(self._catching.get("", self.catch_up))
        if age < CAUGHT_UP_S:
            # No page waits for what is not due yet. If it fails, the first one after that waits.
            catching.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._ahead = catching
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await catching
        except TimeoutError:
            raise ApiProblem(
                503,
                "index-unready",
                "The index of runs is being built",
                "The list comes from an index in the store, to which runs started by an older "
                "build are being added. Try again.",
                retry_after_s=5,
            ) from None

    async def catch_up(self, *, rebuild: bool = False) -> int:
        """Adds the runs that are not in the index: those that began since it last caught up, or all
        that Temporal retains. Returns how many it checked.
        """
        began, began_at, count = datetime.now(UTC), time.monotonic(), 0
        since = None if rebuild else await asyncio.to_thread(self.index.caught_up)
        async for executions in self._temporal.runs_since(since - MARGIN if since else None):
            rows = [self.row_of(execution) for execution in executions]
            await asyncio.to_thread(self.index.add, rows)
            count += len(rows)
        await asyncio.to_thread(self.index.catch_up, began)
        self._caught_up_at = began_at
        return count
