"""A run as the API shows it."""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from ratchet.activities.contracts.statuses import RunStatus
from ratchet.api.schemas.common import examples


class WaitingFor(BaseModel):
    """Why the run is not making progress at this moment."""

    name: str = Field(
        description="What it waits for.", examples=["policy v7: trainer step running"]
    )
    since: datetime | None = Field(default=None, description="When it began to wait.")
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

    code: str = Field(description="The kind of failure; never changes.", examples=["BadInput"])
    role: str | None = Field(default=None, description="The worker role that failed.")
    message: str = Field(default="", description="What went wrong and how to fix it.")
    param: str | None = Field(default=None, description="The config key at fault.")
    is_user_error: bool = Field(default=False, description="The config is wrong, not the service.")


class CheckpointSummary(BaseModel):
    """The last committed checkpoint."""

    model_config = ConfigDict(extra="allow")
    step: int = Field(description="Trainer steps done when it was written.")


class EvalSummary(BaseModel):
    """The latest eval of one env."""

    model_config = ConfigDict(extra="allow")
    step: int | None = Field(default=None, description="The policy's step.")
    reward: float | None = Field(
        default=None, description="Mean reward over the eval; null: no rollout has one."
    )
    failed: int | None = Field(
        default=None, description="Rollouts without a reward; null: every rollout has one."
    )
    of: int | None = Field(default=None, description="Rollouts of the eval, if some failed.")
    error: str | None = Field(
        default=None, description="The most common error, and where in the user's code it arose."
    )
    rollouts: int | None = Field(default=None, description="Rollouts of the eval.")
    versions: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest policy version that served it."
    )
    epoch: str | None = Field(default=None, description="Its id, '<step>-<count>/<env>'.")


class Progress(BaseModel):
    """Live gauges; left out if no worker has reported for a while."""

    rollouts_inflight_train: int = Field(default=0, description="Train rollouts executing.")
    rollouts_inflight_eval: int = Field(default=0, description="Eval rollouts executing.")
    rollouts_inflight: dict[str, int] = Field(
        default_factory=dict, description="Rollouts executing, by '<kind>/<env>'."
    )
    tokens_per_s: float = Field(default=0.0, description="Sampled tokens per second, all workers.")
    permits: int | None = Field(default=None, description="Rollouts that may execute at once.")
    mode: Literal["train", "eval"] | None = Field(
        default=None, description="What is dispatched: evals go first while any are left."
    )
    queued_eval: int = Field(default=0, description="Eval rollouts waiting for a permit.")
    waiting_for: str | None = Field(
        default=None, description="Why no further rollout was dispatched."
    )


class Links(BaseModel):
    """Addresses of the run's resources."""

    self: str = Field(description="The run.", examples=["/v1/runs/reverse-1a2b3c"])
    metrics: str = Field(description="Its metrics.", examples=["/v1/runs/reverse-1a2b3c/metrics"])
    evals: str = Field(description="Its evals.", examples=["/v1/runs/reverse-1a2b3c/evals"])
    gauges: str = Field(description="Its gauges.", examples=["/v1/runs/reverse-1a2b3c/gauges"])
    events: str = Field(description="Its events.", examples=["/v1/runs/reverse-1a2b3c/events"])
    checkpoints: str = Field(
        description="Its checkpoints.", examples=["/v1/runs/reverse-1a2b3c/checkpoints"]
    )
    config: str = Field(description="Its config.", examples=["/v1/runs/reverse-1a2b3c/config"])
    batches: str = Field(description="Its batches.", examples=["/v1/runs/reverse-1a2b3c/batches"])
    rollouts: str = Field(
        description="Its rollouts.", examples=["/v1/runs/reverse-1a2b3c/rollouts"]
    )
    logs: str = Field(description="Its log.", examples=["/v1/runs/reverse-1a2b3c/logs"])
    dashboard: str = Field(
        default="", examples=["/dashboard/#/runs/reverse-1a2b3c"], description="The run's page."
    )
    temporal_ui: str | None = Field(default=None, description="The run in Temporal's Web UI.")


