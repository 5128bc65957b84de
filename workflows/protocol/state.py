"""All that crosses continue-as-new: the durable state of a run.

Plain data without behaviour. `RunState` has a part for each class that keeps state, named in the
part's docstring: only that class writes it, and everyone may read it. `rules/restore.py` creates
all parts of a run that begins with a checkpoint. The size is bounded: references, counters and what
is in flight, never data. A change of a field here needs a new schema number and an upgrader:
`upgrades.py` says what to do.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult
from ratchet.activities.contracts.training import CheckpointResult
from ratchet.activities.contracts.versioned import versioned
from ratchet.workflows.protocol.upgrades import RUN_STATE


@dataclass(frozen=True)
class EvalEpoch:
    """One eval: `num_examples` groups of one env, requested at `step`.

    `epoch` is its id, '<step>-<k>/<env>'; group ids are 'eval/<epoch>/<example>'.
    """

    epoch: str
    env: str
    step: int
    num_examples: int
    group_size: int


@dataclass(frozen=True)
class Lease:
    """What a generation may admit: the train counter from `next_train`, and the cursors of evals.

    `put_backs` counts the requeued groups admitted since the run began, and `ahead` are the places
    of those admitted before others that still wait; `evals` maps an epoch to its next example;
    `tokens` is what the rate limiter's bucket held at `tokens_at`, and `burst_base` the rollouts
    that executed at `burst_at`, when the burst cap's window began (seconds).
    """

    next_train: int = 0
    put_backs: int = 0
    ahead: list[int] = field(default_factory=list)
    tokens: float = 0.0
    tokens_at: float = 0.0
    burst_base: int = 0
    burst_at: float = 0.0
    evals: dict[str, int] = field(default_factory=dict)


@dataclass
class HostState:
    """One server of the run. An engine gets traffic only while `verified` is the run's version.

    Requests to an engine name `model`, which may be an adapter in it.

    `downs` counts losses since it was last up, `gate_failures` refusals since it last passed.
    `pushes` numbers weight pushes, so that every version label is unique. `opened` counts Host
    workflows before the present one: a pause closes it. `waits` says which store or disk keeps it
    from starting its server.
    """

    role: ServerRole
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
    opened: int = 0
    detail: str = ""
    managed: bool = True
    waits: str = ""


@dataclass
class GenerationState:
    """One dispatch generation as its run knows it. The run recorded `lease` before opening it.

    `reserved` permits are its own: executing rollouts, and those of begun groups still to start.

    `oldest` is the version at which its oldest train group in flight began, `outstanding` are the
    groups that it admitted and has not delivered. `heard_at` is its last sign of life.
    """

    number: int
    lease: Lease
    started: bool = False
    seq: int = -1
    state: Literal["open", "tail", "closed"] = "open"
    inflight_train: int = 0
    inflight_eval: int = 0
    reserved: int = 0
    oldest: int | None = None
    outstanding: list[str] = field(default_factory=list)
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
    """Finalized groups that wait for a batch, and counters. Written by `TrainSink`.

    `cut` are those of the batch that is being written: they are neither ready nor shipped.
    `lost` rollouts were dispatched but cannot train. `counted_rollouts` and `counted_tokens` are of
    all groups so far that can, for the mean length of a rollout. `empty_groups` in a row had
    nothing to train on; `empty_filters` is what filters removed with such groups since the last
    batch.
    """

    ready: list[GroupResult] = field(default_factory=list)
    cut: list[GroupResult] = field(default_factory=list)
    shipped_rollouts: int = 0
    shipped_batches: int = 0
    counted_rollouts: int = 0
    counted_tokens: int = 0
    lost: int = 0
    delivered: int = 0
    empty_groups: int = 0
    empty_batches: int = 0
    empty_filters: FilterTally = field(default_factory=FilterTally)
    last_error: str = ""


@dataclass(frozen=True)
class ShippedBatch:
    """A batch that waits for the trainer, a few of its numbers, and where all of them are."""

    step: int
    ref: ArtifactRef
    metrics: dict[str, float]
    metrics_ref: ArtifactRef | None
    seconds: float


@dataclass
class Limits:
    """How much may be in flight: executing rollouts, and rollouts started a minute (None: any).

    With `auto`, `permits` follow the load of the engines; `trim` makes dispatch cancel train
    groups, the youngest first, until no more than `permits` execute.
    """

    permits: int = 1
    auto: bool = False
    tasks_per_minute: int | None = None
    trim: bool = False


@dataclass(frozen=True)
class Shares:
    """The ratios by which train envs take turns, from train counter `start` on."""

    start: int
    ratios: dict[str, float]


@dataclass(frozen=True)
class TrainedBatch:
    """A batch that was trained, with the config revision used for it."""

    step: int
    ref: ArtifactRef
    revision: int = 0


@dataclass
class Recording:
    """What a trainer is rebuilt from: a checkpoint, and the batches trained since."""

    checkpoint: CheckpointResult
    batches: list[TrainedBatch] = field(default_factory=list)


@dataclass(frozen=True)
class Origin:
    """The source of a run that did not begin at step 0: attempt `source`, at `step`."""

    source: str
    step: int
    kind: Literal["resume", "fork"]


@dataclass
class Waiting:
    """What the run waits for, since when, and until when (ISO 8601 times)."""

    name: str
    since: str
    until: str


Signal = Literal["clear", "full", "overload"]


@dataclass
class ConcurrencyState:
    """The state of the controller of 'auto' permits. Written by `Concurrency`.

    `cap` is the permits with their fraction, 0 before the start; `settled` says that it no longer
    follows the KV cache's size. `open_until` (seconds) ends the time in which the last poll lets
    permits grow. `queue_polls` counts polls with a queue in a row; `cooldown`, `drain` and `grace`
    are polls left: until a trim may follow, of a cut, and in which a cut is escalated.
    `preemptions` maps '<engine>.<epoch>' to the total last seen.
    """

    cap: float = 0.0
    settled: bool = False
    polled_at: float | None = None
    open_until: float = 0.0
    inflight: int = 0
    completed: int = 0
    turnover: float = 0.0
    capacity: int = 0
    signal: Signal = "clear"
    queue_polls: int = 0
    cooldown: int = 0
    drain: int = 0
    grace: int = 0
    trim: bool = False
    preemptions: dict[str, int] = field(default_factory=dict)


@dataclass
class CurriculumState:
    """The state of a run's curricula, by env except for `draws`. Written by `Curriculum`.

    `pools` holds two bits per example (an index of POOLS), three examples to a base64 digit.
    `drawn` counts draws. `draws` maps a train counter to the example drawn for it. `admitted` and
    `rejected` count groups judged by gates since metrics were last taken.
    """

    pools: dict[str, str] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


@dataclass
class Lifecycle:
    """Where the run is between its start and its end. Written by `RunLog`.

    `examples` is the preflight's count per '<kind>/<env>', `warnings` the newest ten.
    """

    status: str = "queued"
    attempt: int = 1
    created_at: str = ""
    started_at: str = ""
    finished_at: str = ""
    end_reason: str = ""
    examples: dict[str, int] = field(default_factory=dict)
    origin: Origin | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class Requests:
    """What people requested, and `trouble`: why the run paused itself. Written by `Pausing`."""

    stop: str = ""
    pause: Literal["", "drain", "cancel"] = ""
    pause_reason: str = ""
    checkpoint: bool = False
    trouble: str = ""


@dataclass
class LiveConfig:
    """Changes made to the config while the run was running. Written by `ConfigChanges`.

    `overrides` are nested sections. `revision` numbers the configs that came of them; while
    `pending` the next one is due.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    revision: int = 0
    pending: bool = False
    shares: list[Shares] = field(default_factory=list)


