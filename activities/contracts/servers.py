"""The engines of a run, as those see them that sample from them or push to them: the seam.

An engine is ours to start, or is given by its address; whichever it is, it joins the pool by a
report that it is up, and leaves it by one that it is not, or once work finds it gone. Which ones a
run begins with, the plan of role 'engine' says (`contracts/roles.py`). `workflows/rules/fleet.py`
is the pool that is used. Pure: it acts on the state of the run.
"""

from typing import Protocol

from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.rollouts import EngineTarget


class EnginePool(Protocol):
    """Engines that come and go.

    Invariant: one is offered only while it is up and verified at some version of this epoch.
    """

    def on_report(self, report: HostReport) -> bool:
        """Takes in who joins or leaves; False if the report is about an epoch that is over."""
        ...

    def mark_down(self, role: ServerRole, index: int, epoch: int, detail: str) -> None:
        """Takes out one that work found gone."""
        ...

    def engines(self) -> list[EngineTarget]:
        """Engines that may get traffic."""
        ...

    def synced(self, version: int) -> bool:
        """Some engine is verified at `version`, and no engine that is up is behind it."""
        ...
