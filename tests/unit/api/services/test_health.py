"""A run's health: the verdict, and its figures."""

from array import array
from typing import Any

import pytest

from ratchet.api.client import printing
from ratchet.api.schemas.run import Links, Run, WaitingFor
from ratchet.api.services.health import judged
from ratchet.api.store.curves import Table

LINKS = Links.model_construct()


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
        ("pausing", {}, "paused", "it goes on once it is resumed"),
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
