"""What a run measured, by step and by eval, and what its processes report over time."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ratchet.activities.contracts.roles import LagRole
from ratchet.api.schemas.common import examples


class MetricsRow(BaseModel):
    """Metrics of one trainer step."""

    model_config = examples(
        {"step": 3, "time": 1767268800.0, "metrics": {"reward/all/mean": 0.41, "loss": -0.02}}
    )
    step: int = Field(description="The step; the first is 1.")
    time: float | None = Field(description="When it was recorded (Unix time).")
    metrics: dict[str, float | None] = Field(
        description="By name; null where the value was not a number."
    )


class EvalRecord(BaseModel):
    """One eval of one env; additional fields are metrics of that eval.

    `reward_mean` is null where no rollout has a reward.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "epoch": "10-1/reverse-text",
                    "env": "reverse-text",
                    "step": 10,
                    "reward_mean": 0.41,
                    "rollouts": 32,
                    "errored": 2,
                    "cancelled": 0,
                    "valid_rate": 0.9375,
                    "errors": {"TaskError": 2},
                    "error": "TaskError: list index out of range (at env.py:12 in score)",
                }
            ]
        },
    )
    epoch: str = Field(description="Its id: '<step>-<number>/<env>'.")
    env: str | None = Field(default=None, description="The env that was evaluated.")
    step: int | None = Field(default=None, description="The policy's step.")
    problem: str | None = Field(
        default=None, description="Why its record is damaged; then only this and its id are known."
    )


class LoopLag(BaseModel):
    """How late a worker's event loop woke up since the previous sample, in seconds, over `n`
    wake-ups. Older builds recorded only mean, max and p99.
    """

    mean: float = Field(description="Mean.")
    max: float = Field(description="Maximum.")
    p99: float = Field(description="99th percentile.")
    min: float | None = Field(default=None, description="Minimum.")
    median: float | None = Field(default=None, description="Median.")
    p90: float | None = Field(default=None, description="90th percentile.")
    n: int | None = Field(default=None, description="How many wake-ups were measured.")


class GpuUsage(BaseModel):
    """A GPU of a worker's machine, used by any process."""

    index: int = Field(description="The driver's index of the device.")
    utilization: float | None = Field(
        description="Share of the time it was busy, 0 to 1; null where the driver has none (MIG)."
    )
    memory_bytes: int = Field(description="Memory in use.")


class Usage(BaseModel):
    """Resources used by a worker process and all its descendants, for all runs."""

    cpu_cores: float = Field(description="Cores in use, averaged since the previous sample.")
    memory_bytes: int = Field(description="Resident memory; shared pages count for each process.")
    gpus: list[GpuUsage] = Field(default_factory=list, description="The GPUs of the machine.")


class LagSample(BaseModel):
    """Event-loop lag and usage of a worker other than a rollout worker, or the lag of an env
    server, at one moment.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "time": 1767268800.25,
                    "source": "trainer-host-72-0c31aa",
                    "role": "trainer",
                    "event_loop_lag": {"mean": 0.0004, "max": 0.012, "p99": 0.006},
                    "usage": {"cpu_cores": 0.93, "memory_bytes": 1610612736},
                }
            ]
        },
    )
    time: float = Field(description="Unix time in seconds.")
    source: str = Field(
        description="The worker process that took the sample; 'env-server-<name>-…' for an env "
        "server."
    )
    role: LagRole = Field(description="The worker's role, or that of the server's worker.")
    event_loop_lag: LoopLag | None = None
    usage: Usage | None = Field(
        default=None, description="Null for env servers, and for samples of older builds."
    )


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
                    "usage": {"cpu_cores": 0.41, "memory_bytes": 524288000},
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
    worker_inflight: int = Field(default=0, description="Rollouts this worker is executing.")
    tokens_per_s: float = Field(default=0.0, description="Tokens sampled for this worker a second.")
    event_loop_lag: LoopLag | None = None
    usage: Usage | None = Field(default=None, description="Null for samples of older builds.")
    heard: float | None = Field(
        default=None,
        description="When the worker last received the run-wide values below (Unix time).",
    )
    inflight: dict[str, int] = Field(
        default_factory=dict, description="Rollouts executing, by '<kind>/<env>'."
    )
    inflight_train: int = Field(default=0, description="Train rollouts executing.")
    inflight_eval: int = Field(default=0, description="Eval rollouts executing.")
    permits: int = Field(default=0, description="Rollouts that may execute at once.")
    mode: str | None = Field(default=None, description="'eval' while an eval is dispatched.")
    queued_eval: int = Field(default=0, description="Eval rollouts waiting for a permit.")
    groups: int = Field(default=0, description="Groups in flight.")
    off_policy_max: float = Field(
        default=0, description="Most policy versions since a train group in flight began."
    )
    off_policy_mean: float = Field(
        default=0, description="Mean policy versions since the train groups in flight began."
    )
    waiting_for: str = Field(default="", description="Why no further rollout was dispatched.")
    version: int = Field(default=0, description="The policy version that the engines served.")
