"""Pauses and resumes: dispatch is woken by whatever changes what it must do."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.contracts.controls import verb_of
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.training_run import TrainingRun
from tests.unit.workflows.support import EXAMPLES, config

ASKED = [("pause", "drain"), ("pause", "cancel"), ("resume", None)]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(ASKED), max_size=8))
def test_dispatch_is_woken_by_every_pause_and_by_its_end(
    asked: list[tuple[str, str | None]],
) -> None:
    run = TrainingRun(RunInput("run", config().model_dump(mode="json"), examples=EXAMPLES))
    run._state.lifecycle.status, run._state.steps.version = "running", 0
    run._leases.open("t0")
    wanted = ""
    for name, mode in asked:
        before, verb = run._leases.control(0), verb_of(name)
        assert verb is not None
        run._news.take()
        run.hear(verb, mode)
        # A drain does not replace a cancel that was requested before.
        wanted = "" if mode is None else "cancel" if wanted == "cancel" else mode
        after = run._leases.control(0)
        assert after.pause == wanted
        assert run._news.pending or replace(after, seq=before.seq) == before