@dataclass
class PermitsState:
    """How much may be in flight, and the state of the controller of 'auto' permits. Written by
    `Permits`.
    """

    limits: Limits = field(default_factory=Limits)
    controller: ConcurrencyState = field(default_factory=ConcurrencyState)


@dataclass
class ServersState:
    """The servers, and what engines should hold. Written by `Pushes`; hosts by their `Fleet`, by
    `Pushes` for what engines hold, and by `Servers` and `Outages` for what they see of them.

    `weights` are those of `target_version`, `policy_origin` says what version 0 was made from.
    `rejected_labels` are of pushes that were not verified.
    """

    hosts: list[HostState] = field(default_factory=list)
    policy_origin: str = ""
    weights: ArtifactRef | None = None
    target_version: int = -1
    rejected_labels: list[str] = field(default_factory=list)


@dataclass
class DispatchState:
    """The generations, and what they should roll out. Written by `Leases`.

    `requeued` are groups whose examples are rolled out again; `requeued_before` were dropped from
    its head, since a generation has admitted them. A curriculum has drawn for all train counters
    below `drawn_below`. `deaths` counts generations that ended in a row without handing over. The
    last four count groups that were cancelled since the last step, `cancelled` by '<env>/<kind>'.
    """

    control_seq: int = 0
    generations: list[GenerationState] = field(default_factory=list)
    next_generation: int = 0
    requeued: list[str] = field(default_factory=list)
    requeued_before: int = 0
    drawn_below: int = 0
    deaths: int = 0
    stale_in_flight: int = 0
    stale_in_queue: int = 0
    overload: int = 0
    cancelled: dict[str, int] = field(default_factory=dict)


