"""What every request handler is given: settings, Temporal, the store. Lives on the app's state."""

import asyncio
import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request

from api.models import Run, WaitingFor
from api.observe import OPEN, run_object
from api.problems import ApiProblem, shown
from api.records import Records
from api.settings import Settings
from api.temporal import Execution, Temporal, a_worker_on

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Services:
    """One per app."""

    settings: Settings
    temporal: Temporal
    records: Records

    async def execution(self, run_id: str) -> Execution:
        """The run's execution; raises 404."""
        found = await self.temporal.describe(run_id) if RUN_ID.fullmatch(run_id) else None
        if found is None:
            raise unknown_run(run_id)
        return found

    async def show(self, execution: Execution) -> Run:
        """The whole run object, with live gauges, or with the reason of an unannounced end."""
        progress, reason = None, ""
        if execution.state in OPEN:
            progress = await asyncio.to_thread(
                self.records.progress, execution.id, self.settings.live_max_age_s
            )
        elif execution.state != "completed" and not execution.memo.get("error"):
            reason = await self.temporal.close_reason(execution.id)
        run = run_object(
            execution,
            ui=self.settings.temporal_ui,
            namespace=self.temporal.namespace,
            progress=progress,
            reason=reason,
        )
        if run.status == "queued" and run.waiting_for is None:
            missing = await self.temporal.unpolled(self.settings.queues)
            if missing:
                run = run.model_copy(update={"waiting_for": WaitingFor(name=a_worker_on(missing))})
        return run


def unknown_run(run_id: str) -> ApiProblem:
    """404 for a run."""
    detail = f"There is no run {shown(run_id)!r}; GET /v1/runs lists all."
    return ApiProblem(404, "unknown-run", "No such run", detail)


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Served = Annotated[Services, Depends(_services)]
RunId = Annotated[str, Path(description="The run's id.", examples=["reverse-1a2b3c"])]
