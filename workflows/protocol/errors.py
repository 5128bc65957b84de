"""How a run ends before its last step."""

from temporalio.exceptions import ActivityError, ApplicationError

from ratchet.activities.contracts import names

NO_PART_OF_A_STEP = (
    *("dispatch", "env", "rollouts", "scoring"),
    *(names.FINALIZE_EVAL, names.RECORD_STEP, names.SHIP_BATCH),
)
"""Roles and activities that can fail while a batch is trained and its weights are pushed."""


class RunFailed(Exception):
    """The run cannot continue. `role` names the part that failed, `user` says whose mistake it is.

    A `final` failure ends the run; any other one pauses a run that has begun to train, since it may
    be fixed.
    """

    def __init__(
        self,
        role: str,
        message: str,
        *,
        code: str = "failed",
        user: bool = False,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.final = final or user
        self.error = {
            "code": code,
            "role": role,
            "message": message[:1500],
            "param": None,
            "is_user_error": user,
        }

    @property
    def spares_steps(self) -> bool:
        """Whether the step under way can end in spite of it."""
        return self.error["role"] in NO_PART_OF_A_STEP


class Stopped(Exception):
    """The run was asked to stop."""


class Paused(Exception):
    """The run was asked to pause."""


def cause_of(error: BaseException) -> str:
    """The innermost message of an activity's failure, with its type."""
    while isinstance(error, ActivityError) and error.cause is not None:
        error = error.cause
    if isinstance(error, ApplicationError) and error.type:
        return f"{error.type}: {error.message}"[:1000]
    return f"{type(error).__name__}: {error}"[:1000]


def type_of(error: ActivityError) -> str:
    """The error type of an activity's failure, for branching; '' if it has none."""
    return (error.cause.type or "") if isinstance(error.cause, ApplicationError) else ""
