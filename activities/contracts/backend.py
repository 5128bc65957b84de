"""The seam for trainer backends: what runs behind a trainer's socket and holds the policy's state.

A backend is one process, or one that leads many ranks. A run's config names it (`trainer.backend`);
`activities/training/process.py` has the table and serves the backend to the worker, whose client
knows only the socket. The files that it reads and writes have the formats of the rest of Ratchet
(`activities/storage`).
"""

from pathlib import Path
from typing import Any, Protocol


class TrainerBackend(Protocol):
    """Trains one policy. Calls come one at a time, from one thread; `step` may be read meanwhile.

    Invariant: the state is a function of what was loaded, and of the batches and configs since.
    """

    @property
    def step(self) -> int | None:
        """The step of the state, for the reply to a ping; None: nothing is loaded."""
        ...

    def prepare(self, deterministic: bool) -> None:
        """Does slow work that is needed once, so that the first load need not wait for it."""
        ...

    def load(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        checkpoint: bool,
        base: Path | None = None,
    ) -> dict[str, Any]:
        """Loads the state of a checkpoint folder, or of untrained weights. `base` has version 0, if
        the config trains an adapter and `folder` is a checkpoint. Returns the fields of
        `client.Loaded`.
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

        A repeated call for `step` trains nothing and returns the same. Raises StateMismatch if the
        state is neither at `step` nor at the one before, NonFinite if a loss or gradient is not
        finite.
        """
        ...

    def save(self, step: int, out: Path) -> Any:
        """Writes the checkpoint of `step` to `out`; raises StateMismatch at any other step."""
        ...
