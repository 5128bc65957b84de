"""Work that waits out what only people or time can mend: a full disk, a store that fails.

Invariant: nothing is given up for it. While some work is held, nothing more is admitted or shipped,
the run shows as paused with the reason, and the work itself is tried again until it succeeds.
"""

from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from activities.contracts import names
    from workflows.failures import cause_of, type_of
    from workflows.run_log import RunLog
    from workflows.state import RunState

RETRIED_AFTER = timedelta(seconds=2)
RETRIED_AT_LEAST_EVERY = timedelta(seconds=30)
MENDABLE = (names.STORE_FAILED, names.NO_SPACE)

T = TypeVar("T")


class Mending:
    """Carries out what may have to wait for the store of one run."""

    def __init__(self, state: RunState, log: RunLog) -> None:
        self._state = state
        self._log = log
        # What was held when the run continued as new is begun anew.
        state.holds = {}

    async def carry_out(self, what: str, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make()`, tried until it does not fail for the store's sake."""
        rest = RETRIED_AFTER
        try:
            while True:
                try:
                    return await make()
                except ActivityError as error:
                    if type_of(error) not in MENDABLE:
                        raise
                    reason = cause_of(error)
                # What passes at once is no reason to stand still.
                if rest > RETRIED_AFTER:
                    self.hold(what, reason)
                await workflow.sleep(rest, summary=f"the store to be mended for {what}")
                rest = min(2 * rest, RETRIED_AT_LEAST_EVERY)
        finally:
            self.hold(what, "")

    def hold(self, what: str, reason: str) -> None:
        """`reason` keeps `what` from going on; '' once nothing does."""
        state = self._state
        before = dict(state.holds)
        if reason:
            state.holds[what] = reason
        else:
            state.holds.pop(what, None)
        if bool(before) == bool(state.holds):
            return
        note = f"paused until it is mended: {what}: {reason}" if reason else "mended: going on"
        self._log.note(note)
        self._log.publish()
        self._log.unsettled = True
