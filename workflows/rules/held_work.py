"""Retries of work whose results cannot be stored: which work tries when.

A generation may hold hundreds of works, and every try adds events to its history. So each tries a
few times on its own; after that the first of all held works tries for the others, and some of them
follow once anything was stored.
"""

TRIES_OF_ITS_OWN = 3
"""How often a work is retried on its own."""
WOKEN_BY_ONE = 8
"""Held works that are retried once another was stored; each of them then wakes as many."""


class HeldWorks:
    """Works that wait for the store, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._since = 0.0
        self._turns = 0

    @property
    def reason(self) -> str:
        """Why the first of them cannot be stored; '' if nothing is held."""
        return next(iter(self._reasons.values()), "")

    def held_s(self, now: float) -> float:
        """Seconds for which something has been held."""
        return now - self._since

    def on_failed(self, work: str, reason: str, now: float) -> bool:
        """The store failed under `work`; True if nothing was held before."""
        first = not self._reasons
        if first:
            self._since = now
        self._turns = 0
        self._reasons[work] = reason
        self._tries[work] = self._tries.get(work, 0) + 1
        return first

    def on_stored(self) -> None:
        """The store took something: some of what is held may follow."""
        self._turns = WOKEN_BY_ONE

    def on_slow_try(self) -> None:
        """A try takes long: another one starts beside it, so that a recovered store is noticed."""
        self._turns = max(self._turns, 1)

    def on_ended(self, work: str) -> bool:
        """`work` is no longer held; True if it was the last."""
        self._tries.pop(work, None)
        return self._reasons.pop(work, None) is not None and not self._reasons

    def shares_tries(self, work: str) -> bool:
        """Whether `work` has used up its own tries."""
        return self._tries.get(work, 0) > TRIES_OF_ITS_OWN

    def may_try(self, work: str) -> bool:
        """Whether it is the turn of the held `work` to try for all."""
        return bool(self._turns) or next(iter(self._reasons)) == work

    def take_turn(self) -> bool:
        """Whether there is a turn to take at once; without one, a wait comes before the try."""
        taken = self._turns > 0
        self._turns -= taken
        return taken
