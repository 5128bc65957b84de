"""Recorded histories of real executions are read, and pass the verdicts that they can."""

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory

from ratchet.activities.contracts import names
from tests.chaos import checker, history, scenario
from tests.workflow.record import HISTORIES, read, started


def recorded(kind: str) -> history.Evidence:
    """The evidence of a recorded run."""
    paths = sorted((HISTORIES / kind).glob("*.json.gz"), key=_order)
    run_id = started(read(HISTORIES / kind / "run.json.gz"))["workflowId"]
    evidence = history.Evidence(run_id)
    for path in paths:
        content = read(path)
        workflow = started(content)["workflowId"]
        events = WorkflowHistory.from_json(workflow, content).events
        history.take_in(evidence, workflow, list(events))
    return evidence


def _order(path: Path) -> tuple[str, int]:
    stem, _, again = path.name.removesuffix(".json.gz").partition(".")
    return stem, int(again or 0)


SURVIVED = (
    "plain",
    "hand_overs",
    "killed_engine",
    "empty_batch",
    "lost_trainer",
    "dead_generation",
    "refused_gate",
    "cancelled_pause",
)
"""Runs that went through something and are none the worse for it."""


@pytest.mark.parametrize("kind", SURVIVED)
def test_recorded_run_is_read_and_passes(kind: str) -> None:
    evidence = recorded(kind)
    last = max(memo["step"] for _, memo in evidence.memos)
    sizes = scenario.epoch_sizes(evidence)
    for verdict in (
        checker.delivery(evidence),
        checker.no_losses(evidence),
        checker.examples(evidence, sizes),
        checker.batches(evidence, last),
        checker.versions(evidence),
    ):
        assert verdict.good, (verdict.name, verdict.violations)
    assert len(checker.shipped(evidence)) >= last > 0
    done = [a for a in evidence.of(names.TRAIN_STEP) if a.outcome == "completed"]
    assert len(done) >= last
    assert all(a.ended_at >= a.started_at >= a.scheduled_at for a in done)
    assert evidence.refs


def test_recorded_run_that_lost_a_report_fails() -> None:
    evidence = recorded("plain")
    reports = [s for s in evidence.signals_named("dispatch_report") if s.value["groups"]]
    evidence.signals.remove(reports[0])
    assert not checker.delivery(evidence).good
