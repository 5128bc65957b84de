"""Reports rollouts that end while their activity still runs to Dispatch, to free their permits.

Invariants: a signal only speeds up what the end of the activity reports anyway, so one that cannot
be sent is dropped. A part that has ended completely is never reported if it is all of its activity,
which is about to complete. Signals cost history: from each worker a workflow gets one at a time,
and more than one in LINGER_S only if each frees the permits of an activity. State about a workflow
is dropped with its last part.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from temporalio.client import Client
from temporalio.service import RPCError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import Released

log = logging.getLogger(__name__)

LINGER_S = 0.3
"""An ended rollout waits this long at most for others, until they are as many as a part has: with
fewer permits the next one could not begin. Those of one group often end together.
"""
IDLE_LINGER_S = 2.0
"""The same while Dispatch waits for something else than permits, as for the next version."""


@dataclass
class _Owner:
    """A workflow with `parts` activities here; `pending` is its next signal, `sent` what earlier
    ones said of parts that still run. `enough` is set while the next one is worth sending: it frees
    the `wanted` permits of a part. `waits`: it lacked permits when the last part began.
    """

    parts: int = 0
    waits: bool = True
    pending: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: int = 0
    sender: asyncio.Task[None] | None = None

    @property
    def freed(self) -> int:
        """Permits that the next signal would free."""
        return sum(count - self.sent.get(key, 0) for key, count in self.pending.items())

    def drop(self, key: str) -> None:
        """Takes a part that has ended out of the next signal."""
        self.pending.pop(key, None)
        if self.freed < self.wanted:
            self.enough.clear()


class Releases:
    """One per rollout worker process; used from its event loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._owners: dict[str, _Owner] = {}

    @contextmanager
    def part(
        self, workflow_id: str, key: str, size: int, *, waits: bool = True
    ) -> Iterator[Callable[[int], None]]:
        """A context in which an activity of `workflow_id` that runs `size` rollouts runs part `key`
        of them, or all. `waits`: that workflow could start more if it had permits.

        Yields a function that takes the number of the part's rollouts that have ended, adopted ones
        included.
        """
        owner = self._owners.setdefault(workflow_id, _Owner())
        owner.parts += 1
        owner.waits = waits

        def ended(count: int) -> None:
            if count >= size:
                owner.drop(key)
            elif count > 0:
                # An abandoned attempt may still run in this process and count fewer.
                owner.pending[key] = max(count, owner.pending.get(key, 0))
                if owner.waits and owner.freed >= size:
                    owner.wanted = size
                    owner.enough.set()
                if owner.sender is None or owner.sender.done():
                    owner.sender = asyncio.create_task(self._send(workflow_id, owner))

        try:
            yield ended
        finally:
            owner.drop(key)
            owner.sent.pop(key, None)
            owner.parts -= 1
            if owner.parts == 0:
                del self._owners[workflow_id]
                if owner.sender is not None:
                    owner.sender.cancel()

    async def _send(self, workflow_id: str, owner: _Owner) -> None:
        """Sends the pending signal until none is pending."""
        handle = self._client.get_workflow_handle(workflow_id)
        while owner.pending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S if owner.waits else IDLE_LINGER_S):
                    await owner.enough.wait()
            owner.enough.clear()
            if not owner.pending:
                return
            reported, owner.pending = Released(owner.pending), {}
            owner.sent.update(reported.ended)
            try:
                await handle.signal(names.RELEASED, reported, rpc_timeout=names.RPC_TIMEOUT)
            except RPCError as error:
                log.debug("%s did not receive %s: %s", workflow_id, reported.ended, error)
