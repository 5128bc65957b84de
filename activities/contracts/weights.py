"""How the weights of a version get from the trainer to engines: the seam.

A run's config names the transfer (`inference.transfer`); `activities/inference/transfers.py` has
the table. Invariants, whatever the transfer:

- Version 0, and every trained version, lies in the store: restarts, forks and readers rely on it.
- The activity that pushes keeps an engine's traffic and labels in order; a transfer does no more
  than bring bits.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ratchet.activities.contracts.refs import ArtifactRef

Weights = TypeVar("Weights")
"""What a transfer holds of weights that it received."""


@dataclass(frozen=True)
class Verdict:
    """Where engine and trainer differ most: `position` counts tokens of the canary."""

    position: int
    engine: float
    trainer: float
    tolerance: float

    @property
    def diff(self) -> float:
        """The largest absolute difference, in nats; NaN if the engine answers NaN."""
        return abs(self.engine - self.trainer)

    @property
    def passed(self) -> bool:
        """Whether the engine may serve; NaN never passes."""
        return self.diff <= self.tolerance

    def __str__(self) -> str:
        return (
            f"canary token {self.position}: engine log-probability {self.engine:.6f}, trainer "
            f"{self.trainer:.6f}, difference {self.diff:.2e}, tolerance {self.tolerance:.0e}"
        )


class Engine(Protocol):
    """An engine under the served name `model`."""

    @property
    def model(self) -> str: ...

    async def post(self, path: str, **body: Any) -> Any:
        """The JSON that the engine answers; raises a retryable error with its own words."""
        ...


class WeightTransfer(Protocol[Weights]):
    """One way for weights. Every call may be repeated, in another process, too."""

    def prepare(self, key: str, folder: Path, *, epoch: int, attempt: str) -> ArtifactRef:
        """Commits under `key` what the trainer of `epoch` exported to `folder`, and makes it ready
        to be received; on a trainer worker. Blocks. Raises as `fencing.commit` does.
        """
        ...

    def receive(self, weights: ArtifactRef) -> Weights:
        """Fetches weights and checks that they are whole, while the engine still samples. Blocks.

        Raises CorruptArtifact if they are damaged, ValueError if they hold no canary.
        """
        ...

    async def push(self, engine: Engine, weights: Weights) -> None:
        """Puts weights on an engine that is paused and has their label."""
        ...

    async def verify(self, engine: Engine, weights: Weights, tolerance: float) -> Verdict:
        """How the log-probabilities of an engine that serves again compare with the trainer's."""
        ...
