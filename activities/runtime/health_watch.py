"""Reports health findings to a run, each once when it begins, as soon as a step is recorded.

The run's workflow does not judge: it receives a signal, which its history keeps and the event log
shows, so that no order of commands depends on the rules. A signal that cannot be sent is dropped:
the API applies the same rules at every request.
"""

import contextlib
import functools
import logging

from temporalio.client import Client
from temporalio.service import RPCError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.health import (
    ENDS_AFTER,
    HEALTH_REPORT,
    WINDOW,
    HealthReport,
    Row,
    begun,
    relevant,
)
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

log = logging.getLogger(__name__)

KEPT = 2000
"""Steps whose metrics are cached, over all runs."""


class HealthWatch:
    """One per orchestrator process."""

    def __init__(self, store: ArtifactStore, client: Client) -> None:
        self._store = store
        self._client = client
        # Missing or damaged metrics raise, which is not cached.
        self._row = functools.lru_cache(KEPT)(self._read)

    def reports(self, attempt: str, step: int) -> list[HealthReport]:
        """Findings that begin with `step`, judging by the recorded steps of its attempt. Blocks;
        raises StoreUnavailable.
        """
        rows: list[Row] = []
        for number in range(max(1, step - WINDOW - ENDS_AFTER + 1), step + 1):
            with contextlib.suppress(FileNotFoundError, CorruptArtifact):
                rows.append(self._row(attempt, number))
        return [HealthReport(step, finding) for finding in begun(rows)]

    def _read(self, attempt: str, step: int) -> Row:
        """The metrics of a step that the rules read."""
        record = self._store.get_json(self._store.require(keys.step_record(attempt, step)))
        return relevant(record["metrics"])

    async def send(self, workflow_id: str, reports: list[HealthReport]) -> None:
        """Sends the reports to the run."""
        handle = self._client.get_workflow_handle(workflow_id)
        for report in reports:
            try:
                await handle.signal(HEALTH_REPORT, report, rpc_timeout=names.RPC_TIMEOUT)
            except RPCError as error:
                log.warning("%s did not receive %s: %s", workflow_id, report, error)
