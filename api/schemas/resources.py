"""What the API answers with about things that belong to a run, and about what carries runs out."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ratchet.api.schemas.models import ListOf

ATTEMPT = "The attempt of a run that it belongs to: a run's id, with '+2' and so on for later ones."


def _examples(*items: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(items)})


class Event(BaseModel):
    """One thing that happened to a run. Types are only ever added."""

    model_config = _examples(
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
    id: str = Field(description="Its cursor, the same for ever.")
    object: Literal["event"] = "event"
    type: str = Field(examples=["run.step", "run.status", "server.down", "work.done"])
    created_at: datetime
    level: Literal["info", "warning", "error"]
    source: str = Field(description="The run, a server's role, or the name of the work.")
    message: str
    data: dict[str, Any]


class LogLine(BaseModel):
    """One line of a run's log."""

    id: str = Field(description="Its cursor, which is also that of the event it tells of.")
    created_at: datetime
    level: Literal["info", "warning", "error"]
    source: str
    message: str


class Checkpoint(BaseModel):
    """A committed checkpoint: weights, optimizer, and the run's durable state."""

    model_config = _examples(
        {
            "object": "checkpoint",
            "step": 10,
            "attempt": "reverse-1a2b3c",
            "created_at": "2026-01-01T12:01:00Z",
            "size": 5542243,
            "sha256": "74fd748bbc94d9638713a81678cde4cdfcbe8dfc4794f77c3d8fa2ea152e6c49",
            "sound": True,
            "problem": None,
        }
    )
    object: Literal["checkpoint"] = "checkpoint"
    step: int
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None
    size: int = Field(description="Bytes of all its files.")
    sha256: str = Field(description="Hash of its manifest, which has the hash of every file.")
    sound: bool = Field(
        description="Whether its manifest is the one committed and every file has its size; with "
        "`verify=true` also whether every file has its hash."
    )
    problem: str | None = Field(default=None, description="What is wrong with it.")


class ConfigRevision(BaseModel):
    """The config as it held from some moment on."""

    revision: int = Field(description="0: the one that the attempt began with.")
    created_at: datetime | None


class RunConfigView(BaseModel):
    """A run's resolved config, every default written out."""

    object: Literal["config"] = "config"
    run_id: str
    attempt: str = Field(description=ATTEMPT)
    revision: int
    revisions: list[ConfigRevision]
    changes: dict[str, Any] = Field(description="All changes that were made while the run ran.")
    config: dict[str, Any]


class Batch(BaseModel):
    """A batch as the trainer saw it; the file is Parquet, one row per training sample."""

    object: Literal["batch"] = "batch"
    step: int
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None
    size: int = Field(description="Bytes of the file.")
    sha256: str
    path: str = Field(description="Where the file lies, relative to the artifact store.")
    problem: str | None = Field(
        default=None, description="What is wrong with its marker; the file itself is not looked at."
    )


ROLLOUT_EXAMPLE: dict[str, Any] = {
    "id": "train:12:3",
    "object": "rollout",
    "group": "train/12",
    "index": 3,
    "kind": "train",
    "env": "reverse-text",
    "example": 1099,
    "step": 2,
    "attempt": "reverse-1a2b3c",
    "reward": 0.57,
    "advantage": 0.12,
    "error": None,
    "sampled_tokens": 8,
    "turns": 1,
    "truncated": False,
    "stop": "agent_completed",
    "filtered": False,
    "versions": [1, 1],
}


class RolloutItem(BaseModel):
    """A finished rollout, in short."""

    model_config = _examples(ROLLOUT_EXAMPLE)
    id: str
    object: Literal["rollout"] = "rollout"
    group: str
    index: int = Field(description="Its place in the group.")
    kind: Literal["train", "eval"]
    env: str
    example: int = Field(description="The example's index in the env's own task list.")
    step: int | None = Field(
        default=None, description="The step whose batch or eval it belongs to, where it was asked."
    )
    attempt: str = Field(description=ATTEMPT)
    reward: float | None = None
    advantage: float | None = Field(
        default=None, description="Mean over its sampled tokens; none in evals."
    )
    error: dict[str, Any] | None = None
    sampled_tokens: int = 0
    turns: int | None = None
    truncated: bool | None = None
    stop: str | None = None
    filtered: bool = Field(default=False, description="A filter kept it from training.")
    versions: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest policy version that sampled its tokens."
    )


