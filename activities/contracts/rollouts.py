"""Rollouts, groups, evals and batches as the workflows see them: references and a few numbers."""

from dataclasses import dataclass, field, replace
from typing import Literal

from ratchet.activities.contracts.refs import ArtifactRef

Kind = Literal["train", "eval"]

LOST = "Lost"
"""Error type of a rollout that was cancelled before it ended."""
ABANDONED = "Abandoned"
"""Error type of a rollout that was given up, as after the loss of one server after another."""

POLICY_AGENT = "policy"
"""The agent of rollouts in which only the policy plays."""

LONGEST_WAIT_S = 6 * 3600.0
"""How long a rollout may wait besides its execution, which its time-out limits: in the queue of its
engine, for a slot at a frozen model, for new weights.
"""


@dataclass(frozen=True)
class EngineTarget:
    """The engine a group is pinned to, verified at `version` when the group was dispatched.

    Requests name `model`: the engine, or the adapter in it that is this version.
    """

    index: int
    epoch: int
    url: str
    model: str
    version: int


PERMIT = "a free permit"
"""What dispatch waits for if only permits keep it from starting more."""


@dataclass(frozen=True)
class Gauges:
    """Dispatch gauges; they travel in activity inputs and are stored by workers.

    `inflight` counts executing rollouts per '<kind>/<env>'; `queued_eval` rollouts of evals that
    wait for a permit; `off_policy_*` versions since the train groups in flight began. `waiting_for`
    says why nothing more was dispatched.
    """

    inflight_train: int = 0
    inflight_eval: int = 0
    permits: int = 0
    version: int = 0
    inflight: dict[str, int] = field(default_factory=dict)
    mode: Literal["train", "eval"] = "train"
    queued_eval: int = 0
    groups: int = 0
    off_policy_max: int = 0
    off_policy_mean: float = 0.0
    waiting_for: str = ""


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
class LoadTasksInput:
    """Load the tasks of a run's environments, before rollouts need them."""

    run_id: str


@dataclass(frozen=True)
class RunRolloutsInput:
    """Run rollouts `first` up to `last` (exclusive; None: all) of one group; those already
    committed are adopted.

    If they are all of the group, it may be finalized at their end: as one that began at version
    `finalize_from` (None: not here). Then `more` whole groups of the same env may be run beside it,
    and are finalized, too.
    """

    run_id: str
    work: GroupWork
    engine: EngineTarget
    env_address: str
    gauges: Gauges = field(default_factory=Gauges)
    first: int = 0
    last: int | None = None
    finalize_from: int | None = None
    more: list[GroupWork] = field(default_factory=list)

    def of_each(self) -> "list[RunRolloutsInput]":
        """An input for each group alone."""
        alone = replace(self, more=[])
        return [alone, *(replace(alone, work=work, last=None) for work in self.more)]

    @property
    def indexes(self) -> range:
        """The indexes of the rollouts to run."""
        return range(self.first, self.work.size if self.last is None else self.last)


@dataclass(frozen=True)
class Released:
    """Signal of a rollout worker to Dispatch: rollouts that ended inside activities still running.

    `ended` maps a part, '<group>/<first>', to how many of its rollouts have ended so far; the
    numbers only rise, so that a lost or repeated signal does no harm.
    """

    ended: dict[str, int]


@dataclass(frozen=True)
class FinalizeGroupInput:
    """Score a group whose rollouts have all ended. `lost` says why they were cancelled, if so.

    `engine` served the group; live policy references query it. `algo_state` is the algorithm's
    durable state (agent to baseline) when the group was finalized.
    """

    run_id: str
    work: GroupWork
    version: int
    lost: str = ""
    engine: EngineTarget | None = None
    algo_state: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FilterTally:
    """The effect of pre-batch filters on groups: `rollouts` did not err, `dropped` of them were
    removed, and `hits` counts those that each filter hit, enforced or not.
    """

    rollouts: int = 0
    dropped: int = 0
    hits: dict[str, int] = field(default_factory=dict)

    def plus(self, other: "FilterTally") -> "FilterTally":
        """The sum of both."""
        hits = {name: self.hits.get(name, 0) + n for name, n in other.hits.items()}
        return FilterTally(
            rollouts=self.rollouts + other.rollouts,
            dropped=self.dropped + other.dropped,
            hits={**self.hits, **hits},
        )


