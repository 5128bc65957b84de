"""What happened to a run."""

from datetime import datetime
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from ratchet.activities.contracts.hosting import ServerState
from ratchet.api.schemas.common import examples

Level = Literal["debug", "info", "warning", "error"]
_OF_RUNS = (
    "created resumed status waiting step eval_started eval checkpoint config metadata asked "
    "warning alarm health trouble stuck ended"
)
EVENT_TYPES = (
    *(f"run.{what}" for what in _OF_RUNS.split()),
    *(f"server.{state}" for state in get_args(ServerState)),
    "work.done",
    "work.failed",
)
"""Every type of an event."""


class Event(BaseModel):
    """One thing that happened to a run. Types are only ever added."""

    model_config = examples(
        {
            "id": "0195a3c2-7d1e-7b1a-9c55-0d6f6a3c1b2e.118.0",
            "object": "event",
            "type": "run.step",
            "created_at": "2026-01-01T12:01:00.250Z",
            "level": "info",
            "source": "run",
            "message": "step 12 is done with reward 0.581",
            "data": {"step": 12, "policy_version": 12, "reward": 0.581},
        }
    )
    id: str = Field(description="Its cursor, which never changes.")
    object: Literal["event"] = "event"
    type: str = Field(
        description="The kind of event: a noun, a dot, and what happened to it.",
        examples=["run.step", "run.status", "server.down", "work.done"],
    )
    created_at: datetime = Field(description="When it happened, by Temporal's clock.")
    level: Literal["info", "warning", "error"] = Field(description="Its severity.")
    source: str = Field(description="The run, a server's role, or the name of the activity.")
    message: str = Field(description="What happened, for people.")
    data: dict[str, Any] = Field(description="The same for programs; fields are only ever added.")


class LogLine(BaseModel):
    """One line of a run's log, or of the log of one of its processes."""

    model_config = examples(
        {
            "id": "0195a3c2-7d1e-7b1a-9c55-0d6f6a3c1b2e.118.0",
            "created_at": "2026-01-01T12:01:00.250Z",
            "level": "info",
            "source": "run",
            "message": "step 12 is done with reward 0.581",
        }
    )
    id: str = Field(description="Its cursor; in the run's own log this is also the event's id.")
    created_at: datetime | None = Field(
        description="Null where a process writes no times, until its first line with one."
    )
    level: Level = Field(description="Its severity.")
    source: str = Field(description="The run, a server's role, an activity's name, or a process.")
    message: str = Field(description="What happened, for people.")
