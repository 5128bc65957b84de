"""Commits what a trainer process made, so that what it goes on with is what is referred to.

The first to commit a key wins, and mostly it does not matter who: the same batches on the same kind
of machine give the same bits. Invariant: the reference that comes back holds this process's own
bits. Where another trainer of the run, on unlike hardware, came first, ours go beside its own,
under '<key>.e<epoch>'; a process whose work was given away so decides nothing.
"""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage.store import MANIFEST, ArtifactStore, CorruptArtifact, digest

_EPOCH = re.compile(r"\.e(\d+)")


class Nondeterministic(Exception):
    """One epoch of a trainer gave different bits for the same key."""


def variant(key: str, epoch: int) -> str:
    """Where a trainer of `epoch` commits what differs from the artifact under `key`."""
    return f"{key}.e{epoch}"


def variants(key: str, committed: Collection[str]) -> list[str]:
    """Of the keys `committed`, `key` itself and its variants, by rising epoch."""
    result = {}
    for other in committed:
        if other == key:
            result[-1] = other
        elif other.startswith(key) and (match := _EPOCH.fullmatch(other, len(key))):
            result[int(match[1])] = other
    return [result[epoch] for epoch in sorted(result)]


def holds(
    store: ArtifactStore, ref: ArtifactRef, folder: Path, apart: Collection[str] = ()
) -> bool:
    """Whether an artifact was committed from files like those of `folder`, bit for bit; files named
    in `apart` may differ. One that is damaged holds nothing.
    """
    try:
        store.verify(ref)
        manifest = store.get(replace(ref, path=f"{ref.path}/{MANIFEST}"))
    except CorruptArtifact:
        return False
    theirs = {name: sha for name, (sha, _) in json.loads(manifest).items() if name not in apart}
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - set(apart)
    # Hashes cost more than names.
    return names == theirs.keys() and all(digest(folder / n) == theirs[n] for n in names)


def commit(
    store: ArtifactStore,
    key: str,
    folder: Path,
    *,
    epoch: int,
    attempt: str,
    apart: Collection[str] = (),
) -> ArtifactRef:
    """Commits a folder under `key`, or finds it committed there; under the variant of `epoch` if
    something else is. Files named in `apart` may differ in what is found.

    Raises Nondeterministic if the variant is something else, too.
    """
    for name in (key, variant(key, epoch)):
        ref = store.put_folder(name, folder, attempt=attempt)
        if ref.attempt == attempt or holds(store, ref, folder, apart):
            return ref
    raise Nondeterministic(
        f"the trainer of epoch {epoch} has already committed other bits under {name!r}"
    )