class RolloutPage(ListOf[RolloutItem]):
    """A page of rollouts; ask again with `next_after` as `after` while `has_more` is true."""

    next_after: str | None = None
    damaged: list[str] = Field(
        default_factory=list,
        description="Groups of the page that are left out, since their files are damaged.",
    )


class TokenStrip(BaseModel):
    """One training sequence of T tokens, and what is known of each; every list has length T."""

    model_config = ConfigDict(extra="allow")
    token_ids: list[int]
    pieces: list[str] | None = Field(
        default=None, description="The tokens as text; none if the tokenizer cannot be read."
    )
    loss_mask: list[bool]
    logprobs: list[float] = Field(description="The engine's, in nats; 0.0 outside the loss mask.")
    versions: list[int]
    advantages: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    ref_logprobs: list[float] | None = None
    trainer_logprobs: list[float | None] | None = Field(
        default=None,
        description="The trainer's, in nats, under the weights that the step of its batch began "
        "with; null where nothing was scored: the first token, and what `trainer.seq_len` cut off. "
        "None if no step has trained it, and once `retention.batches` has let them go.",
    )


class RolloutFull(RolloutItem):
    """A rollout with all that was said and sampled."""

    model_config = _examples({**ROLLOUT_EXAMPLE, "messages": [], "samples": [], "members": []})
    rewards: dict[str, Any] = Field(default_factory=dict, description="By name.")
    metrics: dict[str, Any] = Field(default_factory=dict, description="The env's own.")
    timing: dict[str, Any] = Field(default_factory=dict, description="Seconds by phase.")
    labels: list[str] = Field(
        default_factory=list, description="Weights that sampled it: '<version>.<push><try>'."
    )
    temperature: float | None = None
    engine: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = Field(
        default_factory=list, description="What was said on the last branch, in order."
    )
    samples: list[TokenStrip] = Field(default_factory=list)
    members: list[RolloutItem] = Field(
        default_factory=list, description="All rollouts of its group, itself included."
    )


class Engine(BaseModel):
    """An inference engine that a run keeps."""

    object: Literal["engine"] = "engine"
    id: str = Field(examples=["reverse-1a2b3c/host/engine/0"])
    run_id: str
    index: int
    state: Literal["starting", "up", "restarting"]
    attempt: int = Field(description="Starts of the server under this host; 1: never restarted.")
    since: datetime | None = Field(description="When this start began.")
    worker: str = Field(description="The worker process that keeps it.")
    policy_version: int | None = Field(description="Version that the run's engines serve.")
    last_failure: str | None = None


class WorkerItem(BaseModel):
    """A worker process, as it polls Temporal."""

    object: Literal["worker"] = "worker"
    id: str = Field(description="How it names itself to Temporal.")
    role: str
    queue: str
    last_seen: datetime | None
    gauges: list[dict[str, Any]] = Field(
        default_factory=list, description="What it last told of each run, where it tells."
    )


class ForkBody(BaseModel):
    """Body of a fork."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"step": 10, "config": {"trainer": {"optim": {"lr": 3e-5}}}}]
        },
    )
    step: int | None = Field(
        default=None, ge=1, description="The checkpoint's step; none: the newest sound one."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Sections like a config's own, with what is to differ."
    )
    name: str | None = Field(default=None, description="Name of the new run; none: the same.")
    metadata: dict[str, str] | None = Field(
        default=None, description="Of the new run; none: the same."
    )


class MetricsRow(BaseModel):
    """Metrics of one trainer step."""

    model_config = _examples(
        {"step": 3, "time": 1767268800.0, "metrics": {"reward/all/mean": 0.41, "loss": -0.02}}
    )
    step: int
    time: float | None = Field(description="When it was recorded (Unix time).")
    metrics: dict[str, float | None]
