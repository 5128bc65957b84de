"""What every activity needs from its process: the store, a scratch folder, cached run configs.

Activities are methods of small classes that hold one `WorkerContext`; nothing is global.
"""

import uuid
from pathlib import Path

from temporalio import activity

from ratchet.activities.storage import configs
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.home import STORES_FILE
from ratchet.configs.run import RunConfig


class WorkerContext:
    """One per worker process. `own_queue` is the task queue that only this process polls."""

    def __init__(self, *, home: Path, store_url: str, own_queue: str) -> None:
        self.home = home
        self.store = ArtifactStore(store_url, home / STORES_FILE)
        self.own_queue = own_queue
        self._configs: dict[tuple[str, int], RunConfig] = {}

    def config(self, run_id: str, revision: int = 0) -> RunConfig:
        """A revision of the run's resolved config, read once from the store."""
        if (run_id, revision) not in self._configs:
            self._configs[run_id, revision] = configs.load(self.store, run_id, revision)
        return self._configs[run_id, revision]

    def scratch(self, name: str) -> Path:
        """A local folder for working files; nothing in it is durable."""
        folder = self.home / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def attempt_token() -> str:
    """A token for this attempt of this activity, unique over all runs; artifacts carry it."""
    info = activity.info()
    return f"{info.activity_id}-{info.attempt}-{uuid.uuid4().hex[:12]}"
