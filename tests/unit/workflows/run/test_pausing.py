"""Pauses and resumes: dispatch is woken by whatever changes what it must do."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.contracts.controls import CONTROLS, verb_of
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.training_run import TrainingRun
from tests.unit.workflows.support import EXAMPLES, config

PAUSE = CONTROLS["pause"]
ASKED = [("pause", "drain"), ("pause", "cancel"), ("resume", None)]


def running() -> TrainingRun:
    """A run under way."""
    run = TrainingRun(RunInput("run", config().model_dump(mode="json"), examples=EXAMPLES))
    run._state.lifecycle.status, run._state.steps.version = "running", 0
    # Nothing is published outside of a workflow.
    run._log.publish_request = lambda: None  # type: ignore[method-assign]
    return run


@settings(max_examples=30)
@given(st.lists(st.sampled_from(ASKED), max_size=8))
def test_dispatch_is_woken_by_every_pause_and_by_its_end(
    asked: list[tuple[str, str | None]],
) -> None:
    run = running()
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


def test_a_second_pause_keeps_the_reason_of_the_first() -> None:
    run = running()
    run.hear(PAUSE, {"reason": "the GPUs are needed"})
    for status in ("running", "pausing", "paused"):
        run._state.lifecycle.status = status
        run.hear(PAUSE, {"reason": "another one"})
        assert run._state.requests.pause_reason == "the GPUs are needed"
    run.hear(CONTROLS["resume"], None)
    run.hear(PAUSE, {"reason": "another one"})
    assert run._state.requests.pause_reason == "another one"


def test_cancelling_what_drains_adds_its_reason() -> None:
    run = running()
    for mode, reason in (("drain", "the GPUs are needed"), ("cancel", "now"), ("cancel", "really")):
        run.hear(PAUSE, {"mode": mode, "reason": reason})
    assert run._state.requests.pause_reason == "the GPUs are needed; now"
    again = running()
    for mode in ("drain", "cancel"):
        again.hear(PAUSE, {"mode": mode})
    assert again._state.requests.pause_reason == "pause signal"
