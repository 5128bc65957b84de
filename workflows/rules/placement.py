"""Which engine and env server a group uses, and which it avoids because activities lost them.

Invariants:

- Of several servers that may take work, the least loaded one does.
- A server that an activity found gone is avoided by all while the activity waits, and then tried
  once more, since a dropped connection does not mean a dead server.
- Found gone again, it is reported to the run and avoided for good: the run lists a restarted server
  under another epoch or address. A server that the run does not host is only ever retried.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ratchet.activities.contracts import names
from ratchet.activities.contracts.roles import shared_name
from ratchet.activities.contracts.rollouts import EngineTarget, GroupWork
from ratchet.workflows.protocol.messages import Control, EnvTarget, LostServer

RELOCATION_PAUSE = timedelta(seconds=5)
"""Wait before a server that was lost is tried again."""
PLACED_WITHIN = timedelta(minutes=5)
"""How long a group in flight waits for an engine and an env server. Then it is requeued, with its
completed rollouts, and others may go first; the run itself waits for its servers by name.
"""
MAX_RELOCATIONS = 20
"""How often an activity is retried after its engine or env server was lost."""
NO_LOAD: Mapping[str, int] = {}


@dataclass
class Attempt:
    """Where one activity of a group is tried, and how it fares; it rolls out the part that begins
    with rollout `first`, or is `finalizing` the group.

    `losses` counts the servers that it found gone, `here` those since it was moved: rollouts move
    as often as they must, while a `finalizing` group tries only the first place twice. After the
    present wait `forgiven` may be used again. A `failure` is final.
    """

    work: GroupWork
    engine: EngineTarget
    address: str = ""
    finalizing: bool = False
    first: int = 0
    losses: int = 0
    here: int = 0
    forgiven: object = None
    failure: str = ""


class Places:
    """The servers that the run listed last, except those that are avoided: engines by index and
    epoch, env servers by address.
    """

    def __init__(self) -> None:
        self.engines: list[EngineTarget] = []
        self._envs: dict[str, list[EnvTarget]] = {}
        self._avoided: set[object] = set()

    def relist(self, control: Control) -> None:
        """Replaces what the run listed before; env servers that share work are kept together."""
        self.engines, self._envs = control.engines, {}
        for name, target in control.envs.items():
            self._envs.setdefault(shared_name(name), []).append(target)

    def engine(self, load: Mapping[int, int]) -> EngineTarget | None:
        """The engine with the least `load` (by index) that may take work."""
        usable = [e for e in self.engines if (e.index, e.epoch) not in self._avoided]
        return min(usable, key=lambda e: (load.get(e.index, 0), e.index), default=None)

    def _targets(self, work: GroupWork) -> list[EnvTarget]:
        """The servers for a group: those for its kind alone, else the env's."""
        return self._envs.get(f"{work.kind}/{work.env}") or self._envs.get(work.env) or []

    def address(self, work: GroupWork, load: Mapping[str, int] = NO_LOAD) -> str:
        """Address of the env server for a group that has the least `load` (by address); '' if none
        may take work.
        """
        addresses = [target.address for target in self._targets(work)]
        usable = [address for address in addresses if address not in self._avoided]
        return min(usable, key=lambda address: load.get(address, 0), default="")

    def leave(self, attempt: Attempt, kind: str, reason: str) -> LostServer | None:
        """Avoids the server that the attempt found gone; returns what to report to the run."""
        attempt.losses += 1
        attempt.here += 1
        again, engine = attempt.here == 1, attempt.engine
        targets = {target.address: target for target in self._targets(attempt.work)}
        target = targets.get(attempt.address)
        gone: object = attempt.address
        lost = None
        if kind == names.ENGINE_LOST:
            gone = engine.index, engine.epoch
            lost = LostServer("engine", engine.index, engine.epoch, reason)
        elif target is not None and target.epoch > 0:
            lost = LostServer("env", target.index, target.epoch, reason)
        self._avoided.add(gone)
        attempt.forgiven = gone if again or lost is None else None
        if again:
            return None
        if not attempt.finalizing:
            attempt.here = 0
        return lost

    def forgive(self, attempt: Attempt) -> None:
        """The attempt has waited: what it avoided for that long may be used, if still listed."""
        self._avoided.discard(attempt.forgiven)
