"""All that crosses continue-as-new: the durable state of a run.

Plain data without behaviour; the pure classes beside it (sources, sinks, scheduler) act on it.
Its size is bounded: references, counters and what is in flight, never data.
"""

from dataclasses import dataclass, field
from typing import Literal

from activities.contracts.hosting import HostRole
from activities.contracts.rollouts import FilterTally, GroupResult
from activities.contracts.training import CheckpointResult
from activities.storage.refs import ArtifactRef


@dataclass(frozen=True)
class EvalEpoch:
    """One eval: `num_examples` groups of one env, asked for at `step`.

    `epoch` is its id, '<step>-<k>/<env>'; group ids are 'eval/<epoch>/<example>'.
    """

    epoch: str
    env: str
    step: int
    num_examples: int
    group_size: int


@dataclass(frozen=True)
class Lease:
    """What a generation may admit: the train counter from `next_train`, and where evals stand.

    `put_backs` counts the put-back groups already admitted; `evals` maps an epoch to its next
    example; `tokens` is what the rate limiter's bucket held at `tokens_at` (seconds).
    """

    next_train: int = 0
    put_backs: int = 0
    tokens: float = 0.0
    tokens_at: float = 0.0
    evals: dict[str, int] = field(default_factory=dict)


@dataclass
class HostState:
    """One server of the run. An engine gets traffic only while `verified` is the run's version.

    `downs` counts losses since it was last up, `gate_failures` refusals since it last passed.
    `pushes` numbers weight pushes, so that every version label is unique.
    """

    role: HostRole
    index: int
    name: str = ""
    epoch: int = 0
    up: bool = False
    address: str = ""
    queue: str = ""
    model: str = ""
    verified: int = -1
    pushes: int = 0
    downs: int = 0
    gate_failures: int = 0
    restarts: int = 0
    detail: str = ""
    managed: bool = True


@dataclass
class GenerationState:
    """One dispatch generation as its run knows it. The run recorded `lease` before opening it.

    `oldest` is the version at which its oldest train group in flight began.
    """

    number: int
    lease: Lease
    started: bool = False
    seq: int = -1
    state: Literal["open", "tail", "closed"] = "open"
    inflight_train: int = 0
    inflight_eval: int = 0
    oldest: int | None = None
    waiting_for: str = ""
    heard_at: str = ""


@dataclass
class EvalProgress:
    """Examples of an eval epoch whose groups were delivered; `missing` ones have no artifact."""

    epoch: EvalEpoch
    arrived: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


@dataclass
class TrainProgress:
    """The train sink: finalized groups waiting for a batch, and what was counted.

    `lost` rollouts were dispatched but cannot train; `seen_below` and `seen_above` say which
    train groups were delivered.
    """

    ready: list[GroupResult] = field(default_factory=list)
    shipped_rollouts: int = 0
    shipped_batches: int = 0
    lost: int = 0
    barren: int = 0
    empty_batches: int = 0
    barren_filters: FilterTally = field(default_factory=FilterTally)
    stale_in_flight: int = 0
    stale_in_queue: int = 0
    last_error: str = ""
    delivered: int = 0


@dataclass
class Waiting:
    """What the run waits for, since when, and until when (ISO 8601 times)."""

    name: str
    since: str
    until: str


@dataclass
class RunState:
    """A run's durable state. Steps count from 1, policy versions from 0."""

    status: str = "queued"
    created_at: str = ""
    started_at: str = ""
    examples: dict[str, int] = field(default_factory=dict)
    step: int = 0
    version: int = -1
    target_version: int = -1
    next_version: int = 0
    weights: ArtifactRef | None = None
    policy_origin: str = ""
    control_seq: int = 0
    hosts: list[HostState] = field(default_factory=list)
    generations: list[GenerationState] = field(default_factory=list)
    next_generation: int = 0
    train: TrainProgress = field(default_factory=TrainProgress)
    evals: list[EvalProgress] = field(default_factory=list)
    eval_count: int = 0
    fired: int = -1
    last_eval: dict[str, dict[str, float]] = field(default_factory=dict)
    rejected_labels: list[str] = field(default_factory=list)
    put_backs: list[str] = field(default_factory=list)
    trainer_epoch: int = -1
    trainer_step: int = -1
    checkpoint: CheckpointResult | None = None
    batches: list[ArtifactRef] = field(default_factory=list)
    reward: float | None = None
    rollouts: int = 0
    eval_rollouts: int = 0
    stop: str = ""
    trainer_losses: int = 0
