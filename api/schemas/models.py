"""What the API answers with. Fields are only ever added; the OpenAPI page is made from these."""

from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, computed_field

from ratchet.activities.contracts.statuses import RunStatus
from ratchet.api.services.plan import Plan

Item = TypeVar("Item")


class WaitingFor(BaseModel):
    """Why the run does not move at this moment."""

    name: str = Field(examples=["policy v7: trainer step running"])
    since: datetime | None = None
    until: datetime | None = Field(default=None, description="When the run stops waiting for it.")

    @computed_field(examples=["waiting for policy v7: trainer step running for 12 s"])  # type: ignore[prop-decorator]
    @property
    def message(self) -> str:
        """What the run waits for, and for how long, in one sentence."""
        if self.since is None:
            return f"waiting for {self.name}"
        seconds = (datetime.now(UTC) - self.since).total_seconds()
        return f"waiting for {self.name} for {max(seconds, 0.0):.0f} s"


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
    rollouts_inflight: dict[str, int] = Field(
        default_factory=dict, description="Rollouts executing, by '<kind>/<env>'."
    )
    tokens_per_s: float = Field(default=0.0, description="Sampled tokens per second, all workers.")
    permits: int | None = Field(default=None, description="Rollouts that may execute at once.")
    mode: Literal["train", "eval"] | None = Field(
        default=None, description="Whose turn it is: evals go first while any is left to dispatch."
    )
    queued_eval: int = Field(default=0, description="Eval rollouts that wait for a permit.")
    waiting_for: str | None = Field(
        default=None, description="Why no further rollout was dispatched."
    )


class LoopLag(BaseModel):
    """How late a worker's event loop woke up since the sample before, in seconds."""

    mean: float
    max: float
    p99: float


class LagSample(BaseModel):
    """How late the event loop of a worker woke that is not a rollout worker, at one moment."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "time": 1767268800.25,
                    "source": "trainer-host-72-0c31aa",
                    "role": "trainer",
                    "event_loop_lag": {"mean": 0.0004, "max": 0.012, "p99": 0.006},
                }
            ]
        },
    )
    time: float = Field(description="Unix time in seconds.")
    source: str = Field(description="The worker process that took the sample.")
    role: Literal["orchestrator", "trainer", "inference", "env"]
    event_loop_lag: LoopLag | None = None


class GaugeSample(BaseModel):
    """Gauges of one rollout worker at one moment."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "time": 1767268800.25,
                    "source": "rollout-host-71-5f0c2e",
                    "role": "rollout",
                    "worker_inflight": 24,
                    "tokens_per_s": 410.5,
                    "event_loop_lag": {"mean": 0.0004, "max": 0.012, "p99": 0.006},
                    "heard": 1767268799.5,
                    "inflight": {"train/reverse-text": 40, "eval/reverse-text": 8},
                    "inflight_train": 40,
                    "inflight_eval": 8,
                    "permits": 48,
                    "mode": "eval",
                    "queued_eval": 16,
                    "groups": 6,
                    "off_policy_max": 1,
                    "off_policy_mean": 0.25,
                    "waiting_for": "a free permit",
                    "version": 12,
                }
            ]
        },
    )
    time: float = Field(description="Unix time in seconds.")
    source: str = Field(description="The worker process that took the sample.")
    role: Literal["rollout"] = "rollout"
    worker_inflight: int = Field(default=0, description="Rollouts this worker executes.")
    tokens_per_s: float = Field(default=0.0, description="Tokens sampled for this worker a second.")
    event_loop_lag: LoopLag | None = None
    heard: float | None = Field(
        default=None,
        description="When the worker was told what follows, which is of the whole run (Unix time).",
    )
    inflight: dict[str, int] = Field(
        default_factory=dict, description="Rollouts executing, by '<kind>/<env>'."
    )
    inflight_train: int = Field(default=0, description="Train rollouts executing.")
    inflight_eval: int = Field(default=0, description="Eval rollouts executing.")
    permits: int = Field(default=0, description="Rollouts that may execute at once.")
    mode: str | None = Field(default=None, description="'eval' while an eval is dispatched.")
    queued_eval: int = Field(default=0, description="Eval rollouts that wait for a permit.")
    groups: int = Field(default=0, description="Groups in flight.")
    off_policy_max: float = Field(
        default=0, description="Most versions since a train group in flight began."
    )
    off_policy_mean: float = Field(
        default=0, description="Versions since the train groups in flight began, on average."
    )
    waiting_for: str = Field(default="", description="Why no further rollout was dispatched.")
    version: int = Field(default=0, description="The policy version that engines served.")


