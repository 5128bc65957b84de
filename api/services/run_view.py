"""The run object, from the run's memo and what Temporal knows about its workflow.

Temporal decides whether a run has ended: a workflow that was terminated or cancelled from outside
could no longer update its memo. Texts from workers are redacted.
"""

from typing import Any
from urllib.parse import quote

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.redact import redacted, redacted_all
from ratchet.activities.contracts.statuses import ENDED, STATUSES
from ratchet.api.schemas.run import Links, Progress, Run, RunError, WaitingFor
from ratchet.api.temporal.client import Execution

OPEN = ("running", "paused")
FALLBACK = {
    "completed": "succeeded",
    "failed": "failed",
    "timed_out": "failed",
    "terminated": "failed",
    "canceled": "cancelled",
    "forgotten": "failed",
}


def status_of(execution: Execution) -> str:
    """The run's status."""
    reported = execution.memo.get("status")
    known: str | None = reported if isinstance(reported, str) and reported in STATUSES else None
    if execution.state == "paused":
        return "paused"
    if execution.state in FALLBACK:
        return known if known in ENDED else FALLBACK[execution.state]
    if known in ENDED:
        # Its memo is final and it is about to close.
        return known
    return known or "queued"


def error_of(execution: Execution, status: str, reason: str) -> RunError | None:
    """Why a run failed: its own error, or what Temporal recorded as the `reason`."""
    reported = execution.memo.get("error")
    if isinstance(reported, dict) and reported.get("code"):
        return RunError.model_validate(redacted_all(reported))
    if status != "failed":
        return None
    said = {
        "terminated": "The workflow was terminated in Temporal",
        "timed_out": "The workflow timed out in Temporal",
        "forgotten": "Temporal no longer keeps the run, and how it ended was not recorded",
    }.get(execution.state, "The workflow failed")
    return RunError(
        code=f"workflow_{execution.state}",
        message=f"{said}: {redacted(reason)}" if reason else f"{said}.",
    )


def _lineage(reported: Any) -> dict[str, Any] | None:
    """Where the run started from, with runs named by their own ids."""
    return (
        {**reported, "source": workflow_of(reported["source"])}
        if isinstance(reported, dict)
        else None
    )


def links(run_id: str, ui: str, namespace: str) -> Links:
    """Addresses of a run."""
    here = f"/v1/runs/{run_id}"
    there = f"{ui}/namespaces/{quote(namespace)}/workflows/{quote(run_id)}" if ui else None
    return Links(
        self=here,
        metrics=f"{here}/metrics",
        evals=f"{here}/evals",
        gauges=f"{here}/gauges",
        events=f"{here}/events",
        checkpoints=f"{here}/checkpoints",
        config=f"{here}/config",
        batches=f"{here}/batches",
        rollouts=f"{here}/rollouts",
        logs=f"{here}/logs",
        dashboard=f"/dashboard/#/runs/{quote(run_id)}",
        temporal_ui=there,
    )


def run_object(
    execution: Execution,
    *,
    ui: str,
    namespace: str,
    progress: Progress | None = None,
    reason: str = "",
) -> Run:
    """The run as the API shows it; `reason` is what Temporal recorded at its end."""
    memo = execution.memo
    status = status_of(execution)
    ended = status in ENDED
    version = memo.get("policy_version")
    waiting: Any = redacted_all(memo.get("waiting_for")) or None
    if execution.state == "paused":
        waiting = WaitingFor(name="the workflow to be unpaused in Temporal")
    elif ended:
        waiting = None
    return Run.model_validate(
        {
            "id": execution.id,
            "name": memo.get("name") or execution.id,
            "created_at": memo.get("created_at") or execution.started,
            "started_at": memo.get("started_at") or None,
            "finished_at": memo.get("finished_at") or execution.closed,
            "status": status,
            "waiting_for": waiting,
            "step": memo.get("step") or 0,
            "max_steps": memo.get("max_steps"),
            "envs": memo.get("envs") or [],
            "model": memo.get("model"),
            "policy_version": version if version is not None and version >= 0 else None,
            "reward": memo.get("reward"),
            "rollouts": memo.get("rollouts") or {},
            "checkpoint": memo.get("checkpoint"),
            "eval": redacted_all(memo.get("eval")) or {},
            "attempt": memo.get("attempt") or 1,
            "attempts": {role: n + 1 for role, n in (memo.get("restarts") or {}).items()},
            "restarts": memo.get("restarts") or {},
            "lineage": _lineage(memo.get("lineage")),
            "paused_because": None
            if ended
            else redacted_all(memo.get("paused_because") or memo.get("trouble")) or None,
            "pause_reason": None if ended else redacted_all(memo.get("pause_reason")) or None,
            "unchecked": memo.get("unchecked") if status == "queued" else None,
            "warnings": redacted_all(memo.get("warnings")) or [],
            "alarm": None if ended else redacted_all(memo.get("alarm")),
            "config_revision": memo.get("config_revision") or 0,
            "error": error_of(execution, status, reason),
            "config_changes": memo.get("config_changes") or {},
            "pending": {} if ended else memo.get("config_pending") or {},
            "end_reason": redacted_all(memo.get("end_reason")) or None,
            "metadata": memo.get("metadata") or {},
            "progress": None if ended else progress,
            "links": links(execution.id, ui, namespace),
        }
    )
