"""A run's disk usage, the runs that need it, and its deletion. Every function blocks.

A run is needed by its forks, whose records begin with its own, and by runs whose model is one of
its versions. Markers of its config and lineage are deleted first: a run without a config can
neither be forked nor named as a model, and an interrupted deletion can be repeated.
"""

import contextlib
import shutil
from pathlib import Path

from ratchet.activities.contracts.logs import logs_folder
from ratchet.activities.contracts.names import attempt_id, workflow_of
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.store import MARKER, ArtifactStore, CorruptArtifact
from ratchet.configs.model import version_named


def size_of(store: ArtifactStore, run_id: str) -> int:
    """Bytes that all attempts of a run take; 0 for a run without data."""
    total, number = 0, 1
    while size := store.size_of(keys.run_folder(attempt_id(run_id, number))):
        total, number = total + size, number + 1
    return total


def attempts_in(store: ArtifactStore, run_id: str) -> list[str]:
    """Ids of a run's attempts that have anything in the store."""
    return [name for name in store.folders(keys.RUNS) if workflow_of(name) == run_id]


def needed_by(store: ArtifactStore, run_id: str) -> list[str]:
    """Ids of the runs that need this one, sorted. Reads two small files of every run; a run whose
    files are damaged can neither continue nor show its history, and needs nothing.
    """
    found: set[str] = set()
    for attempt in store.folders(keys.RUNS):
        other = workflow_of(attempt)
        if other in {run_id, *found}:
            continue
        with contextlib.suppress(CorruptArtifact):
            if run_id in _sources(store, attempt):
                found.add(other)
    return sorted(found)


def _sources(store: ArtifactStore, attempt: str) -> set[str]:
    """The runs whose checkpoint or version an attempt started from."""
    sources = set()
    if (ref := store.committed(keys.lineage(attempt))) is not None:
        sources.add(workflow_of(str(store.get_json(ref)["source"])))
    if store.committed(keys.config(attempt)) is not None:
        model = configs.document(store, attempt).get("model") or {}
        if version := version_named(str(model.get("name", ""))):
            sources.add(version[0])
    return sources


def delete(store: ArtifactStore, run_id: str, home: Path) -> None:
    """Deletes all data of a run in the store, its note, and its logs below `home`."""
    attempts = attempts_in(store, run_id)
    for attempt in attempts:
        store.delete_folder(keys.config(attempt) + MARKER)
        store.delete_folder(keys.lineage(attempt) + MARKER)
    store.delete_folder(keys.note(run_id))
    for attempt in attempts:
        store.delete_folder(keys.run_folder(attempt))
    shutil.rmtree(home / logs_folder(run_id), ignore_errors=True)
