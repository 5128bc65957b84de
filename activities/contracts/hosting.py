"""The input of a Host workflow, which keeps a server alive, and its reports to the run."""

from dataclasses import dataclass
from typing import Literal

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.roles import SERVERS, ServerRole, WorkerRole
from ratchet.activities.contracts.upgrades import HOST_INPUT
from ratchet.activities.contracts.versioned import versioned
from ratchet.configs.run import RunConfig

ServerState = Literal["starting", "up", "down", "failed"]

ENGINE_LOAD = "engine_load"
"""Signal with an EngineLoad, to the run of an engine."""


@versioned(HOST_INPUT)
@dataclass(frozen=True)
class HostInput:
    """One server to keep alive for a run.

    It has a `name` where servers of its role are named (`contracts/roles.py`). `weights` is the
    folder an engine or trainer starts from. Epochs of this host are `epoch_base + attempt`, so they
    rise over restarts. With `report_load` the run also gets the load of an engine, as ENGINE_LOAD
    signals.
    """

    run_id: str
    role: ServerRole
    index: int
    queue: str
    name: str = ""
    weights: ArtifactRef | None = None
    epoch_base: int = 0
    ui_label: str = ""
    report_load: bool = False
    schema: int = HOST_INPUT.current

    @property
    def host_id(self) -> str:
        """Name of this host inside its run."""
        return f"{self.role}/{self.index}"


@dataclass(frozen=True)
class HostReport:
    """A host's signal to its run: the server of `epoch` is starting, is up at `address`, or is
    down; or its host gave up (failed).

    `queue` reaches the process that owns the server (trainer steps, weight pushes). `model` is the
    served model name, unique per epoch, so that a stale address cannot be mistaken for a fresh
    server. With 'starting', `seen_at` is when the worker of the previous epoch was last known to be
    alive (ISO 8601; '' if there was none).
    """

    role: ServerRole
    index: int
    epoch: int
    state: ServerState
    address: str = ""
    queue: str = ""
    model: str = ""
    name: str = ""
    detail: str = ""
    run_id: str = ""
    seen_at: str = ""


@dataclass(frozen=True)
class DescribeInput:
    """A workflow whose description is requested."""

    workflow_id: str


@dataclass(frozen=True)
class EngineLoad:
    """The load that an engine reports, and a signal to its run.

    `kv_usage` is the used share of its KV cache, 0 to 1, and `kv_tokens` the cache's size;
    `running` and `waiting` count requests, `preemptions` requests that were thrown out of the
    cache since the engine started. No request is longer than `max_model_len` tokens.
    """

    index: int
    epoch: int
    kv_usage: float
    running: int
    waiting: int
    preemptions: int
    kv_tokens: int
    max_model_len: int
    run_id: str = ""


@dataclass(frozen=True)
class PlannedHost:
    """A server that a run needs; one with an `address` is not `managed` by us."""

    role: ServerRole
    index: int
    name: str
    address: str = ""

    @property
    def managed(self) -> bool:
        """Whether the run starts it."""
        return not self.address


def planned_hosts(config: RunConfig, cores: int = 0) -> list[PlannedHost]:
    """Every server the run needs, by role; `cores` are those of a machine for envs, if known."""
    return [
        PlannedHost(name, index, server, address)
        for name, role in SERVERS.items()
        for index, (server, address) in enumerate(role.plan(config, cores).items())
    ]


def keepers(config: RunConfig) -> set[WorkerRole]:
    """The roles of workers that host some server of the run for as long as it runs."""
    return {SERVERS[host.role].kept_by for host in planned_hosts(config) if host.managed}
