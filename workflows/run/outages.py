"""Work that waits out what only people or time can mend: a full disk, a store that fails.

Invariants:

- Nothing is given up for it. While some work is held, nothing more is admitted or shipped, the run
  shows as paused with the reason, and the work itself is tried again until it succeeds.
- Tries become rarer the longer it lasts: each is events of a history that is bounded, and what has
  lasted for hours is not mended sooner for being asked every moment.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rests import rest_after
from ratchet.workflows.protocol.errors import cause_of, type_of
from ratchet.workflows.protocol.state import HostState, RunState
from ratchet.workflows.rules.fleet import held_hosts, hold_of
from ratchet.workflows.run.news import News
from ratchet.workflows.run.status import RunLog

MENDABLE = (names.STORE_FAILED, names.NO_SPACE)

T = TypeVar("T")


class Outages:
    """Carries out what may have to wait for the store of one run."""

    def __init__(self, state: RunState, log: RunLog, news: News) -> None:
        self._part = state.outages
        self._log = log
        self._news = news
        # What was held when the run continued as new is begun anew; only hosts live on.
        self._part.holds = held_hosts(state.servers.hosts)

    async def perform(self, what: str, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make()`, tried until it does not fail for the store's sake."""
        began: float | None = None
        try:
            while True:
                try:
                    return await make()
                except ActivityError as error:
                    if type_of(error) not in MENDABLE:
                        raise
                    reason = cause_of(error)
                if began is None:
                    # What passes at once is no reason to stand still.
                    began = workflow.time()
                else:
                    self.hold(what, reason)
                rest = rest_after(workflow.time() - began)
                await workflow.sleep(rest, summary=f"the store to be mended for {what}")
        finally:
            self.hold(what, "")

    def hold(self, what: str, reason: str) -> None:
        """`reason` keeps `what` from going on; '' once nothing does."""
        holds = self._part.holds
        before = dict(holds)
        if reason:
            holds[what] = reason
        else:
            holds.pop(what, None)
        if bool(before) == bool(holds):
            return
        if before:
            self._log.mended += 1
        note = f"paused until it is mended: {what}: {reason}" if reason else "mended: going on"
        self._log.note(note)
        self._log.publish()
        self._news.wake()

    def drop(self, what: str) -> None:
        """Whatever kept `what` from going on: there is no such work any more."""
        self._part.holds.pop(what, None)

    def hold_host(self, host: HostState) -> None:
        """Holds the run for as long as a host waits for the store or its disk."""
        self.hold(hold_of(host), host.waits)

    def on_closed(self, host: HostState) -> None:
        """A host that is closed waits for nothing."""
        host.waits = ""
        self.hold_host(host)
