"""The controls of a run: one table of verbs, which everything that offers, receives or shows a
control reads.

Each verb is a route of the API, a command, a method of the client, a button of the dashboard with
its dialog, and, except for `cancel`, a signal of the run's workflow; the event log records each
request. Invariants: names of signals never change, since recorded histories hold them; reading a
signal's payload never raises, whatever it holds, since that would stop the workflow for good.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from ratchet.activities.contracts.statuses import ENDED, RunStatus

MAX_NAMED_ENVS = 1000
REASON = {"reason": "Reason (optional)"}
WHY = "Why, for the run's log."

ALIVE: tuple[RunStatus, ...] = (
    "queued",
    "starting",
    "running",
    "pausing",
    "paused",
    "stopping",
)


class StopBody(BaseModel):
    """Optional body of a stop."""

    reason: str = Field(
        default="", max_length=200, description=WHY, examples=["reward has converged"]
    )


class PauseBody(BaseModel):
    """Optional body of a pause."""

    mode: Literal["drain", "cancel"] = Field(
        default="drain",
        description="What happens to rollouts in flight: 'drain' lets them finish first, 'cancel' "
        "cancels them and restarts them after the pause. Completed rollouts are kept.",
    )
    reason: str = Field(
        default="", max_length=200, description=WHY, examples=["the GPUs are needed elsewhere"]
    )


class ReasonBody(BaseModel):
    """Optional body of a verb that takes a reason, which goes into the run's log."""

    reason: str = Field(
        default="", max_length=200, description=WHY, examples=["before the GPUs are taken"]
    )


class EvalBody(BaseModel):
    """Optional body of an eval request; no envs means all of them."""

    envs: list[str] = Field(
        default_factory=list, description="Eval envs by name.", examples=[["reverse-text"]]
    )
    reason: str = Field(
        default="", max_length=200, description=WHY, examples=["the reward has jumped"]
    )


Heard = tuple[BaseModel, str]
"""A signal's payload as a body, and a warning about what in it was ignored ('' for nothing)."""


def plain(value: Any) -> Any:
    """Undoes what CLIs do to a payload: bytes and JSON inside a string become plain data."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode(errors="replace")
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            # Not JSON, or JSON that Python refuses: a huge number, or too deep a nesting.
            return value
    return value


def printable(value: Any, limit: int = 200) -> str:
    """Text that any payload converter can carry: lone surrogates replaced, cut at `limit`."""
    return str(value)[:limit].encode("utf-8", "replace").decode()


def _read_reason(value: Any) -> Heard:
    """Nothing, a reason as text, or {"reason": ...}."""
    said = value.get("reason") if isinstance(value, dict) else value
    usable = isinstance(value, dict | str) and said
    return ReasonBody(reason=printable(said) if usable else ""), ""


def _read_pause(value: Any) -> Heard:
    """Nothing, a mode or a reason as text, or {"mode": ..., "reason": ...}."""
    if value in ("drain", "cancel"):
        value = {"mode": value}
    body, _ = _read_reason(value)
    cancels = isinstance(value, dict) and value.get("mode") == "cancel"
    return PauseBody(mode="cancel" if cancels else "drain", **body.model_dump()), ""


def _read_eval(value: Any) -> Heard:
    """Nothing, an env's name, a list of names, or {"envs": [...], "reason": ...}."""
    reason = ""
    if isinstance(value, dict):
        reason = _read_reason(value)[0].model_dump()["reason"]
        value = plain(value.get("envs") or value.get("env"))
    if value is None or value == "":
        return EvalBody(reason=reason), ""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return EvalBody(reason=reason), f"{printable(value)!r} names no env; all are evaluated"
    return EvalBody(envs=[printable(name) for name in names[:MAX_NAMED_ENVS]], reason=reason), ""


@dataclass(frozen=True)
class Verb:
    """One verb. `name` is its route, command and method; the texts say what it does: `help` on the
    command line, `text` in its dialog, `about` in the API's documentation, if that says more.
    """

    name: str
    label: str
    help: str
    text: str
    about: str = ""
    refused: tuple[RunStatus, ...] = ("stopping", *ENDED)
    """Statuses in which the API refuses it."""
    offered: tuple[RunStatus, ...] = ("running",)
    """Statuses in which the dashboard offers it; with 'succeeded', only while steps are left."""
    of_training: bool = False
    """Whether it means nothing to an evaluation, which has no trainer."""
    signal: str = ""
    """Its signal; empty for Temporal's own cancellation."""
    spellings: tuple[str, ...] = ()
    """Other names of the signal. Case, '-' and '_' never matter."""
    body: type[BaseModel] = ReasonBody
    read: Callable[[Any], Heard] = _read_reason
    """Reads the output of `plain` for a signal's payload."""
    fields: tuple[str, ...] = ()
    """The fields of its body that the dialog offers; the run receives the whole body."""
    example: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=lambda: REASON)
    """Labels of fields, and of the values of those with a choice."""
    becomes: RunStatus | None = None
    """The status that its reply already shows for a run in a status of `moves`."""
    moves: tuple[RunStatus, ...] = ALIVE
    answer: str = ""
    """What the command prints beside the run's status."""
    danger: bool = False
    confirm: str = ""
    """The label of its dialog's confirming button; '': the verb's label."""
    dismiss: str = "Back"
    """The label of the dialog's other button."""

    @property
    def asked(self) -> str:
        """Its name in events, which is its signal's."""
        return self.signal or self.name

    @property
    def event(self) -> str:
        """The event log's text."""
        return f"{self.asked.replace('_', ' ')} was requested"

    def heard(self, value: Any = None) -> Heard:
        """Reads any payload of its signal; never raises."""
        return self.read(plain(value))


