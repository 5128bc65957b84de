"""Weights through the artifact store: a folder is committed, fetched, and loaded from disk."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.weights import Engine, Tolerance, Verdict
from ratchet.activities.inference import gate
from ratchet.activities.storage import fencing
from ratchet.activities.storage.store import ArtifactStore


@dataclass(frozen=True)
class Fetched:
    """A local folder with weights, and the reference data of the gate."""

    folder: Path
    expected: gate.Expected


class StoreTransfer:
    """The transfer 'store'."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    def prepare(self, key: str, folder: Path, *, epoch: int, attempt: str) -> ArtifactRef:
        """Commits the folder."""
        return fencing.commit(self._store, key, folder, epoch=epoch, attempt=attempt)

    def receive(self, weights: ArtifactRef) -> Fetched:
        """Fetches the folder, verified by its hash."""
        folder = self._store.fetch_folder(weights)
        return Fetched(folder, gate.read_expected(folder))

    def name(self, model: str, weights: Fetched, label: str) -> str:
        """They replace what the engine serves."""
        return model

    async def push(self, engine: Engine, weights: Fetched) -> None:
        """Makes the engine load the folder."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        await engine.post("/collective_rpc", json=reload)

    async def verify(self, engine: Engine, weights: Fetched, tolerance: Tolerance) -> Verdict:
        """Runs the gate."""
        return await gate.verify(engine, weights.expected, tolerance)

    async def retire(self, engine: Engine, served: list[str], oldest: int) -> None:
        """Nothing: what was replaced is gone."""
