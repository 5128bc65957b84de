"""What stands behind a trainer's socket, and holds the policy's state: the seam.

One process, or one that leads many ranks. A run's config names it (`trainer.backend`);
`activities/training/process.py` has the table, and serves it to the worker, whose client knows the
socket only. Files that it reads and writes have the formats that the rest of Ratchet reads
(`activities/storage`).
"""

from pathlib import Path
from typing import Any, Protocol


class TrainerBackend(Protocol):
    """Trains one policy. Calls come one at a time, from one thread; `step` is read meanwhile.

    Invariant: state is a function of what was loaded, and of the batches and configs since.
    """

    @property
    def step(self) -> int | None:
        """The step that the state stands at, which answers a ping; None: nothing is loaded."""
        ...

    def prepare(self, deterministic: bool) -> None:
        """Does once what takes long, so that who loads first need not wait for it."""
        ...

    def load(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        checkpoint: bool,
        base: Path | None = None,
    ) -> dict[str, Any]:
        """Takes the state of a checkpoint folder, or of weights that nothing has trained yet.
        `base` has version 0, if the config trains an adapter and `folder` is a checkpoint. Returns
        the fields of `client.Loaded`.
        """
        ...

    def train(
        self,
        step: int,
        batch: bytes,
        out: Path,
        *,
        config: dict[str, Any] | None = None,
        revision: int = 0,
        token_logprobs: Path | None = None,
    ) -> dict[str, float]:
        """Trains batch `step`, exports the weights with their canary to `out` and returns metrics.

        Repeated at `step`, it trains nothing and answers the same. Raises StateMismatch if the
        state is neither at `step` nor at the one before, NonFinite where a loss or gradient is not.
        """
        ...

    def save(self, step: int, out: Path) -> Any:
        """Writes the checkpoint of `step` to `out`; raises StateMismatch if it stands elsewhere."""
        ...
