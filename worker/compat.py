"""What a pinned dependency forces on our workers.

temporalio 1.35 takes a workflow for deadlocked that has not yielded within 2 s, and no option
changes that. A busy machine, or a long pass of the garbage collector, holds a thread for as long.
The SDK then interrupts the thread and evicts the workflow at once, without waiting for the thread
(`wait_for` has cancelled the future that the eviction awaits). Where the interruption falls into a
`__del__`, Python swallows it: the eviction meets tasks that still run, fails and is tried again for
ever, and the execution stands still until its worker is restarted.
"""

import temporalio.worker

DEADLOCK_S = 60
"""How long a workflow may keep its thread. Ours only compute, so that longer is a fault of ours."""


class Worker(temporalio.worker.Worker):
    """The SDK's worker, whose workflows may keep their threads for up to `DEADLOCK_S` seconds."""

    async def run(self) -> None:
        """As the SDK's, which its context manager runs too."""
        workflows = self._workflow_worker
        # None: TEMPORAL_DEBUG has switched the check off.
        if workflows is not None and workflows._deadlock_timeout_seconds is not None:
            assert workflows._deadlock_timeout_seconds == 2, "another SDK: read it again"
            workflows._deadlock_timeout_seconds = DEADLOCK_S
        await super().run()
