"""A run's health: the verdict, and its figures."""

from array import array
from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet.activities.contracts.health import WINDOW
from ratchet.api.client import printing
from ratchet.api.schemas.run import CheckpointSummary, EvalSummary, Links, Run, RunError, WaitingFor
from ratchet.api.services.health import judged
from ratchet.api.store.curves import Table

LINKS = Links.model_construct()

GOES_ON = "it goes on once it is resumed"


def run_of(status: str = "running", **more: Any) -> Run:
    fields = {"id": "r", "name": "r", "status": status, "step": 20, "max_steps": 50, "links": LINKS}
    return Run.model_construct(**{**fields, "eval": {}, "waiting_for": None, **more})


def table(count: int = 20, **columns: float) -> Table:
    base = {"time/step": 4.0, "time/wait_for_batch": 2.4, "time/train": 1.6, "errors/all/rate": 0.1}
    named = {**base, **{name.replace("__", "/"): value for name, value in columns.items()}}
    filled = {name: array("d", [value]) * count for name, value in named.items()}
    return Table([*range(count)], [1000.0 + 5 * i for i in range(count)], filled)


def test_a_healthy_run_has_its_figures() -> None:
    health = judged(run_of(), table(zero_advantage__all=0.25, staleness__max=2.0))
    assert (health.verdict, health.findings) == ("healthy", [])
    assert (health.seconds_per_step, health.seconds_left) == (5.0, 150.0)
    assert judged(run_of("paused"), table()).seconds_left is None, "nobody knows when it goes on"
    assert health.errors == pytest.approx(0.1)
    assert (health.without_signal, health.worst_staleness) == (0.25, 2.0)
    assert health.waits == "the trainer waits for rollouts 60 % of the time"


def test_what_is_the_matter_comes_with_what_to_do() -> None:
    failed = {"reverse": {"step": 0, "failed": 16, "of": 16, "error": "TaskError: no"}}
    run = Run.model_validate(
        {
            **run_of().model_dump(exclude={"links", "eval"}),
            "created_at": None,
            "eval": failed,
            "alarm": "step 20: mismatch KL 0.5 is above 0.1",
            "links": dict.fromkeys(Links.model_fields, ""),
        }
    )
    health = judged(run, table(), ["trainer"])
    assert health.verdict == "attention"
    assert health.message == "no worker polls for trainer, and 2 more"
    assert [finding.rule for finding in health.findings] == ["no_worker", "mismatch", "env_failing"]
    assert health.findings[2].message.endswith(
        "16 of 16 rollouts of the eval of reverse failed: TaskError: no"
    )
    assert health.findings[0].help == "docs/reading-a-run.md#no-worker"
    rows = dict(printing.health_rows(health, "http://h"))
    assert str(rows["do"]).endswith(" http://h/dashboard/help/reading-a-run.html#no-worker")
    assert str(rows["health"]) == "attention: no worker polls for trainer, and 2 more"
    assert rows["lately"] == (
        "5 s a step, 2 min 30 s left, errors 10 %, the trainer waits for rollouts 60 % of the time"
    )


NOW = datetime(2026, 1, 1, tzinfo=UTC)
WHY = "the first eval of e: 16 of 16 failed: TaskError: no"


def test_a_finding_says_since_when() -> None:
    (lately,) = judged(run_of(), table(time__wait_for_batch=3.9)).findings
    assert (lately.since_step, lately.since_earlier) == (9, False), "with the tenth step"
    assert lately.since == datetime.fromtimestamp(1045, UTC)
    (long,) = judged(run_of(), table(WINDOW + 20, time__wait_for_batch=3.9)).findings
    assert (long.since_step, long.since_earlier) == (20, True)
    (gone,) = judged(run_of(silent={"trainer": 300.0}), table(), ["trainer"]).findings
    assert gone.since is not None and (datetime.now(UTC) - gone.since).total_seconds() >= 300
    (line,) = printing.health_rows(judged(run_of(), table(time__wait_for_batch=3.9)), "http://h")[
        2:
    ]
    assert str(line[1]).startswith("The trainer is idle since step 9: ")


