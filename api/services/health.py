"""The health of a run: rules applied to its last steps and its own state, as one verdict.

The same rules raise the health events of a run (`activities/contracts/health.py`). Conditions of
the moment are judged here, and their events name the rule, too: missing workers (`absence.py`), a
failed eval (`run.eval`), drift (`run.alarm`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    find_begins,
    findings,
)
from ratchet.activities.contracts.hosting import keepers
from ratchet.activities.contracts.roles import WORKER_ROLES, WorkerRole
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.schemas.health import HealthFinding, RunHealth, Verdict
from ratchet.api.schemas.run import Run, RunError
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
    missing = await missing_roles(services, execution)
    return await asyncio.to_thread(judged, run, table, missing)


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
    """The rows that rules read, and as many before, which tell when findings began. Blocks."""
    spans = services.records.spans(run.id)
    return services.records.curves.table(spans, after=max(-1, run.step - 2 * WINDOW))


def judged(run: Run, table: Table, missing: Sequence[str] = ()) -> RunHealth:
    """A run's health, judged by its last steps in `table`; no worker polls for roles `missing`."""
    rows = [
        {name: value for name, value in row["metrics"].items() if value is not None}
        for row in table.rows()
    ]
    moment, begins = _of_this_moment(run, missing), find_begins(rows)
    lasting = [(finding, _date(finding, begins, table)) for finding in findings(rows)]
    found = [finding for finding, _ in (*moment, *lasting)]
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
        findings=[_shown(run.id, finding, since) for finding, since in (*moment, *lasting)],
        step=run.step,
        seconds_per_step=seconds,
        seconds_left=left,
        errors=measured.errors,
        without_signal=measured.without_signal,
        worst_staleness=measured.worst_staleness,
        waits=_waits(measured.waits),
    )


@dataclass(frozen=True)
class Since:
    """When a finding began, as far as that is known; `earlier`: at that step or before."""

    step: int | None = None
    time: datetime | None = None
    earlier: bool = False


Dated = tuple[Finding, Since]


def _of_this_moment(run: Run, missing: Sequence[str]) -> list[Dated]:
    """What a run's own state and its workers say, its own trouble first."""
    found = _trouble(run)
    if missing:
        silent = max((run.silent.get(role, 0.0) for role in missing), default=0.0)
        since = Since(time=datetime.now(UTC) - timedelta(seconds=silent)) if silent else Since()
        found.append((Finding("no_worker", f"no worker polls for {', '.join(missing)}"), since))
    if run.alarm:
        # It names the last step itself; when the first such step was, it does not say.
        found.append((Finding("mismatch", run.alarm), Since()))
    for env, result in run.eval.items():
        # The reason of a pause that came of this has the error already.
        known = result.error is not None and result.error in (run.paused_because or "")
        error = None if known else result.error
        failing = eval_failing(env, result.failed, result.of, error)
        found += [(finding, Since(result.step)) for finding in failing]
    return found


def _trouble(run: Run) -> list[Dated]:
    """Why a run failed, or does not go on although nobody paused it."""
    if run.error is not None:
        rule = "failed" if run.checkpoint else "failed_early"
        return [(Finding(rule, _failure(run.error)), Since(run.step, run.finished_at))]
    if run.status not in ("paused", "pausing") or run.paused_because is None:
        return []
    # A run that is on hold was not asked to pause, and by itself waits for no `resume`.
    paused = run.pause_reason == run.paused_because
    waits = run.waiting_for if paused else None
    finding = Finding("paused" if paused else "held", run.paused_because)
    return [(finding, Since(run.step, waits.since if waits else None))]


def _failure(error: RunError) -> str:
    """A failure in a sentence: its code, where it arose, the config key at fault, and its text.

    The preflight's text names its keys, and people do not know its name.
    """
    if error.role == "preflight":
        return f"the check before the start found: {error.message}"
    where = f" in {error.role}" if error.role else ""
    key = f" ({error.param})" if error.param else ""
    return f"{error.code}{where}{key}: {error.message}"


def _date(finding: Finding, begins: Mapping[tuple[str, str], int], table: Table) -> Since:
    """When a finding began by the steps in `table`."""
    place = begins[finding.rule, finding.subject]
    earlier = place == len(table.steps) - WINDOW
    time = datetime.fromtimestamp(table.times[place], UTC)
    return Since(table.steps[place], time, earlier)


def _verdict(run: Run, found: Sequence[Finding]) -> tuple[Verdict, str]:
    """The verdict and its sentence."""
    worst = [finding.message for finding in found if finding.level == "warning"]
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    if run.error is not None:
        return "failed", _failure(run.error)
    if run.status in ENDED:
        return "ended", "; ".join(dict.fromkeys(filter(None, [run.status, run.end_reason, *worst])))
    if run.status in ("paused", "pausing"):
        then = "it goes on once it is resumed"
        if run.status == "pausing":
            then = f"it pauses once the work under way is done; {then}"
        return "paused", run.paused_because or then
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


def _shown(run_id: str, finding: Finding, since: Since) -> HealthFinding:
    rule = RULES[finding.rule]
    return HealthFinding(
        rule=finding.rule,
        level=rule.level,
        title=rule.title,
        message=finding.message,
        subject=finding.subject,
        advice=rule.advice.format(run=run_id, subject=finding.subject),
        help=finding.help,
        since_step=since.step,
        since=since.time,
        since_earlier=since.earlier,
    )
