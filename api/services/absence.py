"""Roles without a worker, as events of the runs that need one.

A run's own workflow cannot tell a missing worker from a busy one, and without workers nobody
records its steps, which other findings come from. So API processes look, and signal the finding to
the run, whose history is its event log: no command of a workflow depends on it. Invariants:

- A role counts as missing once two looks in a row found no worker that polled lately.
- An absence is one event of each execution, however many API processes see it: their signals carry
  the same request id, made of the role and of when the run last heard from it. So all absences of
  a role that a run has not heard from yet are one event.
- What keeps one run from being looked at keeps no other.
"""

import asyncio
import logging
import time
from typing import NoReturn
from uuid import NAMESPACE_OID, uuid5

from temporalio.service import RPCError

from ratchet.activities.contracts.health import HEALTH_REPORT, Finding, HealthReport
from ratchet.activities.contracts.roles import WorkerRole
from ratchet.activities.storage import series
from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable
from ratchet.api.http.audit import Caller
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.core import Services
from ratchet.api.services.health import missing_roles
from ratchet.api.temporal.client import Execution
from ratchet.configs.load import ConfigError
from ratchet.configs.versions import NewerSchema

LOOK_EVERY_S = 30.0
UNKNOWN = (ApiProblem, ConfigError, CorruptArtifact, NewerSchema, RPCError, StoreUnavailable)

logger = logging.getLogger(__name__)


class Absences:
    """What the last look found missing: run and role, and whether the run was signalled."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: dict[tuple[str, WorkerRole], bool] = {}

    async def watching(self) -> NoReturn:
        """Looks now and every LOOK_EVERY_S."""
        while True:
            try:
                await self.look()
            except (ApiProblem, RPCError, StoreUnavailable) as error:
                logger.warning("whether roles have workers is not known: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks once. Raises ApiProblem, RPCError, StoreUnavailable if runs cannot be listed."""
        before, self._known = self._known, {}
        for execution in await self._services.run_list.open():
            try:
                await self._look_at(execution, before)
            except UNKNOWN as error:
                logger.warning("which workers run %s misses is not known: %s", execution.id, error)
                same = {key: value for key, value in before.items() if key[0] == execution.id}
                self._known |= same

    async def _look_at(
        self, execution: Execution, before: dict[tuple[str, WorkerRole], bool]
    ) -> None:
        for role in await missing_roles(self._services, execution):
            reported = before.get((execution.id, role))
            if reported is False:
                await self._report(execution, role)
            self._known[execution.id, role] = reported is not None

    async def _report(self, execution: Execution, role: WorkerRole) -> None:
        store = self._services.records.store
        heard = await asyncio.to_thread(series.last_heard, store, execution.id, time.time())
        request = str(uuid5(NAMESPACE_OID, f"{execution.id}/no_worker/{role}/{heard.get(role)}"))
        finding = Finding("no_worker", f"no worker polls for {role}", role)
        report = HealthReport(int(execution.memo.get("step") or 0), finding)
        caller = Caller("", request)
        await self._services.temporal.signal(execution.id, HEALTH_REPORT, report, caller)
