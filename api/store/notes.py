"""Notes: text that users attach to a run, whatever its status. No workflow knows of them.

    notes/<run>.json       {text}, replaced as it changes; a run without a note has no file

They lie in a folder of their own, so that a page of the run list costs one listing, and a read for
each run on it that has a note. Every function blocks, and raises StoreUnavailable.
"""

from collections.abc import Iterable

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore


def note_of(store: ArtifactStore, run_id: str) -> str:
    """The run's note; '' if it has none."""
    record = store.read_live(keys.note(run_id))
    return str(record["text"]) if record else ""


def notes_of(store: ArtifactStore, run_ids: Iterable[str]) -> dict[str, str]:
    """The notes of those of the runs that have one."""
    there = set(store.live_keys(keys.NOTES))
    return {run: note_of(store, run) for run in run_ids if keys.note(run) in there}


def write_note(store: ArtifactStore, run_id: str, text: str) -> bool:
    """Replaces the run's note, on disk when this returns; '' removes it. False: the run was deleted
    in the meantime, and has none.
    """
    if text:
        store.write_live(keys.note(run_id), {"text": text}, sync=True)
    exists = store.committed(keys.config(run_id)) is not None
    if not text or not exists:
        store.delete_folder(keys.note(run_id))
    return exists
