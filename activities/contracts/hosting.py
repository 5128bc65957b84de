"""What a Host workflow is asked to keep alive, and what it reports to the run."""

from dataclasses import dataclass
from typing import Literal

from activities.storage.refs import ArtifactRef

HostRole = Literal["engine", "env", "trainer"]
ServerState = Literal["starting", "up", "down", "failed"]


@dataclass(frozen=True)
class HostInput:
    """One server to keep alive for a run.

    `name` is the env's name for role 'env'. `weights` is the folder an engine or trainer starts
    from. Epochs of this host are `epoch_base + attempt`, so they rise over restarts.
    """

    run_id: str
    role: HostRole
    index: int
    queue: str
    name: str = ""
    weights: ArtifactRef | None = None
    epoch_base: int = 0
    ui_label: str = ""

    @property
    def host_id(self) -> str:
        """Name of this host inside its run."""
        return f"{self.role}/{self.index}"


@dataclass(frozen=True)
class HostReport:
    """A host's signal to its run: the server of `epoch` is being started, is up at `address`, or
    is down; or its host gave up (failed).

    `queue` reaches the very process that owns the server (trainer steps, weight pushes).
    `model` is the served model name, unique per epoch, so that a stale address cannot be
    mistaken for a fresh server.
    """

    role: HostRole
    index: int
    epoch: int
    state: ServerState
    address: str = ""
    queue: str = ""
    model: str = ""
    name: str = ""
    detail: str = ""
