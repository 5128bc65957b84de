"""Which weights and checkpoints of a run may go. Decides by version alone; deletes nothing else."""

import contextlib
from collections.abc import Iterable
from typing import Literal

from activities.storage import keys
from activities.storage.store import ArtifactStore

LEAST_KEPT = 2
"""Versions always kept: the newest, and the one that engines serve until it is pushed."""


def _number(key: str) -> int:
    return int(key.rsplit("/", 1)[-1].lstrip("v").removeprefix("step-"))


def expendable(numbers: Iterable[int], newest: int, keep: int) -> list[int]:
    """Of `numbers`, those below the `keep` newest up to `newest`, sorted.

    Numbers above `newest` come from before a restart; they are neither counted nor touched.
    """
    old = sorted(n for n in numbers if n <= newest)
    return old[: max(len(old) - keep, 0)]


def _delete(store: ArtifactStore, key: str) -> None:
    ref = store.committed(key)
    if ref is not None:
        # An earlier attempt may be deleting the same artifact.
        with contextlib.suppress(FileNotFoundError):
            store.delete(ref)


def prune_weights(store: ArtifactStore, run: str, newest: int, keep: int | Literal["all"]) -> None:
    """Deletes weights of old versions; version 0 and the `LEAST_KEPT` newest always stay."""
    if keep == "all":
        return
    folder = keys.weights(run, 0).rsplit("/", 1)[0]
    numbers = [_number(key) for key in store.committed_keys(folder)]
    trained = [number for number in numbers if number > 0]
    for version in expendable(trained, newest, max(keep, LEAST_KEPT)):
        _delete(store, keys.weights(run, version))


def prune_checkpoints(store: ArtifactStore, run: str, newest: int, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints."""
    numbers = [_number(key) for key in store.committed_keys(keys.checkpoints(run))]
    for step in expendable(numbers, newest, keep):
        _delete(store, keys.checkpoint(run, step))
