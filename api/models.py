"""What the API answers with. Fields are only ever added; the OpenAPI page is made from these."""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from workflows.messages import RunStatus

Item = TypeVar("Item")

STATUSES: tuple[str, ...] = get_args(RunStatus)
ENDED = ("succeeded", "failed", "cancelled")


class WaitingFor(BaseModel):
    """Why the run does not move at this moment."""

    name: str = Field(examples=["a worker on task queue ratchet-env"])
    since: datetime | None = None
    until: datetime | None = Field(default=None, description="When the run stops waiting for it.")


class RunError(BaseModel):
    """Why a run failed."""

    code: str = Field(examples=["BadInput"])
    role: str | None = Field(default=None, description="The worker role that failed.")
    message: str = ""
    param: str | None = Field(default=None, description="The config key at fault.")
    is_user_error: bool = Field(default=False, description="The config is wrong, not the service.")


class CheckpointSummary(BaseModel):
    """The last committed checkpoint."""

    model_config = ConfigDict(extra="allow")
    step: int


class EvalSummary(BaseModel):
    """The latest eval of one env."""

    model_config = ConfigDict(extra="allow")
    step: int | None = None
    reward: float | None = Field(default=None, description="Mean reward over the eval.")


class Progress(BaseModel):
    """Live gauges; left out when nothing was heard for a while."""

    rollouts_inflight_train: int = Field(default=0, description="Train rollouts executing.")
    rollouts_inflight_eval: int = Field(default=0, description="Eval rollouts executing.")
    tokens_per_s: float = Field(default=0.0, description="Sampled tokens per second, all workers.")
    permits: int | None = Field(default=None, description="Rollouts that may execute at once.")


class Links(BaseModel):
    """Addresses that belong to the run."""

    self: str = Field(examples=["/v1/runs/reverse-1a2b3c"])
    metrics: str = Field(examples=["/v1/runs/reverse-1a2b3c/metrics"])
    evals: str = Field(examples=["/v1/runs/reverse-1a2b3c/evals"])
    temporal_ui: str | None = Field(default=None, description="The run in Temporal's Web UI.")


RUN_EXAMPLE: dict[str, Any] = {
    "id": "reverse-1a2b3c",
    "object": "run",
    "name": "reverse",
    "created_at": "2026-01-01T12:00:00Z",
    "started_at": "2026-01-01T12:00:09Z",
    "finished_at": None,
    "status": "running",
    "waiting_for": {"name": "rollouts of batch 13", "since": "2026-01-01T12:01:00Z"},
    "step": 12,
    "max_steps": 40,
    "policy_version": 12,
    "checkpoint": {"step": 10},
    "reward": 0.58,
    "rollouts": {"train": 1536, "eval": 96},
    "eval": {"reverse-text": {"step": 10, "reward": 0.61}},
    "restarts": {"engine": 0},
    "error": None,
    "end_reason": None,
    "metadata": {"owner": "ana"},
    "progress": {
        "rollouts_inflight_train": 64,
        "rollouts_inflight_eval": 0,
        "tokens_per_s": 830.5,
        "permits": 64,
    },
    "links": {
        "self": "/v1/runs/reverse-1a2b3c",
        "metrics": "/v1/runs/reverse-1a2b3c/metrics",
        "evals": "/v1/runs/reverse-1a2b3c/evals",
        "temporal_ui": "http://127.0.0.1:8233/namespaces/default/workflows/reverse-1a2b3c",
    },
}


class Run(BaseModel):
    """A training run."""

    model_config = ConfigDict(json_schema_extra={"examples": [RUN_EXAMPLE]})

    id: str
    object: Literal["run"] = "run"
    name: str
    created_at: datetime | None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    status: RunStatus
    waiting_for: WaitingFor | None = None
    step: int = Field(default=0, description="Trainer steps done.")
    max_steps: int | None = None
    policy_version: int | None = Field(default=None, description="Version the engines serve.")
    reward: float | None = Field(default=None, description="Mean train reward of the last step.")
    rollouts: dict[str, int] = Field(
        default_factory=dict, description="Rollouts delivered, by kind."
    )
    checkpoint: CheckpointSummary | None = None
    eval: dict[str, EvalSummary] = Field(default_factory=dict, description="Latest eval by env.")
    restarts: dict[str, int] = Field(default_factory=dict, description="Restarts by role.")
    error: RunError | None = None
    end_reason: str | None = Field(default=None, description="Why the run ended, in words.")
    metadata: dict[str, str] = Field(default_factory=dict)
    progress: Progress | None = None
    links: Links


class ResolvedConfig(BaseModel):
    """Answer to a dry run: the config with every default written out."""

    object: Literal["config"] = "config"
    config: dict[str, Any]


class StepMetrics(BaseModel):
    """All metrics of one trainer step."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {"step": 3, "time": 1767268800.0, "metrics": {"reward": 0.41, "loss": -0.02}}
            ]
        },
    )
    step: int
    time: float | str | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)


class EvalRecord(BaseModel):
    """One eval of one env; further fields are metrics of that eval."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [{"epoch": "10-1/reverse-text", "env": "reverse-text", "step": 10}]
        },
    )
    epoch: str
    env: str | None = None
    step: int | None = None


class ListOf(BaseModel, Generic[Item]):
    """A page of a list; ask again with the last item as cursor while `has_more` is true."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool


class StopBody(BaseModel):
    """Optional body of a stop."""

    reason: str = Field(default="", max_length=200, examples=["reward has converged"])


class EvalBody(BaseModel):
    """Optional body of an eval request; no envs means all of them."""

    envs: list[str] = Field(default_factory=list, examples=[["reverse-text"]])


class Health(BaseModel):
    """The process, or what it depends on, works."""

    status: Literal["ok"] = "ok"
    checks: dict[str, str] = Field(default_factory=dict)