RUN_EXAMPLE: dict[str, Any] = {
    "id": "reverse-1a2b3c",
    "object": "run",
    "name": "reverse",
    "created_at": "2026-01-01T12:00:00Z",
    "started_at": "2026-01-01T12:00:09Z",
    "finished_at": None,
    "status": "running",
    "waiting_for": {
        "name": "rollouts of batch 13",
        "since": "2026-01-01T12:01:00Z",
        "until": None,
        "message": "waiting for rollouts of batch 13 for 12 s",
    },
    "kind": "train",
    "step": 12,
    "max_steps": 40,
    "envs": ["reverse-text"],
    "model": "ratchet/tiny",
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
    "pause_reason": None,
    "config_revision": 0,
    "pending": {},
    "error": None,
    "end_reason": None,
    "metadata": {"owner": "ana"},
    "note": "lr halved after the jump at step 40",
    "disk": 31457280,
    "archived": False,
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
    "silent": {},
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
        "dashboard": "/dashboard/#/runs/reverse-1a2b3c",
        "temporal_ui": "http://127.0.0.1:8233/namespaces/default/workflows/reverse-1a2b3c",
    },
}


class Lineage(BaseModel):
    """The origin of a run that did not begin at step 0."""

    source: str = Field(description="The run.")
    step: int | None = Field(default=None, description="Null until a checkpoint was chosen.")
    kind: Literal["fork", "resume", "model"] = Field(
        default="fork",
        description="'resume': an earlier attempt of the same run; 'model': a separate run that "
        "began with the weights of that step.",
    )


class Run(BaseModel):
    """A training run, or an evaluation."""

    model_config = ConfigDict(json_schema_extra={"examples": [RUN_EXAMPLE]})

    id: str = Field(description="Its id: its name and six characters.")
    object: Literal["run"] = "run"
    name: str = Field(description="Its name, as the config has it.")
    created_at: datetime | None = Field(description="When it was requested.")
    started_at: datetime | None = Field(
        default=None, description="When its workflow started; null before."
    )
    finished_at: datetime | None = Field(default=None, description="When it ended; null before.")
    status: RunStatus = Field(description="Its current status.")
    waiting_for: WaitingFor | None = None
    unchecked: str | None = Field(
        default=None,
        description="What workers have not checked in time of a run that is queued; null: they "
        "have. The run checks it before it starts, and fails if it is wrong.",
    )
    step: int = Field(default=0, description="Trainer steps done.")
    max_steps: int | None = Field(
        default=None,
        description="Steps after which it ends; null: it runs until it is stopped. 0: an "
        "evaluation.",
    )
    envs: list[str] = Field(
        default_factory=list,
        description="Envs it trains on, or evaluates; empty for runs that older builds ended.",
    )
    model: str | None = Field(
        default=None, description="The model it trains or evaluates, as in its config."
    )
    policy_version: int | None = Field(default=None, description="Version the engines serve.")
    reward: float | None = Field(default=None, description="Mean train reward of the last step.")
    rollouts: dict[str, int] = Field(
        default_factory=dict, description="Rollouts delivered, by kind."
    )
    checkpoint: CheckpointSummary | None = None
    eval: dict[str, EvalSummary] = Field(default_factory=dict, description="Latest eval by env.")
    attempt: int = Field(
        default=1, description="Starts at 1; each resume after the run has ended adds one."
    )
    attempts: dict[str, int] = Field(
        default_factory=dict, description="Starts of servers by role, the first included."
    )
    restarts: dict[str, int] = Field(default_factory=dict, description="Restarts by role.")
    lineage: Lineage | None = Field(
        default=None, description="The run and the step that it started from."
    )
    warnings: list[str] = Field(
        default_factory=list, description="Warnings that need attention; the newest ones."
    )
    alarm: str | None = Field(
        default=None,
        description="Trainer and engines drift apart: the last step's mismatch KL is too high.",
    )
    paused_because: str | None = Field(
        default=None, description="Why the run paused itself; fix it, then resume the run."
    )
    pause_reason: str | None = Field(
        default=None, description="The reason for the pause, if one was given."
    )
    error: RunError | None = None
    config_revision: int = Field(
        default=0, description="Revision of the config in force; 0: as the run began."
    )
    config_changes: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes made to the config while the run was running, as nested sections.",
    )
    pending: dict[str, Any] = Field(
        default_factory=dict,
        description="Config changes that take effect at the next step, by dotted key; until "
        "then all other fields describe the previous config.",
    )
    end_reason: str | None = Field(default=None, description="Why the run ended.")
    metadata: dict[str, str] = Field(default_factory=dict, description="The user's own pairs.")
    note: str = Field(
        default="", description="The user's note; empty also while the store cannot be read."
    )
    disk: int | None = Field(
        default=None,
        description="Bytes that it takes in the artifact store, as measured in the last few "
        "minutes; null until measured, which starts when the run is first shown or listed.",
    )
    archived: bool = Field(default=False, description="Whether the run list leaves it out.")
    progress: Progress | None = None
    silent: dict[str, float] = Field(
        default_factory=dict,
        description="While the run is running: seconds since a role that hosts its servers was "
        "last heard from, for roles silent for long; their workers may all be gone.",
    )
    links: Links

    @computed_field(examples=["train"])  # type: ignore[prop-decorator]
    @property
    def kind(self) -> Literal["train", "eval"]:
        """What it does: 'train', or 'eval' where it evaluates its model and trains nothing."""
        return "eval" if self.max_steps == 0 else "train"

    @property
    def took_s(self) -> float | None:
        """Seconds from its start to its end, or to now; None before it has started."""
        if self.started_at is None:
            return None
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()