@dataclass(frozen=True)
class GroupResult:
    """A finalized group. `labels` are the weight-version labels its sampled tokens carry.

    `cancelled` says why the group was cancelled: it is then neither a success nor an error. Train
    groups that are left when the last batch ships are cancelled as in a `pause`.
    `user_error` says that `error` is a mistake in the config, which would fail every other group.
    `survivors` rollouts passed the pre-batch filters, `trainable` of them the post-batch filters
    too; `samples` and `tokens` count what the trainable ones would ship. `filters` says what
    pre-batch filters removed; `error` also names them if nothing survived them.
    `errors` counts them by type, as far as they are known.
    `advantage_range` holds the lowest and highest advantage of the survivors' sampled tokens; None
    if they have none. `observed` maps agents to rewards in order, for algorithms that keep state.
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
    cancelled: Literal["", "stale", "overload", "damaged", "pause", "stop"] = ""
    user_error: bool = False
    filters: FilterTally = field(default_factory=FilterTally)
    trainable: int = 0
    advantage_range: tuple[float, float] | None = None
    observed: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRolloutsResult:
    """Every rollout of the group ended: `size` committed artifacts exist. If it was `finalized`,
    too, this is its result; it is None if that was not asked for, or has failed. `more` are the
    results of more groups that were run, or None, in their order.
    """

    group: str
    ok: int
    errored: int
    sampled_tokens: int
    finalized: GroupResult | None = None
    more: list[GroupResult | None] = field(default_factory=list)


@dataclass(frozen=True)
class FinalizeEvalInput:
    """Turn the finalized groups of one eval epoch into its record.

    Its groups are 'eval/<epoch>/<example>' for every example below `num_examples`; those of
    `missing` have no artifact, and all their rollouts count as cancelled.
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
    """An eval epoch's headline numbers; `versions` really served, lowest and highest.

    `reward_mean` is None where no rollout has a reward. Of `rollouts`, `errored` ended badly and
    `cancelled` were given up before they ended; `error` is what most of them failed with, and
    `alike` says that all of the epoch did, with errors of one type.
    """

    epoch: str
    env: str
    step: int
    reward_mean: float | None
    rollouts: int
    errored: int
    versions: tuple[int, int]
    cancelled: int = 0
    error: str = ""
    alike: bool = False


@dataclass(frozen=True)
class ShipBatchInput:
    """Write the batch of `step` from finalized groups (ids within the run).

    `digest` is the sha256 over the groups' own sha256 hex digests, joined in order: the batch is
    refused if the store holds anything else. `barren` adds up the `filters` of groups delivered
    since the last batch that no rollout survived; they are in no batch, and metrics count them.
    """

    run_id: str
    step: int
    groups: list[str]
    digest: str
    barren: FilterTally = field(default_factory=FilterTally)


@dataclass(frozen=True)
class BatchResult:
    """A shipped batch and what it holds.

    `ref` is None, and no batch is stored, if the filters left no sample to train on. `metrics` are
    the few rollout-side numbers that a workflow needs; `metrics_ref` has all of them, as an object
    of numbers. `unusual_rewards` are the lowest and highest reward of each env that gave one
    outside [0, 1].
    """

    ref: ArtifactRef | None
    samples: int
    tokens: int
    rollouts: int
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_ref: ArtifactRef | None = None
    unusual_rewards: dict[str, tuple[float, float]] = field(default_factory=dict)