@pytest.mark.parametrize(
    ("reason", "rule", "since"),
    [(WHY, "paused", NOW), (None, "held", None), ("lunch", "held", None)],
)
def test_a_run_that_stopped_by_itself_says_what_to_do(
    reason: str | None, rule: str, since: datetime | None
) -> None:
    """And its error once only."""
    result = EvalSummary(step=0, failed=16, of=16, error="TaskError: no")
    why = {"paused_because": WHY, "pause_reason": reason}
    waiting = WaitingFor(name="something", since=NOW)
    run = run_of("paused", **why, waiting_for=waiting, eval={"e": result})
    health = judged(run, table(0))
    assert (health.verdict, health.message) == ("paused", WHY)
    assert [finding.rule for finding in health.findings] == [rule, "env_failing"]
    assert [finding.message for finding in health.findings] == [
        WHY,
        "16 of 16 rollouts of the eval of e failed",
    ]
    assert (health.findings[0].since_step, health.findings[0].since) == (20, since)
    assert "`ratchet runs logs r --env e`" in health.findings[1].advice


def test_a_run_that_paused_itself_may_need_what_no_resume_brings() -> None:
    run = run_of("paused", paused_because=WHY, pause_reason=WHY)
    (finding,) = judged(run, table(0)).findings
    assert "`ratchet runs resume r`" in finding.advice
    assert "that `ratchet runs set` cannot change, cancel the run" in finding.advice


@pytest.mark.parametrize(
    ("checkpoint", "rule", "advice"),
    [
        (CheckpointSummary(step=2), "failed", "(`ratchet runs resume r`), or fork it"),
        (None, "failed_early", "create a new run: there is nothing to resume"),
    ],
)
def test_a_run_that_failed_says_where_and_what_to_do(
    checkpoint: CheckpointSummary | None, rule: str, advice: str
) -> None:
    error = RunError(code="BadInput", role="env", message="no", param="train.env")
    run = run_of("failed", error=error, finished_at=NOW, checkpoint=checkpoint)
    health = judged(run, table(0))
    assert (health.verdict, health.message) == ("failed", "BadInput in env (train.env): no")
    (finding,) = health.findings
    assert (finding.rule, finding.message, finding.since) == (rule, health.message, NOW)
    assert advice in finding.advice


def test_what_the_preflight_found_is_said_in_words() -> None:
    error = RunError(code="bad_input", role="preflight", message="model.name: no such folder")
    health = judged(run_of("failed", error=error), table(0))
    said = "the check before the start found: model.name: no such folder"
    assert (health.message, health.findings[0].message) == (said, said)


def test_an_evaluation_is_healthy_without_a_step() -> None:
    waits = {"name": "2 evals to finish", "since": None}
    assert judged(run_of(step=0, max_steps=0), table(0)).verdict == "healthy"
    assert judged(run_of(step=0, waiting_for=WaitingFor(**waits)), table(0)).verdict == "waiting"


def test_worth_knowing_is_not_yet_unhealthy() -> None:
    health = judged(run_of(), table(time__wait_for_batch=3.9))
    assert health.verdict == "healthy"
    assert [finding.level for finding in health.findings] == ["info"]


@pytest.mark.parametrize(
    ("status", "more", "verdict", "message"),
    [
        ("queued", {"step": 0}, "waiting", "queued"),
        ("pausing", {}, "paused", f"it pauses once the work under way is done; {GOES_ON}"),
        ("paused", {}, "paused", GOES_ON),
        ("paused", {"paused_because": "the disk is full"}, "paused", "the disk is full"),
        ("succeeded", {}, "ended", "succeeded"),
        ("cancelled", {"end_reason": "cancelled"}, "ended", "cancelled"),
    ],
)
def test_the_status_has_its_word(
    status: str, more: dict[str, Any], verdict: str, message: str
) -> None:
    health = judged(run_of(status, **more), table(0))
    assert (health.verdict, health.message) == (verdict, message)
    assert health.seconds_left is None
