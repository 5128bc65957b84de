"""What runs execute on: engines, workers, and the health of the API."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from ratchet.activities.contracts.services import ServiceStatus
from ratchet.api.schemas.common import examples


class Health(BaseModel):
    """The state of the API process, or of what it depends on."""

    model_config = examples({"status": "ok", "checks": {"temporal": "ok", "store": "ok"}})
    status: Literal["ok"] = "ok"
    checks: dict[str, str] = Field(
        default_factory=dict, description="Each dependency that was checked, with the result."
    )


class Engine(BaseModel):
    """An inference engine that belongs to a run."""

    model_config = examples(
        {
            "object": "engine",
            "id": "reverse-1a2b3c/host/engine/0",
            "run_id": "reverse-1a2b3c",
            "index": 0,
            "state": "up",
            "attempt": 1,
            "since": "2026-01-01T12:00:09Z",
            "worker": "71@host",
            "policy_version": 12,
            "last_failure": None,
        }
    )
    object: Literal["engine"] = "engine"
    id: str = Field(description="Its host workflow.", examples=["reverse-1a2b3c/host/engine/0"])
    run_id: str = Field(description="The run that uses it.")
    index: int = Field(description="Its index among the run's engines.")
    state: Literal["starting", "up", "restarting"] = Field(description="Its current state.")
    attempt: int = Field(description="Starts of the server under this host; 1: never restarted.")
    since: datetime | None = Field(description="When this start began.")
    worker: str = Field(description="The worker process that hosts it.")
    policy_version: int | None = Field(description="Policy version that the run's engines serve.")
    last_failure: str | None = Field(default=None, description="Why it was last restarted.")


class ServiceItem(BaseModel):
    """A process of the local stack, as its supervisor sees it."""

    model_config = examples(
        {
            "object": "service",
            "name": "worker-rollout",
            "state": "up",
            "since": "2026-01-01T12:00:00Z",
            "restarts": 0,
            "ends": 0,
            "log": "logs/worker-rollout.log",
        }
    )
    object: Literal["service"] = "service"
    name: str = Field(description="As in `make status`.", examples=["worker-rollout"])
    state: ServiceStatus = Field(
        description="'down': about to be started again; 'crash-looping': ended three times or "
        "more without half a minute of health in between, and is still being retried."
    )
    since: datetime = Field(description="When it entered this state.")
    restarts: int = Field(description="How often its supervisor restarted it.")
    ends: int = Field(description="How often in a row it ended.")
    log: str = Field(description="Its log file, relative to RATCHET_HOME on the API's machine.")


class WorkerItem(BaseModel):
    """A worker process, as it polls Temporal."""

    model_config = examples(
        {
            "object": "worker",
            "id": "71@host",
            "role": "rollout",
            "queue": "ratchet-rollout",
            "last_seen": "2026-01-01T12:01:00Z",
            "gauges": [],
        }
    )
    object: Literal["worker"] = "worker"
    id: str = Field(description="Its identity in Temporal.")
    role: str = Field(description="The work that it executes.")
    queue: str = Field(description="The task queue that it polls.")
    last_seen: datetime | None = Field(description="When it last polled.")
    gauges: list[dict[str, Any]] = Field(
        default_factory=list, description="The gauges it last reported for each run, if any."
    )
