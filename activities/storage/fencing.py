"""Commits the output of a trainer process, so that references name what its state continues from.

The first to commit a key wins, and usually it does not matter who: the same batches on the same
kind of machine give the same bits. Invariant: the returned reference holds this process's own bits.
If another trainer of the run, on different hardware, came first, ours go beside its own, under
'<key>.e<epoch>'; a process whose work was replaced in the meantime decides nothing.
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
    """One epoch of a trainer produced different bits for the same key."""


def variant(key: str, epoch: int) -> str:
    """The key for the output of a trainer of `epoch` that differs from the artifact under `key`."""
    return f"{key}.e{epoch}"


def variants(key: str, committed: Collection[str]) -> list[str]:
    """`key` itself and its variants among the keys `committed`, by rising epoch."""
    result = {}
    for other in committed:
        if other == key:
            result[-1] = other
        elif other.startswith(key) and (match := _EPOCH.fullmatch(other, len(key))):
            result[int(match[1])] = other
    return [result[epoch] for epoch in sorted(result)]


def holds(
    store: ArtifactStore, ref: ArtifactRef, folder: Path, ignored: Collection[str] = ()
) -> bool:
    """Whether an artifact was committed from the same files as those of `folder`, bit for bit;
    files named in `ignored` may differ. False for a damaged one.
    """
    try:
        store.verify(ref)
        manifest = store.get(replace(ref, path=f"{ref.path}/{MANIFEST}"))
    except CorruptArtifact:
        return False
    theirs = {name: sha for name, (sha, _) in json.loads(manifest).items() if name not in ignored}
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - set(ignored)
    # Hashes cost more than names.
    return names == theirs.keys() and all(digest(folder / n) == theirs[n] for n in names)


def commit(
    store: ArtifactStore,
    key: str,
    folder: Path,
    *,
    epoch: int,
    attempt: str,
    ignored: Collection[str] = (),
) -> ArtifactRef:
    """Commits a folder under `key`, or adopts an equal artifact there; under the variant of `epoch`
    if a different one exists. Files named in `ignored` may differ in an adopted one.

    Raises Nondeterministic if the variant is different, too.
    """
    for name in (key, variant(key, epoch)):
        ref = store.put_folder(name, folder, attempt=attempt)
        if ref.attempt == attempt or holds(store, ref, folder, ignored):
            return ref
    raise Nondeterministic(
        f"the trainer of epoch {epoch} has already committed other bits under {name!r}"
    )
