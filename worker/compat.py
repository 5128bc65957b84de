"""Workarounds in our workers for a pinned dependency.

temporalio 1.35 considers a workflow deadlocked that has not yielded within 2 s, and no option
changes that. A busy machine, or a long pass of the garbage collector, holds a thread that long.
The SDK then interrupts the thread and evicts the workflow at once, without waiting for the thread
(`wait_for` has cancelled the future that the eviction awaits). If the interruption hits a
`__del__`, Python swallows it: the eviction meets tasks that still run, fails and is retried
forever, and the execution stands still until its worker is restarted.
"""

import temporalio.worker

DEADLOCK_S = 60
"""How long a workflow may hold its thread. Ours only compute, so anything longer is our bug."""


class Worker(temporalio.worker.Worker):
    """The SDK's worker, but workflows may hold their threads for up to `DEADLOCK_S` seconds."""

    async def run(self) -> None:
        """As the SDK's, which its context manager runs too."""
        workflows = self._workflow_worker
        # None: TEMPORAL_DEBUG has switched the check off.
        if workflows is not None and workflows._deadlock_timeout_seconds is not None:
            assert workflows._deadlock_timeout_seconds == 2, "another SDK: read it again"
            workflows._deadlock_timeout_seconds = DEADLOCK_S
        await super().run()
