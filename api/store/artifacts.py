"""A run's artifacts besides metrics: checkpoints, configs, batches. Only reads the store.

Checkpoints and batches follow the run's lineage. Every function blocks.
"""

import hashlib
import json
from datetime import UTC, datetime

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys, policies
from ratchet.activities.storage.policies import Held
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import MANIFEST, MARKER, ArtifactStore, CorruptArtifact
from ratchet.api.http.store_errors import damage_in
from ratchet.api.schemas.artifacts import Batch, Checkpoint, ConfigRevision
from ratchet.api.store.curves import Span
from ratchet.api.store.records import Records


def committed_at(store: ArtifactStore, key: str) -> datetime | None:
    """When an artifact was committed; None where the store keeps no times, or it was deleted."""
    try:
        info = store.info(key + MARKER)
    except FileNotFoundError:
        return None
    moment = info.get("mtime") or info.get("LastModified") or info.get("created")
    if isinstance(moment, int | float):
        return datetime.fromtimestamp(moment, UTC)
    return moment if isinstance(moment, datetime) else None


def checkpoints_of(records: Records, run_id: str) -> list[Held]:
    """Checkpoints that a run can be restored from, by step."""
    return [*policies.checkpoints_of(records.store, run_id).values()]


def problem_of(store: ArtifactStore, ref: ArtifactRef, *, verify: bool) -> str | None:
    """Why a folder artifact is not sound; None if it is."""
    try:
        manifest = store.read_file(ref, MANIFEST)
    except FileNotFoundError:
        return "its manifest is missing"
    if hashlib.sha256(manifest).hexdigest() != ref.sha256:
        return "its manifest is not the committed one"
    for name, (_, size) in json.loads(manifest).items():
        try:
            result = store.info(f"{ref.path}/{name}")["size"]
        except FileNotFoundError:
            return f"{name} is missing"
        if result != size:
            return f"{name} does not have its committed size"
    if verify:
        try:
            store.verify(ref, schema=1)
        except CorruptArtifact as error:
            return str(error)
    return None


def _marked(store: ArtifactStore, key: str) -> ArtifactRef | CorruptArtifact | None:
    """What a marker names, or why it is damaged; None if it has been deleted."""
    try:
        return store.committed(key)
    except CorruptArtifact as error:
        return error


def checkpoint(store: ArtifactStore, result: Held, *, verify: bool) -> Checkpoint | None:
    """A checkpoint as the API shows it: its first sound variant, or else the first; None if it has
    been deleted in the meantime.
    """
    shown: Checkpoint | None = None
    for key in result.keys:
        if (found := _marked(store, key)) is None:
            continue
        ref = found if isinstance(found, ArtifactRef) else None
        problem = problem_of(store, ref, verify=verify) if ref else str(found)
        one = Checkpoint(
            step=result.step,
            attempt=result.attempt,
            created_at=committed_at(store, key),
            size=ref.size if ref else 0,
            sha256=ref.sha256 if ref else "",
            path=ref.path if ref else "",
            sound=problem is None,
            problem=problem,
        )
        if one.sound:
            return one
        shown = shown or one
    return shown


def checkpoints(records: Records, run_id: str, *, verify: bool) -> list[Checkpoint]:
    """All checkpoints of a run, by step."""
    result = checkpoints_of(records, run_id)
    shown = (checkpoint(records.store, found, verify=verify) for found in result)
    return [item for item in shown if item is not None]


def revisions(store: ArtifactStore, attempt: str) -> list[ConfigRevision]:
    """Revisions of an attempt's config that are kept, ascending."""
    result: list[ConfigRevision] = []
    number = 0
    while store.committed(key := keys.config(attempt, number)) is not None:
        result.append(ConfigRevision(revision=number, created_at=committed_at(store, key)))
        number += 1
    return result


def batches(
    records: Records, run_id: str, after: int, limit: int
) -> tuple[list[Batch], int | None]:
    """Batches of steps above `after`, ascending, at most `limit`; and the last step looked at if
    more follow. Damaged markers are reported.
    """
    store = records.store
    result: list[tuple[int, Span, str]] = []
    for span in records.spans(run_id):
        folder = keys.batch(span.attempt, 0).rpartition("/")[0]
        for key in store.committed_keys(folder):
            step = number_of(key)
            if step is None or (span.last is not None and step > span.last):
                continue
            if step > max(after, span.first):
                result.append((step, span, key))
    result.sort(key=lambda item: item[0])
    shown = []
    for step, span, key in result[:limit]:
        if (found := _marked(store, key)) is None:
            continue
        ref = found if isinstance(found, ArtifactRef) else None
        shown.append(
            Batch(
                step=step,
                attempt=span.attempt,
                created_at=committed_at(store, key),
                size=ref.size if ref else 0,
                sha256=ref.sha256 if ref else "",
                path=ref.path if ref else "",
                problem=None if isinstance(found, ArtifactRef) else damage_in(found, store.root),
            )
        )
    return shown, result[limit - 1][0] if len(result) > limit else None