@dataclass
class ArrivalsState:
    """Counters of delivered train groups. Written by `Arrivals`.

    `ok_rollouts` of all `rollouts` did not err. `baselines` are the states of algorithms, by env
    and agent. `counts` are of groups since the last step, by the name of their metric.
    """

    rollouts: int = 0
    ok_rollouts: int = 0
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BestEval:
    """The mean reward of an eval, and the step that it was opened at."""

    step: int
    reward: float


@dataclass
class EvalsState:
    """The evals that are open, and the results of others. Written by `Evals`.

    `count` numbers epochs; `fired` is the last step whose evals were opened; `requested` are envs
    to evaluate once there is a version. `last` is the newest result of each env: its step, version,
    lowest and highest of its versions, rollouts, epoch, reward (null if no rollout has one) and,
    where rollouts failed, how many of how many, and the error. `best` is, by env, the step of the
    highest reward, the later one in a tie. `finalizing` are the steps of evals that are neither
    open any more nor reported yet.
    """

    open: list[EvalProgress] = field(default_factory=list)
    count: int = 0
    requested: list[str] = field(default_factory=list)
    fired: int = -1
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, BestEval] = field(default_factory=dict)
    finalizing: list[int] = field(default_factory=list)
    rollouts: int = 0

    @property
    def needed(self) -> list[int]:
        """Versions that are still needed because of evals: those of evals without a result yet, and
        the best of each env.
        """
        steps = {progress.epoch.step for progress in self.open} | {*self.finalizing}
        return sorted(steps | {best.step for best in self.best.values()})

    def note(self, env: str, step: int, reward: float | None) -> None:
        """Updates the best result of an env."""
        best = self.best.get(env)
        if reward is not None and (best is None or (reward, step) >= (best.reward, best.step)):
            self.best[env] = BestEval(step, reward)


@dataclass
class StepsState:
    """The run's progress. Steps count from 1, policy versions from 0. Written by `Steps`.

    `next_version` is `version` or about to become it. `shipped` batches wait for the trainer.
    `totals` add up over all steps. `alarm` reports a last step whose mismatch KL was too high.
    """

    step: int = 0
    version: int = -1
    next_version: int = 0
    shipped: list[ShippedBatch] = field(default_factory=list)
    reward: float | None = None
    totals: dict[str, float] = field(default_factory=dict)
    alarm: str = ""


@dataclass
class TrainerState:
    """The trainer's step, and what a trainer is rebuilt from. Written by `Trainer`.

    `batches` are those trained since the last checkpoint, and `older` is the checkpoint before
    that, for when the last one is damaged.
    """

    epoch: int = -1
    step: int = -1
    losses: int = 0
    checkpoint: CheckpointResult | None = None
    batches: list[TrainedBatch] = field(default_factory=list)
    older: Recording | None = None


@dataclass
class OutagesState:
    """What the run waits for until it is fixed, by work. Written by `Outages`."""

    holds: dict[str, str] = field(default_factory=dict)


@versioned(RUN_STATE)
@dataclass
class RunState:
    """A run's durable state, with a part for each class that keeps state."""

    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    requests: Requests = field(default_factory=Requests)
    live: LiveConfig = field(default_factory=LiveConfig)
    permits: PermitsState = field(default_factory=PermitsState)
    servers: ServersState = field(default_factory=ServersState)
    dispatch: DispatchState = field(default_factory=DispatchState)
    train: TrainProgress = field(default_factory=TrainProgress)
    arrivals: ArrivalsState = field(default_factory=ArrivalsState)
    curriculum: CurriculumState = field(default_factory=CurriculumState)
    evals: EvalsState = field(default_factory=EvalsState)
    steps: StepsState = field(default_factory=StepsState)
    trainer: TrainerState = field(default_factory=TrainerState)
    outages: OutagesState = field(default_factory=OutagesState)
    schema: int = RUN_STATE.current
