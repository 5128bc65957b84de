"""Groups in flight, and counts over all of them. Pure.

Invariants:

- Every count is updated as flights change, so that reading it costs the same whatever is in flight:
  thousands of slow rollouts make no admission slower. Only `Flights` changes a `Flight`'s parts,
  engine and cancellation.
- Groups are in the order in which they began.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ratchet.activities.contracts.rollouts import EngineTarget, GroupWork

Cause = Literal["", "stale", "overload", "damaged", "pause", "stop"]
"""Why a group was cancelled; '' if it was not."""


@dataclass
class PartProgress:
    """One activity's share of a group: `size` rollouts, of which `ended` hold no permit, on the
    env server at `address`; '' while it has none.
    """

    size: int
    ended: int = 0
    done: bool = False
    address: str = ""


@dataclass
class Flight:
    """A group in flight. `begun` rollouts have been handed out, in `parts` by first rollout, and
    `ended` of them hold no permit any more.

    `version` is the policy version at which the group began. A `cancelled` group gets no more
    parts; `lost` says why its rollouts were cancelled, which with a `user_error` is the group's own
    mistake. It is `finalizing` once all of its rollouts have ended.
    """

    work: GroupWork
    engine: EngineTarget
    version: int
    begun: int = 0
    ended: int = 0
    parts: dict[int, PartProgress] = field(default_factory=dict)
    lost: str = ""
    user_error: bool = False
    cancelled: Cause = ""
    finalizing: bool = False

    @property
    def executing(self) -> int:
        """Rollouts that hold a permit."""
        return self.begun - self.ended

    @property
    def busy(self) -> bool:
        """Whether an activity works on the group."""
        return self.finalizing or not all(part.done for part in self.parts.values())

    @property
    def to_begin(self) -> int:
        """Rollouts that are still to be handed out."""
        return 0 if self.cancelled else self.work.size - self.begun

    @property
    def label(self) -> str:
        """Its kind and env, as gauges name them."""
        return f"{self.work.kind}/{self.work.env}"


class Flights(Mapping[str, Flight]):
    """Groups in flight by id."""

    def __init__(self, ageless: frozenset[str] = frozenset()) -> None:
        """Train groups of the envs in `ageless` never get too old."""
        self._ageless = ageless
        self._flights: dict[str, Flight] = {}
        self._half: dict[str, dict[str, Flight]] = {"train": {}, "eval": {}}
        self._groups: Counter[str] = Counter()
        self._executing: Counter[str] = Counter()
        self._to_begin: Counter[str] = Counter()
        self._versions: Counter[int] = Counter()
        self.load: Counter[int] = Counter()
        """Rollouts that an engine, by index, has or will have to serve."""
        self.served: Counter[str] = Counter()
        """Rollouts that an env server, by address, has to serve."""

    def __getitem__(self, group: str) -> Flight:
        return self._flights[group]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    # -- counts -----------------------------------------------------------------------------

    def executing(self, kind: str = "") -> int:
        """Rollouts that hold a permit, of one kind or of both."""
        labels = self._executing.items()
        return sum(count for label, count in labels if label.startswith(f"{kind}/" if kind else ""))

    def to_begin(self, kind: str = "") -> int:
        """Rollouts of begun groups that are still to be handed out, of one kind or of both."""
        return self._to_begin[kind] if kind else self._to_begin.total()

    def inflight(self) -> dict[str, int]:
        """Rollouts that hold a permit, by kind and env of groups in flight."""
        return {label: self._executing[label] for label, count in self._groups.items() if count}

    def half_dispatched(self, kind: str) -> Flight | None:
        """The group of `kind` that began first and has rollouts left to hand out."""
        return next(iter(self._half[kind].values()), None)

    def versions(self) -> Mapping[int, int]:
        """How many train groups that the policy samples began at each version."""
        return self._versions

    def ages(self, flight: Flight) -> bool:
        """Whether it can get too old, as train groups sampled by the policy do."""
        return flight.work.kind == "train" and flight.work.env not in self._ageless

    # -- changes ----------------------------------------------------------------------------

    def enter(self, flight: Flight) -> None:
        """A group begins; none of it was handed out yet."""
        assert not flight.parts and flight.work.group not in self._flights
        self._flights[flight.work.group] = flight
        self._half[flight.work.kind][flight.work.group] = flight
        self._count(flight, 1)

    def hand_out(self, flight: Flight, count: int) -> int:
        """The next `count` rollouts of a group begin; returns the first of them."""
        first = flight.begun
        self._count(flight, -1)
        flight.parts[first] = PartProgress(count)
        flight.begun += count
        self._count(flight, 1)
        return first

    def release(self, flight: Flight, first: int, ended: int) -> None:
        """`ended` rollouts of a part no longer hold a permit."""
        part = flight.parts[first]
        assert part.ended <= ended <= part.size
        self._count(flight, -1)
        flight.ended += ended - part.ended
        self._serve(part.address, part.ended - ended)
        part.ended = ended
        self._count(flight, 1)

    def end(self, flight: Flight, first: int) -> None:
        """A part has ended."""
        part = flight.parts[first]
        assert not part.done
        self.release(flight, first, part.size)
        part.done = True

    def cancel(self, flight: Flight, why: Cause) -> None:
        """Hands out no more of a group; the first reason stays."""
        self._count(flight, -1)
        flight.cancelled = flight.cancelled or why
        self._count(flight, 1)

    def move(self, flight: Flight, engine: EngineTarget) -> None:
        """The rest of a group goes to another engine."""
        self._count(flight, -1)
        flight.engine = engine
        self._count(flight, 1)

    def serve(self, flight: Flight, first: int, address: str) -> None:
        """What is left of a part goes to the env server at `address`."""
        part = flight.parts[first]
        self._serve(part.address, part.ended - part.size)
        self._serve(address, part.size - part.ended)
        part.address = address

    def _serve(self, address: str, rollouts: int) -> None:
        self.served[address] += rollouts
        if not (address and self.served[address]):
            del self.served[address]

    def remove(self, flight: Flight) -> None:
        """A group is delivered."""
        self._count(flight, -1)
        del self._flights[flight.work.group]
        self._half[flight.work.kind].pop(flight.work.group, None)

    def _count(self, flight: Flight, sign: int) -> None:
        """Adds a flight to all counts, or with sign -1 removes it."""
        label, kind = flight.label, flight.work.kind
        self._groups[label] += sign
        self._executing[label] += sign * flight.executing
        self._to_begin[kind] += sign * flight.to_begin
        self.load[flight.engine.index] += sign * (flight.work.size - flight.ended)
        if self.ages(flight):
            self._versions[flight.version] += sign
            if not self._versions[flight.version]:
                del self._versions[flight.version]
        if not flight.to_begin:
            self._half[kind].pop(flight.work.group, None)
