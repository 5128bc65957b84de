"""The messages between workflows, and those from outside.

Messages between workflows are frozen dataclasses. Inputs of workflows outlive the build that wrote
them: a change to one needs a new schema number and an upgrader (`upgrades.py`). Signals are read
leniently, since one that cannot be decoded would be dropped; their fields keep their names, and a
new one has a default. Signals from people are in `activities/contracts/controls.py`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.names import MEMO_KEY as MEMO_KEY
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.rollouts import EngineTarget, GroupResult
from ratchet.activities.contracts.training import RestoreInput
from ratchet.activities.contracts.versioned import versioned
from ratchet.workflows.protocol.state import EvalEpoch, Lease, RunState, Shares
from ratchet.workflows.protocol.upgrades import DISPATCH_INPUT, HOST_WORKFLOW_INPUT, RUN_INPUT

TRAINING_RUN = "TrainingRun"
PREFLIGHT = "Preflight"
DISPATCH = "Dispatch"
HOST = "Host"

CHANGE_CONFIG = "change_config"
"""Update of a run: a nested section with changes to its config."""

SEARCH_ATTRIBUTES = {
    "RatchetStatus": "Keyword",
    "RatchetStep": "Int",
    "RatchetPolicyVersion": "Int",
    "RatchetReward": "Double",
    "RatchetEnv": "Keyword",
}


@dataclass(frozen=True)
class PreflightInput:
    """A config to check on the workers before anything starts, for a run that begins at step 0 or
    is `restored` from a checkpoint.
    """

    config: dict[str, Any]
    queues: Queues = field(default_factory=Queues)
    restored: bool = False


@versioned(RUN_INPUT)
@dataclass(frozen=True)
class RunInput:
    """Starts a run. `run_id` is the id of its attempt (`names.attempt_id`), whose config is in the
    store. `examples` is the preflight's count per '<kind>/<env>' and `cores` what it found for
    envs; without them the run performs the preflight itself. `restore` names the checkpoint that
    the run begins with; without it it begins at step 0. `state` is set only when the run continues
    as new.
    """

    run_id: str
    config: dict[str, Any]
    queues: Queues = field(default_factory=Queues)
    examples: dict[str, int] = field(default_factory=dict)
    cores: int = 0
    created_at: str = ""
    restore: RestoreInput | None = None
    state: RunState | None = None
    schema: int = RUN_INPUT.current


@dataclass(frozen=True)
class EnvTarget:
    """The server of an env; `epoch` is 0 for one that the run does not host."""

    index: int
    epoch: int
    address: str


@dataclass(frozen=True)
class Control:
    """Everything a dispatch generation must know, as one idempotent state.

    A control with a lower `seq` than one already seen is ignored. `train_limit` is the train
    group counter below which groups may be admitted. Train groups that are too old for
    `next_version`, which is `version` or about to become it, are cancelled. `envs` maps an env's
    name, or '<kind>/<name>' if train and eval have a server each, to its server; an engine or env
    missing here gets no new work. `put_backs` are groups to roll out again; the list only grows at
    its end, and `put_backs_before` groups have been dropped from its head. Earlier generations
    still need `older` permits, which `permits` excludes already. With `trim`, train groups are
    cancelled until no more than `permits` execute; with `auto`, permits follow the load of the
    engines. `draws` maps train counters to examples, where a curriculum chose them. `baselines` are
    the states of algorithms, by env and agent. With `pause` nothing more is admitted; what is in
    flight finishes ('drain') or is cancelled ('cancel'). Once `train_over`, no batch is left to
    fill: train groups in flight are cancelled. A generation that began with another `revision` of
    the config hands over. `missing` rollouts fill the run's next batch, beyond those in reports up
    to number `heard`; 0 if it needs each group at once.
    """

    seq: int
    version: int = 0
    next_version: int = 0
    train_limit: int = 0
    permits: int = 0
    stop: bool = False
    pause: Literal["", "drain", "cancel"] = ""
    engines: list[EngineTarget] = field(default_factory=list)
    envs: dict[str, EnvTarget] = field(default_factory=dict)
    evals: list[EvalEpoch] = field(default_factory=list)
    put_backs: list[str] = field(default_factory=list)
    put_backs_before: int = 0
    older: int = 0
    tasks_per_minute: int | None = None
    trim: bool = False
    auto: bool = False
    draws: dict[str, int] = field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    revision: int = 0
    train_over: bool = False
    missing: int = 0
    heard: int = -1


@versioned(DISPATCH_INPUT)
@dataclass(frozen=True)
class DispatchInput:
    """Opens dispatch generation `generation` of a run. `shares` are the changes of its ratios."""

    run_id: str
    generation: int
    config: dict[str, Any]
    examples: dict[str, int]
    queues: Queues
    lease: Lease
    control: Control
    shares: list[Shares] = field(default_factory=list)
    schema: int = DISPATCH_INPUT.current


@dataclass(frozen=True)
class LostServer:
    """A server that a generation's rollouts found gone, and keep finding gone."""

    role: ServerRole
    index: int
    epoch: int
    reason: str


@dataclass(frozen=True)
class DispatchReport:
    """A generation's coalesced signal to its run: finalized groups, permits out, hand-over.

    `seq` rises with every report. `state` 'tail' means that nothing more will be admitted, 'closed'
    that nothing is in flight either. `lease` is what has not been admitted; `inflight_*` count
    executing rollouts, `reserved` also those of begun groups still to start; `oldest` is the
    version at which the oldest train group began; `outstanding` are the groups admitted and not
    delivered with this report or before. `trouble` says why its work cannot be stored.
    """

    generation: int
    seq: int
    state: Literal["open", "tail", "closed"]
    groups: list[GroupResult] = field(default_factory=list)
    inflight_train: int = 0
    inflight_eval: int = 0
    reserved: int = 0
    oldest: int | None = None
    outstanding: list[str] = field(default_factory=list)
    lease: Lease = field(default_factory=Lease)
    waiting_for: str = ""
    lost: list[LostServer] = field(default_factory=list)
    run_id: str = ""
    trouble: str = ""


@versioned(HOST_WORKFLOW_INPUT)
@dataclass(frozen=True)
class HostWorkflowInput:
    """Opens the Host workflow of one server."""

    host: HostInput
    schema: int = HOST_WORKFLOW_INPUT.current
