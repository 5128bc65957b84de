"""Work that waits until a failure is fixed or passes: a full disk, a store that fails.

Invariants:

- No work is abandoned for it. While some work is held, nothing more is admitted or shipped, the run
  shows as paused with the reason, and the work itself is retried until it succeeds.
- Retries become rarer the longer it lasts: each adds events to a bounded history, and what has
  lasted for hours does not recover sooner because of frequent retries.
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
    """Runs work of one run that may have to wait for the store."""

    def __init__(self, state: RunState, log: RunLog, news: News) -> None:
        self._part = state.outages
        self._log = log
        self._news = news
        # Work held when the run continued as new starts again; only hosts live on.
        self._part.holds = held_hosts(state.servers.hosts)

    async def perform(self, what: str, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make()`, retried as long as it fails because of the store."""
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
                    # A failure that passes at once is no reason to pause.
                    began = workflow.time()
                else:
                    self.hold(what, reason)
                rest = rest_after(workflow.time() - began)
                await workflow.sleep(rest, summary=f"the store to recover for {what}")
        finally:
            self.hold(what, "")

    def hold(self, what: str, reason: str) -> None:
        """Holds `what` for `reason`; '' once nothing holds it any more."""
        holds = self._part.holds
        before = dict(holds)
        if reason:
            holds[what] = reason
        else:
            holds.pop(what, None)
        if bool(before) == bool(holds):
            return
        if before:
            self._log.recoveries += 1
        note = f"paused: {what}: {reason}" if reason else "recovered: continuing"
        self._log.note(note)
        self._log.publish()
        self._news.wake()

    def drop(self, what: str) -> None:
        """Drops the hold of `what`, which is no longer needed."""
        self._part.holds.pop(what, None)

    def hold_host(self, host: HostState) -> None:
        """Holds the run for as long as a host waits for the store or its disk."""
        self.hold(hold_of(host), host.waits)

    def on_closed(self, host: HostState) -> None:
        """Drops the hold of a closed host."""
        host.waits = ""
        self.hold_host(host)
