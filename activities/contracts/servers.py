"""The seam for engines: a run's engines, for the code that samples from them or pushes to them.

A run starts its own engines, or gets them by address. Either way an engine joins the pool by a
report that it is up, and leaves it by a report that it is down, or when a request finds it gone.
The plan of role 'engine' (`contracts/roles.py`) says which engines a run begins with.
`workflows/rules/fleet.py` is the pool in use. Pure: it acts on the state of the run.
"""

from typing import Protocol

from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.rollouts import EngineTarget


class EnginePool(Protocol):
    """Engines that come and go.

    Invariant: an engine is offered only while it is up and verified at some version of this epoch.
    """

    def on_report(self, report: HostReport) -> bool:
        """Records who joins or leaves; False if the report is about an earlier epoch."""
        ...

    def mark_down(self, role: ServerRole, index: int, epoch: int, detail: str) -> None:
        """Removes an engine that a request found gone."""
        ...

    def engines(self) -> list[EngineTarget]:
        """Engines that may get traffic."""
        ...

    def synced(self, version: int) -> bool:
        """Some engine is verified at `version`, and no engine that is up is behind it."""
        ...
