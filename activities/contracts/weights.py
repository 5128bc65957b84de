"""The seam for weight transfers: how the weights of a version get from the trainer to engines.

A run's config names the transfer (`inference.transfer`); `activities/inference/transfers.py` has
the table. Invariants of every transfer:

- Version 0, and every trained version, is in the store: restarts, forks and readers rely on it.
- The activity that pushes keeps an engine's traffic and labels in order; a transfer only moves
  bits.
- Weights under a name of their own replace nothing: the engine samples on meanwhile, and rollouts
  in flight go on under the name that they began with.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ratchet.activities.contracts.refs import ArtifactRef

NAMED = 3
"""How many tensors a message names."""

Weights = TypeVar("Weights")
"""What a transfer keeps of the weights that it received."""


@dataclass(frozen=True)
class Bits:
    """How the bits that an engine holds compare with the exported ones: the number of tensors
    compared, the mismatches, and by tensor ('': all) why it was not compared.
    """

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def unverified(self) -> str:
        """What was verified by log-probabilities alone, in words; '' if nothing was."""
        if not self.unread:
            return ""
        if "" in self.unread:
            return f"verified by log-probabilities alone: {self.unread['']}"
        several = f"{len(self.unread)} of {len(self.unread) + self.compared} tensors"
        named = "; ".join(f"{name} ({why})" for name, why in list(self.unread.items())[:NAMED])
        return f"{several} verified by log-probabilities alone: {named}"

    def __str__(self) -> str:
        if not self.wrong:
            return ""
        return f"{len(self.wrong)} wrong tensors: {'; '.join(self.wrong[:NAMED])}"


@dataclass(frozen=True)
class Tolerance:
    """How far log-probabilities of engine and trainer may differ, in nats: for any one token, and
    for all tokens on average.
    """

    largest: float = math.inf
    mean: float = math.inf


@dataclass(frozen=True)
class Verdict:
    """Where engine and trainer differ most: `position` counts tokens of the canary; the mean
    difference, in nats; and how their bits compare.
    """

    position: int
    engine: float
    trainer: float
    mean: float
    tolerance: Tolerance
    bits: Bits = field(default_factory=Bits)

    @property
    def diff(self) -> float:
        """The largest absolute difference, in nats; NaN if the engine answers NaN."""
        return abs(self.engine - self.trainer)

    @property
    def passed(self) -> bool:
        """Whether the engine may serve; NaN never passes."""
        close = self.diff <= self.tolerance.largest and self.mean <= self.tolerance.mean
        return not self.bits.wrong and close

    def __str__(self) -> str:
        wrong = f"{self.bits}; " if self.bits.wrong else ""
        largest, mean = (
            f", tolerance {limit:.0e}" if limit < math.inf else ""
            for limit in (self.tolerance.largest, self.tolerance.mean)
        )
        return (
            f"{wrong}canary token {self.position}: engine log-probability {self.engine:.6f}, "
            f"trainer {self.trainer:.6f}, difference {self.diff:.2e}{largest}; "
            f"mean difference {self.mean:.2e}{mean}"
        )


class Engine(Protocol):
    """An engine, asked for what it serves as `model`."""

    @property
    def model(self) -> str: ...

    async def post(self, path: str, **body: Any) -> Any:
        """The engine's JSON reply, None if it is none; raises a retryable error with the engine's
        message.
        """
        ...


class WeightTransfer(Protocol[Weights]):
    """One way to transfer weights. Every call may be repeated, also in another process."""

    def prepare(self, key: str, folder: Path, *, epoch: int, attempt: str) -> ArtifactRef:
        """Commits under `key` what the trainer of `epoch` exported to `folder`, and makes it ready
        to be received; on a trainer worker. Blocks. Raises as `fencing.commit` does.
        """
        ...

    def receive(self, weights: ArtifactRef) -> Weights:
        """Fetches weights and checks that they are complete; the engine keeps sampling. Blocks.

        Raises CorruptArtifact if they are damaged, ValueError if they have no canary.
        """
        ...

    def name(self, model: str, weights: Weights, label: str) -> str:
        """The name under which an engine of the served name `model` will serve weights pushed as
        `label`: `model` itself if they replace what it serves.
        """
        ...

    async def push(self, engine: Engine, weights: Weights) -> None:
        """Loads weights into an engine, to be served as `engine.model`. If they replace what it
        serves, it is paused and has their label.
        """
        ...

    async def verify(self, engine: Engine, weights: Weights, tolerance: Tolerance) -> Verdict:
        """How an engine that serves again compares with what the trainer exported."""
        ...

    async def retire(self, engine: Engine, served: list[str], oldest: int) -> None:
        """Unloads those of the names `served` that are versions below `oldest`, which no rollout
        uses any more.
        """
        ...
