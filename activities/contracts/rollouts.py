"""Rollouts, groups, evals and batches as the workflows see them: references and a few numbers."""

from dataclasses import dataclass, field
from typing import Literal

from activities.storage.refs import ArtifactRef

Kind = Literal["train", "eval"]


@dataclass(frozen=True)
class EngineTarget:
    """The engine a group is pinned to, verified at `version` when the group was dispatched."""

    index: int
    epoch: int
    url: str
    model: str
    version: int


@dataclass(frozen=True)
class Gauges:
    """Dispatch gauges; they ride in activity inputs and are stored by workers."""

    inflight_train: int = 0
    inflight_eval: int = 0
    permits: int = 0
    version: int = 0


@dataclass(frozen=True)
class GroupWork:
    """One group: `size` rollouts of one example.

    `group` is its deterministic id within the run: 'train/<n>' or
    'eval/<step>-<k>/<env>/<example>'. `example` is an index into the env's own task list.
    """

    group: str
    kind: Kind
    env: str
    example: int
    size: int


@dataclass(frozen=True)
class RunRolloutsInput:
    """Carry out the rollouts of one group; those already committed are adopted."""

    run_id: str
    work: GroupWork
    engine: EngineTarget
    env_address: str
    gauges: Gauges = field(default_factory=Gauges)


@dataclass(frozen=True)
class RunRolloutsResult:
    """Every rollout of the group ended: `size` committed artifacts exist."""

    group: str
    ok: int
    errored: int
    sampled_tokens: int


@dataclass(frozen=True)
class FinalizeGroupInput:
    """Score a group whose rollouts have all ended. `lost` says why they were given up, if so."""

    run_id: str
    work: GroupWork
    version: int
    lost: str = ""


@dataclass(frozen=True)
class GroupResult:
    """A finalized group. `labels` are the weight-version labels its sampled tokens carry.

    `survivors` rollouts can train; `samples` and `tokens` count what a batch would ship.
    """

    group: str
    kind: Kind
    env: str
    ref: ArtifactRef | None
    size: int
    survivors: int
    errored: int
    reward_mean: float
    samples: int
    tokens: int
    version_start: int
    labels: list[str] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class FinalizeEvalInput:
    """Turn the finalized groups of one eval epoch into its record.

    Its groups are 'eval/<epoch>/<example>' for every example below `num_examples`; those of
    `missing` have no artifact, and all their rollouts count as errored.
    """

    run_id: str
    epoch: str
    env: str
    step: int
    num_examples: int
    group_size: int
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EvalResult:
    """An eval epoch's headline numbers; `versions` really served, lowest and highest."""

    epoch: str
    env: str
    step: int
    reward_mean: float
    rollouts: int
    errored: int
    versions: tuple[int, int]


@dataclass(frozen=True)
class ShipBatchInput:
    """Write the batch of `step` from finalized groups (ids within the run).

    `digest` is the sha256 over the groups' own sha256 hex digests, joined in order: the batch is
    refused if the store holds anything else.
    """

    run_id: str
    step: int
    groups: list[str]
    digest: str


@dataclass(frozen=True)
class BatchResult:
    """A shipped batch and what it holds; `metrics` are the rollout-side numbers of the step."""

    ref: ArtifactRef
    samples: int
    tokens: int
    rollouts: int
    metrics: dict[str, float] = field(default_factory=dict)