CONFIG_EXAMPLE: dict[str, Any] = {"name": "reverse", "max_steps": 40, "seed": 0}
PLAN_EXAMPLE: dict[str, Any] = {
    "steps": 40,
    "rollouts_per_step": 64,
    "groups_per_step": {"reverse-text": 8.0},
    "train_rollouts": 2560,
    "permits": 64,
    "algorithms": {"reverse-text": "grpo"},
    "evals": [{"env": "reverse-text", "interval": 10, "count": 5, "rollouts": 64}],
    "checkpoints": 4,
    "servers": {"engine": ["0"], "env": ["train/reverse-text"]},
    "transfer": "store",
    "unverified": "none of the weights: the engines' dtype differs from the trainer's",
}


class DeletedRun(BaseModel):
    """A run that was deleted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": "reverse-1a2b3c", "object": "run", "deleted": True, "freed": 31457280}
            ]
        }
    )

    id: str = Field(description="The run's id.")
    object: Literal["run"] = "run"
    deleted: Literal[True] = Field(default=True, description="Always true.")
    freed: int = Field(description="Bytes that it took in the artifact store.")


class PlannedEval(BaseModel):
    """The evals of one env."""

    env: str = Field(description="The env's name.")
    interval: int = Field(
        description="Steps between evals; with eval.at_end there is also one at the last step."
    )
    count: int | None = Field(
        description="Evals over the whole run; null: it runs until it is stopped."
    )
    rollouts: int | None = Field(
        description="Rollouts of each; null: all examples, which the workers count."
    )


class Plan(BaseModel):
    """What the run would start and do."""

    steps: int | None = Field(description="Null: it runs until it is stopped. 0: an evaluation.")
    rollouts_per_step: int | None = Field(
        description="Null: batches are counted in tokens. 0: an evaluation."
    )
    groups_per_step: dict[str, float] | None = Field(
        description="By train env, on average, from their ratios and group sizes."
    )
    train_rollouts: int | None = Field(
        description="Over the whole run, at least; null: batches are counted in tokens, or the "
        "run continues until it is stopped."
    )
    permits: int | None = Field(description="Rollouts at once; null: as many as engines sustain.")
    algorithms: dict[str, str] = Field(description="By train env.")
    evals: list[PlannedEval] = Field(description="By env.")
    checkpoints: int | None = Field(
        description="At the interval; null: the run continues until it is stopped."
    )
    servers: dict[str, list[str]] = Field(description="Servers that would be started, by role.")
    transfer: str = Field(
        description="How new weights get to engines: 'store', or 'adapter' alone, and, for 'auto', "
        "the reason."
    )
    unverified: str | None = Field(
        description="Weights that the gate could not compare bit by bit, judging by the config "
        "alone, and why; it verifies them by log-probabilities. Null: it compares all of them."
    )


class ResolvedConfig(BaseModel):
    """Reply to a dry run: the config with all defaults filled in, and the plan of the run."""

    model_config = examples({"object": "config", "config": CONFIG_EXAMPLE, "plan": PLAN_EXAMPLE})
    object: Literal["config"] = "config"
    config: dict[str, Any] = Field(description="The config, with all defaults filled in.")
    plan: Plan
    examples: dict[str, int] = Field(
        default_factory=dict, description="By '<kind>/<env>', as counted by workers."
    )
    estimates: dict[str, dict[str, int]] = Field(
        default_factory=dict,
        description="The run's estimated needs in bytes, by part: 'trainer memory', 'trainer "
        "memory beside the GPU' where moments are offloaded, 'engine memory' (one engine) and "
        "'disk'; empty for a kind of model that workers cannot estimate.",
        examples=[{"disk": {"versions": 8800000, "checkpoints": 11000000}}],
    )
    unchecked: str | None = Field(
        default=None,
        description="What was not checked, and why; null: workers have found the environments, "
        "the model and everything else that the config names.",
    )
