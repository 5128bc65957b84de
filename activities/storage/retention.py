"""What of a run may be deleted: weights, checkpoints, batches with the scores of their tokens.
Decides by number alone, and leaves alone what has an unreadable name or a damaged marker.

Invariant: everything that the run could still be resumed from stays. Deleting something twice, or
from two attempts at once, is not an error.
"""

import contextlib
import re
from collections.abc import Container, Iterable
from typing import Literal

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

LEAST_KEPT = 2
"""Versions always kept: the newest, and the one that engines serve until it is pushed."""

_NUMBERED = re.compile(r"(?:v|step-)(\d+)(?:\.parquet)?(?:\.e\d+)?")


def number_of(key: str) -> int | None:
    """The version or step of a key; None if its name has none.

    Weights of one version may have several keys: 'v00000012', and 'v00000012.e3' of a trainer's
    third epoch.
    """
    match = _NUMBERED.fullmatch(key.rpartition("/")[2])
    return int(match[1]) if match else None


def _numbered(store: ArtifactStore, folder: str) -> dict[int, list[str]]:
    """Keys committed in a folder, by number."""
    result: dict[int, list[str]] = {}
    for key in store.committed_keys(folder):
        if (number := number_of(key)) is not None:
            result.setdefault(number, []).append(key)
    return result


def expendable(numbers: Iterable[int], newest: int, keep: int) -> list[int]:
    """Those of `numbers` below the `keep` newest up to `newest`, sorted.

    Numbers above `newest` come from before a restart; they are neither counted nor touched.
    """
    old = sorted(n for n in numbers if n <= newest)
    return old[: max(len(old) - keep, 0)]


def _delete(store: ArtifactStore, result: Iterable[str]) -> None:
    for key in result:
        # An earlier attempt may be deleting the same artifact; a damaged marker names no content.
        with contextlib.suppress(FileNotFoundError, CorruptArtifact):
            if (ref := store.committed(key)) is not None:
                store.delete(ref)


def checkpointed(store: ArtifactStore, run: str) -> set[int]:
    """Steps that have a checkpoint."""
    return set(_numbered(store, keys.checkpoints(run)))


def prune_weights(
    store: ArtifactStore,
    run: str,
    newest: int,
    keep: int | Literal["all"],
    needed: Container[int] = (),
) -> None:
    """Deletes weights of old versions; version 0, the `LEAST_KEPT` newest and those `needed` always
    stay.
    """
    if keep == "all":
        return
    result = _numbered(store, keys.weights(run, 0).rsplit("/", 1)[0])
    trained = [version for version in result if version > 0]
    for version in expendable(trained, newest, max(keep, LEAST_KEPT)):
        if version not in needed:
            _delete(store, result[version])


def prune_checkpoints(
    store: ArtifactStore, run: str, newest: int, keep_last: int, keep_every: int | None = None
) -> list[int]:
    """Deletes all checkpoints except for the `keep_last` newest and those of steps that
    `keep_every` divides. Returns the remaining steps up to `newest`, ascending.
    """
    result = _numbered(store, keys.checkpoints(run))
    old = expendable(result, newest, keep_last)
    gone = [step for step in old if keep_every is None or step % keep_every]
    for step in gone:
        _delete(store, result[step])
    return sorted(step for step in result if step <= newest and step not in gone)


def prune_batches(store: ArtifactStore, run: str, before_step: int) -> None:
    """Deletes the batches of steps up to `before_step`, and the scores of their tokens: after
    loading a checkpoint of that step, or of a later one, none of them is trained on again.
    """
    for kind in (keys.batch, keys.token_logprobs):
        result = _numbered(store, kind(run, 0).rsplit("/", 1)[0])
        for step in sorted(result):
            if step <= before_step:
                _delete(store, result[step])
