"""What a failure says of its cause."""

from temporalio.exceptions import ActivityError, ApplicationError, RetryState

from ratchet.workflows.protocol.errors import cause_of


def of_activity(cause: BaseException | None) -> ActivityError:
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=5,
        started_event_id=6,
        identity="1@here",
        activity_type="step",
        activity_id="5",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )
    error.__cause__ = cause
    return error


def test_the_innermost_cause_is_named_with_its_type() -> None:
    inner = ApplicationError("no such file", type="OSError")
    assert cause_of(inner) == "OSError: no such file"
    assert cause_of(of_activity(of_activity(inner))) == "OSError: no such file"


def test_what_has_no_type_of_its_own_is_named_by_its_class() -> None:
    assert cause_of(of_activity(ValueError("bad"))) == "ValueError: bad"
    assert cause_of(ApplicationError("bad")) == "ApplicationError: bad"
    assert cause_of(of_activity(None)) == "ActivityError: Activity task failed"


def test_long_messages_are_cut() -> None:
    assert len(cause_of(ApplicationError("x" * 2000, type="T"))) == 1000
    assert len(cause_of(ValueError("x" * 2000))) == 1000
