"""What a run hears and refuses."""

import pytest

from ratchet.activities.contracts.controls import CONTROLS
from tests.unit.workflows.run.test_evals import evaluation
from tests.unit.workflows.run.test_pausing import running


def test_a_run_that_is_ending_accepts_no_changes() -> None:
    run = running()
    run._check_change({"max_steps": 20})
    run._state.requests.stop = "enough"
    with pytest.raises(ValueError, match="the run is running and accepts no more changes"):
        run._check_change({"max_steps": 20})
    run._state.requests.stop, run._state.lifecycle.status = "", "failed"
    with pytest.raises(ValueError, match="the run is failed and accepts no more changes"):
        run._check_change({"max_steps": 20})


def test_an_evaluation_has_nothing_to_checkpoint() -> None:
    for run, trains in ((running(), True), (evaluation(), False)):
        # Notes are of a workflow's own clock and log.
        run._log.note = lambda *_: None  # type: ignore[method-assign]
        run.hear(CONTROLS["checkpoint"], None)
        assert run._state.requests.checkpoint is trains
        ignored = [text for text in run._state.lifecycle.warnings if "checkpoint: ignored" in text]
        assert bool(ignored) is not trains
