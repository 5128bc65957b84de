"""Trainer, weights and engines as the workflows see them."""

from dataclasses import dataclass, field
from typing import Any

from ratchet.activities.contracts.refs import ArtifactRef


@dataclass(frozen=True)
class PreparePolicyInput:
    """Create or find the policy that the run starts from, as weights of version 0."""

    run_id: str


@dataclass(frozen=True)
class PolicyResult:
    """Version 0. `origin` says in words where it comes from."""

    weights: ArtifactRef
    parameters: int
    origin: str


@dataclass(frozen=True)
class TrainerTarget:
    """The trainer process that a step is meant for."""

    epoch: int
    address: str


@dataclass(frozen=True)
class LoadTrainerInput:
    """Put a fresh trainer process into the state of `checkpoint`, or of version 0 without one."""

    run_id: str
    trainer: TrainerTarget
    checkpoint: ArtifactRef | None = None
    weights: ArtifactRef | None = None
    revision: int = 0


@dataclass(frozen=True)
class LoadTrainerResult:
    """The step of the trainer's state (0: nothing trained)."""

    step: int


@dataclass(frozen=True)
class TrainStepInput:
    """Train batch `step` on top of version `step - 1` and export the weights of version `step`,
    with the config of revision `revision`. Retention keeps the `needed` versions.
    """

    run_id: str
    step: int
    batch: ArtifactRef
    trainer: TrainerTarget
    revision: int = 0
    needed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TrainStepResult:
    """Version `step` of the policy.

    `metrics` are a few of the trainer's numbers; `metrics_ref` has all of them, as an object of
    numbers.
    """

    step: int
    weights: ArtifactRef
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_ref: ArtifactRef | None = None


@dataclass(frozen=True)
class SaveCheckpointInput:
    """Commit the trainer's state at `step` together with the run's durable state (JSON text).
    Retention keeps the `needed` versions.
    """

    run_id: str
    step: int
    trainer: TrainerTarget
    run_state: str
    revision: int = 0
    needed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CheckpointResult:
    """A committed checkpoint."""

    step: int
    ref: ArtifactRef


@dataclass(frozen=True)
class RestoreInput:
    """Make a checkpoint of run `source` the start of `run_id`.

    `step` None means the newest sound one. Both are ids of attempts (`names.attempt_id`).
    """

    run_id: str
    source: str
    step: int | None = None


@dataclass(frozen=True)
class RestoreResult:
    """The checkpoint as an artifact of the new run, and the durable state in it.

    Every artifact of an earlier attempt that `run_state` refers to was copied to the new run, and
    its references name the copies. `weights` are those of the checkpoint's step. `refused` says
    which newer checkpoints were damaged, and how. `source` is the attempt whose checkpoint it is:
    the requested one, or one before it.
    """

    checkpoint: CheckpointResult
    weights: ArtifactRef
    run_state: dict[str, Any]
    refused: list[str] = field(default_factory=list)
    source: str = ""


@dataclass(frozen=True)
class SaveConfigInput:
    """Keep revision `revision` (from 1; 0 is the config a run began with) of a run's config."""

    run_id: str
    revision: int
    config: dict[str, Any]


def push_label(version: int, push: int, number: int) -> str:
    """The version label of try `number` (from 0) of a push: '7.12a', '7.12b', …"""
    assert 0 <= number < 26
    return f"{version}.{push}{chr(ord('a') + number)}"


def adapter_name(model: str, label: str) -> str:
    """The name under which an engine of the served name `model` serves one push of an adapter."""
    return f"{model}@{label}"


def base_of(name: str) -> str:
    """The served name of the engine that serves an adapter `name`, or of that name itself."""
    return name.partition("@")[0]


def label_of(name: str) -> str:
    """The version label of what a request samples from that names an adapter; '' for any other
    name.
    """
    return name.partition("@")[2]


PUSH_TRIES = 2
"""Times one push is tried before the engine counts as unable to serve the version."""


@dataclass(frozen=True)
class SyncInput:
    """Push `weights` to one engine and pass its gate. `push` makes the version label unique.

    `model` is the engine's served name, or that of an adapter in it. Where each version is an
    adapter of its own, rollouts in flight began with version `oldest` or later ones.
    """

    run_id: str
    version: int
    weights: ArtifactRef
    engine_index: int
    engine_epoch: int
    url: str
    model: str
    push: int
    tolerance: float
    oldest: int | None = None


@dataclass(frozen=True)
class SyncResult:
    """The engine serves `version` under `label`; labels of refused pushes are in `rejected`.

    `max_diff` is the largest canary difference in nats. `unverified` says what was verified only by
    log-probabilities, because its bits could not be compared. `model` is the name that requests
    for this version use from now on; '': the engine's served name. `seconds` are what the parts of
    the push took over all tries: receive, load, verify, and pause, if the engine was paused.
    """

    version: int
    label: str
    max_diff: float
    rejected: list[str] = field(default_factory=list)
    unverified: str = ""
    model: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one step, to be stored as one artifact.

    `parts` are artifacts that each hold an object of numbers. If names collide, later parts
    override earlier ones, and `metrics` overrides all of them. Once it is stored, `heartbeat_url`,
    or the URL in the environment variable `heartbeat_var`, is pinged.
    """

    run_id: str
    step: int
    metrics: dict[str, float]
    parts: list[ArtifactRef] = field(default_factory=list)
    heartbeat_url: str = ""
    heartbeat_var: str = ""