CONTROLS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "pause",
            "Pause",
            help="Pause a run: nothing stays in flight, a checkpoint is written, servers close.",
            text="The run writes a checkpoint and releases its servers. It stays paused until it "
            "is resumed.",
            about="Pauses a run: nothing stays in flight, a checkpoint is written, its servers "
            "close. Everything else stays.",
            offered=("queued", "starting", "running"),
            signal="pause",
            spellings=("pause_run",),
            body=PauseBody,
            read=_read_pause,
            fields=("mode", "reason"),
            example={"mode": "drain", "reason": "the GPUs are needed"},
            labels={
                "mode": "Rollouts in flight",
                "drain": "finish first",
                "cancel": "are cancelled and rolled out again later",
                **REASON,
            },
            becomes="pausing",
            moves=("queued", "starting", "running", "pausing"),
            dismiss="Keep running",
        ),
        Verb(
            "resume",
            "Resume",
            help="Resume a paused run, or one that ended, from its newest checkpoint.",
            text="The run continues from its last checkpoint, on new servers.",
            about="Resumes a paused run, on new servers; it has no effect on a run that is not "
            "paused.\n\nA run that failed, was cancelled, or was stopped before its last step "
            "continues from its newest sound checkpoint, under the same id and with the same "
            "curves, as its next attempt.",
            # A run that has ended is started again.
            refused=(),
            offered=("pausing", "paused", *ENDED),
            signal="resume",
            spellings=("resume_run", "unpause"),
            example={"reason": "the GPUs are back"},
            becomes="starting",
            moves=("pausing", "paused"),
        ),
        Verb(
            "eval",
            "Evaluate",
            help="Request an eval of the policy version that the engines have by then.",
            text="Evaluates the newest verified policy version while training continues.",
            about="Requests an eval of the version that the engines have by then, of all eval envs "
            "or of those named.",
            offered=("starting", "running"),
            signal="trigger_eval",
            spellings=("eval",),
            body=EvalBody,
            read=_read_eval,
            fields=("envs",),
            example={"envs": ["reverse-text"]},
            labels={"envs": "Eval envs (default: all)", **REASON},
            answer="an eval was requested",
        ),
        Verb(
            "checkpoint",
            "Checkpoint",
            help="Request a checkpoint at the next step boundary.",
            text="Writes a checkpoint after the current step.",
            about="Requests a checkpoint at the next step boundary; `checkpoint` of the run, and "
            "its events, show when it is committed.",
            of_training=True,
            signal="checkpoint",
            spellings=("save_checkpoint",),
            example={"reason": "before the GPUs are taken"},
            answer="a checkpoint was requested",
        ),
        Verb(
            "stop",
            "Stop",
            help="End a run gracefully, with a final checkpoint.",
            text="Ends the run after the current step, with a final checkpoint. It can be "
            "resumed later.",
            about="Ends a run gracefully, with a final checkpoint; it can be resumed from there.",
            refused=ENDED,
            offered=("queued", "starting", "running", "pausing", "paused"),
            signal="stop",
            spellings=("stop_run",),
            body=StopBody,
            fields=("reason",),
            example={"reason": "reward has converged"},
            becomes="stopping",
            danger=True,
            confirm="Stop the run",
            dismiss="Keep running",
        ),
        Verb(
            "cancel",
            "Cancel",
            help="End a run at once, without another checkpoint.",
            text="Ends the run at once, without a checkpoint: the work since the last one is lost. "
            "Use Stop to end it gracefully.",
            about="Ends a run now, without another checkpoint; it can be resumed from the last "
            "one. A run that is already cancelled stays as it is.",
            refused=("succeeded", "failed"),
            offered=ALIVE,
            fields=("reason",),
            example={"reason": "wrong data"},
            becomes="stopping",
            danger=True,
            confirm="Cancel the run",
            dismiss="Keep running",
        ),
    )
}
"""By name, in the order of the dashboard's buttons."""


def _flat(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_BY_SPELLING = {
    _flat(name): verb
    for verb in CONTROLS.values()
    for name in (verb.signal, *verb.spellings)
    if name
}


def verb_of(signal: str) -> Verb | None:
    """The verb that a signal's name means: 'Stop', 'stop-run' and 'stopRun' are 'stop'."""
    return _BY_SPELLING.get(_flat(signal))
