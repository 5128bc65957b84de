"""Stored configs of runs: one per revision, which never changes."""

import json

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document, read_config
from ratchet.configs.versions import Document


def document(store: ArtifactStore, run_id: str, revision: int = 0) -> Document:
    """A revision of a run's config as it was stored; raises FileNotFoundError, CorruptArtifact."""
    stored: Document = json.loads(store.get(store.require(keys.config(run_id, revision))))
    return stored


def load(store: ArtifactStore, run_id: str, revision: int = 0) -> RunConfig:
    """A revision of a run's config; raises NewerSchema, and what `document` does."""
    return read_config(document(store, run_id, revision))


def latest(store: ArtifactStore, run_id: str) -> RunConfig:
    """The newest revision of a run's config; raises what `load` does."""
    revision = 0
    while store.committed(keys.config(run_id, revision + 1)) is not None:
        revision += 1
    return load(store, run_id, revision)


def save(
    store: ArtifactStore, run_id: str, config: RunConfig, *, revision: int = 0, attempt: str
) -> ArtifactRef:
    """Commits a revision of a run's config, unless there is one."""
    return store.put_json(keys.config(run_id, revision), config_document(config), attempt=attempt)
