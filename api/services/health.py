"""The health of a run: rules applied to its last steps and its own state, as one verdict.

The same rules raise the health events of a run (`activities/contracts/health.py`). Conditions of
the moment are judged here, and their events name the rule, too: missing workers (`absence.py`), a
failed eval (`run.eval`), drift (`run.alarm`).
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median

from temporalio.api.enums.v1 import TaskQueueType

from ratchet.activities.contracts.health import (
    LATELY,
    RULES,
    WAITS,
    WINDOW,
    Finding,
    eval_failing,
    figures,
    findings,
)
from ratchet.activities.contracts.hosting import keepers
from ratchet.activities.contracts.roles import WORKER_ROLES, WorkerRole
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.schemas.health import HealthFinding, RunHealth, Verdict
from ratchet.api.schemas.run import Run
from ratchet.api.services.core import Services
from ratchet.api.services.run_view import OPEN, status_of
from ratchet.api.store.curves import Table
from ratchet.api.temporal.client import Execution
from ratchet.configs.run import RunConfig

GONE = timedelta(seconds=90)
"""An idle worker polls once a minute."""
NOTABLE = 0.25
"""A wait that takes a smaller share of a step's time is not worth mentioning."""


async def health_of(services: Services, execution: Execution) -> RunHealth:
    """A run's health; raises ApiProblem 503, StoreUnavailable."""
    run = await services.show(execution)
    table = await asyncio.to_thread(_last_steps, services, run)
    return judged(run, table, await missing_roles(services, execution))


async def missing_roles(services: Services, execution: Execution) -> list[WorkerRole]:
    """Roles that a run needs now and no worker polled for lately; raises ApiProblem, RPCError, and
    as the store does.
    """
    if execution.state not in OPEN or status_of(execution) not in ("running", "starting", "queued"):
        return []
    there = await services.polled.get("", lambda: _polled(services))
    if there.issuperset(WORKER_ROLES):
        return []
    config = await asyncio.to_thread(services.current_config, execution)
    return [role for role in _roles(config) if role not in there]


def _roles(config: RunConfig) -> list[WorkerRole]:
    """The worker roles that a run needs."""
    hosting = keepers(config)
    return [role for role in WORKER_ROLES if role in ("orchestrator", "rollout") or role in hosting]


async def _polled(services: Services) -> set[WorkerRole]:
    """The roles whose task queue some worker polled lately."""
    queues, since = services.settings.queues, datetime.now(UTC) - GONE
    kinds = {
        role: TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        if role == "orchestrator"
        else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
        for role in WORKER_ROLES
    }
    answers = await asyncio.gather(
        *(services.temporal.pollers(queues.of(role), kind) for role, kind in kinds.items())
    )
    return {
        role
        for role, pollers in zip(kinds, answers, strict=True)
        if any(poller.last_access_time.ToDatetime(UTC) > since for poller in pollers)
    }


def _last_steps(services: Services, run: Run) -> Table:
    """The rows that rules read. Blocks."""
    spans = services.records.spans(run.id)
    return services.records.curves.table(spans, after=max(-1, run.step - WINDOW))


def judged(run: Run, table: Table, missing: Sequence[str] = ()) -> RunHealth:
    """A run's health, judged by its last steps in `table`; no worker polls for roles `missing`."""
    rows = [
        {name: value for name, value in row["metrics"].items() if value is not None}
        for row in table.rows()
    ]
    found = [*_of_this_moment(run, missing), *findings(rows)]
    seconds = _pace(table.times)
    measured = figures(rows)
    left = None
    moves = run.status not in (*ENDED, "paused")
    if seconds is not None and run.max_steps is not None and moves:
        left = seconds * max(0, run.max_steps - run.step)
    verdict, message = _verdict(run, found)
    return RunHealth(
        run_id=run.id,
        verdict=verdict,
        message=message,
        findings=[_shown(finding) for finding in found],
        step=run.step,
        seconds_per_step=seconds,
        seconds_left=left,
        errors=measured.errors,
        without_signal=measured.without_signal,
        worst_staleness=measured.worst_staleness,
        waits=_waits(measured.waits),
    )


def _of_this_moment(run: Run, missing: Sequence[str]) -> list[Finding]:
    found: list[Finding] = []
    if missing:
        found.append(Finding("no_worker", f"no worker polls for {', '.join(missing)}"))
    if run.alarm:
        found.append(Finding("mismatch", run.alarm))
    for env, result in run.eval.items():
        found += eval_failing(env, result.failed, result.of, result.error)
    return found


def _verdict(run: Run, found: Sequence[Finding]) -> tuple[Verdict, str]:
    """The verdict and its sentence."""
    worst = [finding.message for finding in found if finding.level == "warning"]
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    if run.error is not None:
        return "failed", f"{run.error.code}: {run.error.message}"
    if run.status in ENDED:
        return "ended", "; ".join(dict.fromkeys(filter(None, [run.status, run.end_reason, *worst])))
    if run.status in ("paused", "pausing"):
        return "paused", run.paused_because or "it goes on once it is resumed"
    if worst:
        return "attention", f"{worst[0]}{more}"
    if run.status != "running" or (run.kind == "train" and not run.step):
        return "waiting", run.waiting_for.message if run.waiting_for else run.status
    return "healthy", "no problems found"


def _pace(times: Sequence[float]) -> float | None:
    """Seconds per step, the median of the last ones."""
    gaps = [b - a for a, b in pairwise([time for time in times if time][-2 * LATELY :]) if b >= a]
    return median(gaps) if gaps else None


def _waits(shares: dict[str, float]) -> str | None:
    """Who waits for whom, by the shares of a step's time."""
    if not shares:
        return None
    name = max(shares, key=lambda key: shares[key])
    if shares[name] < NOTABLE:
        return "nothing waits for long"
    return f"{WAITS[name]} {100 * shares[name]:.0f} % of the time"


def _shown(finding: Finding) -> HealthFinding:
    rule = RULES[finding.rule]
    return HealthFinding(
        rule=finding.rule,
        level=rule.level,
        title=rule.title,
        message=finding.message,
        subject=finding.subject,
        advice=rule.advice,
        help=finding.help,
    )