class Links(BaseModel):
    """Addresses that belong to the run."""

    self: str = Field(examples=["/v1/runs/reverse-1a2b3c"])
    metrics: str = Field(examples=["/v1/runs/reverse-1a2b3c/metrics"])
    evals: str = Field(examples=["/v1/runs/reverse-1a2b3c/evals"])
    gauges: str = Field(examples=["/v1/runs/reverse-1a2b3c/gauges"])
    events: str = Field(examples=["/v1/runs/reverse-1a2b3c/events"])
    checkpoints: str = Field(examples=["/v1/runs/reverse-1a2b3c/checkpoints"])
    config: str = Field(examples=["/v1/runs/reverse-1a2b3c/config"])
    batches: str = Field(examples=["/v1/runs/reverse-1a2b3c/batches"])
    rollouts: str = Field(examples=["/v1/runs/reverse-1a2b3c/rollouts"])
    logs: str = Field(examples=["/v1/runs/reverse-1a2b3c/logs"])
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
    "attempt": 1,
    "attempts": {"engine": 1, "env": 1, "trainer": 1},
    "restarts": {"engine": 0, "env": 0, "trainer": 0},
    "lineage": None,
    "paused_because": None,
    "config_revision": 0,
    "error": None,
    "end_reason": None,
    "metadata": {"owner": "ana"},
    "progress": {
        "rollouts_inflight_train": 64,
        "rollouts_inflight_eval": 0,
        "rollouts_inflight": {"train/reverse-text": 64},
        "tokens_per_s": 830.5,
        "permits": 64,
        "mode": "train",
        "queued_eval": 0,
        "waiting_for": "a free permit",
    },
    "links": {
        "self": "/v1/runs/reverse-1a2b3c",
        "metrics": "/v1/runs/reverse-1a2b3c/metrics",
        "evals": "/v1/runs/reverse-1a2b3c/evals",
        "gauges": "/v1/runs/reverse-1a2b3c/gauges",
        "events": "/v1/runs/reverse-1a2b3c/events",
        "checkpoints": "/v1/runs/reverse-1a2b3c/checkpoints",
        "config": "/v1/runs/reverse-1a2b3c/config",
        "batches": "/v1/runs/reverse-1a2b3c/batches",
        "rollouts": "/v1/runs/reverse-1a2b3c/rollouts",
        "logs": "/v1/runs/reverse-1a2b3c/logs",
        "temporal_ui": "http://127.0.0.1:8233/namespaces/default/workflows/reverse-1a2b3c",
    },
}


class Lineage(BaseModel):
    """Where a run that did not begin at step 0 comes from."""

    source: str = Field(description="The run.")
    step: int | None = Field(
        default=None, description="Step of its checkpoint; none until that was chosen."
    )
    kind: Literal["fork", "resume"] = Field(
        default="fork", description="'resume': an earlier attempt of the same run."
    )


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
    attempt: int = Field(
        default=1, description="1; one more each time the run is resumed after it had ended."
    )
    attempts: dict[str, int] = Field(
        default_factory=dict, description="Starts of servers by role, the first included."
    )
    restarts: dict[str, int] = Field(default_factory=dict, description="Restarts by role.")
    lineage: Lineage | None = Field(
        default=None, description="The run and the checkpoint it goes on from."
    )
    alarm: str | None = Field(
        default=None,
        description="Trainer and engines drift apart: the last step's mismatch KL is too high.",
    )
    paused_because: str | None = Field(
        default=None, description="Why the run paused itself; it goes on once that is mended."
    )
    error: RunError | None = None
    config_revision: int = Field(
        default=0, description="Revision of the config that holds; 0: as it began."
    )
    config_changes: dict[str, Any] = Field(
        default_factory=dict,
        description="What was changed of the config while the run ran, as nested sections.",
    )
    end_reason: str | None = Field(default=None, description="Why the run ended, in words.")
    metadata: dict[str, str] = Field(default_factory=dict)
    progress: Progress | None = None
    links: Links


class ResolvedConfig(BaseModel):
    """Answer to a dry run: the config with every default written out, and what it would do."""

    object: Literal["config"] = "config"
    config: dict[str, Any]
    plan: Plan


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
    problem: str | None = Field(
        default=None, description="Its record is damaged in this way, and nothing else is known."
    )


class ListOf(BaseModel, Generic[Item]):
    """A page of a list; ask again with the last item as cursor while `has_more` is true."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool


class StopBody(BaseModel):
    """Optional body of a stop."""

    reason: str = Field(default="", max_length=200, examples=["reward has converged"])


class PauseBody(BaseModel):
    """Optional body of a pause."""

    mode: Literal["drain", "cancel"] = Field(
        default="drain",
        description="What becomes of rollouts in flight: they end first, or they are given up and "
        "begin anew after the pause; what had ended is kept.",
    )
    reason: str = Field(default="", max_length=200, examples=["the GPUs are needed elsewhere"])


class ConfigPatch(BaseModel):
    """A change of a running run: sections like a config's own, with what is to change; train envs
    are named (`{"train": {"env": {"reverse-text": {"ratio": 2}}}}`). Refusals list the keys that
    may change.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {"dispatch": {"max_inflight_rollouts": 128}, "metadata": {"note": "halved"}}
            ]
        },
    )
    metadata: dict[str, str | None] | None = Field(
        default=None, description="Pairs to add or change; null takes one out."
    )


class ReasonBody(BaseModel):
    """Optional body of a verb that takes a reason, which is kept in the run's log."""

    reason: str = Field(default="", max_length=200, examples=["before the GPUs are taken"])


class EvalBody(BaseModel):
    """Optional body of an eval request; no envs means all of them."""

    envs: list[str] = Field(default_factory=list, examples=[["reverse-text"]])


class Health(BaseModel):
    """The process, or what it depends on, works."""

    status: Literal["ok"] = "ok"
    checks: dict[str, str] = Field(default_factory=dict)
