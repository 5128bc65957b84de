"""What of a run may be deleted: weights, checkpoints, batches with the scores of their tokens,
rollouts with their groups. Decides by number alone, and leaves alone what has an unreadable name or
a damaged marker.

Invariant: everything that the run could still be resumed from stays, and so does every group that a
state of the run names, the present one or a checkpoint's. Deleting something twice, or from two
attempts at once, is not an error.
"""

import contextlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Literal

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

LEAST_KEPT = 2
"""Versions always kept: the newest, and the one that engines serve until it is pushed."""

_NUMBERED = re.compile(r"(?:v|step-)(\d+)(?:\.parquet)?(?:\.e\d+)?")
_CUT = re.compile(r"step-(\d+)-[0-9a-f]+\.json")
_GROUP = re.compile(r"(\d+)(?:\.\d+)?(?:\.json)?")
_EVAL = re.compile(r"(\d+)-\d+")
_NAMED_GROUP = re.compile(r"(?:^|/)train/(\d+)(?=[./@]|$)")
_NAMED_EVAL = re.compile(r"(?:^|/)(\d+-\d+)/")


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


def _texts(state: Any) -> Iterator[str]:
    """Every text in JSON data, keys among them."""
    if isinstance(state, str):
        yield state
    elif isinstance(state, dict):
        yield from state
        for value in state.values():
            yield from _texts(value)
    elif isinstance(state, list):
        for value in state:
            yield from _texts(value)


def settled_below(state: dict[str, Any]) -> int:
    """The train counter below which a run's state names no group, and every group was admitted:
    each was shipped or came to nothing, so that no later state names one either. 0 for a state in
    which that cannot be told.
    """
    generations = state.get("dispatch", {}).get("generations", [])
    admitted = max((one["lease"]["next_train"] for one in generations), default=0)
    named = (_NAMED_GROUP.search(text) for text in _texts(state))
    return min([admitted, *(int(match[1]) for match in named if match)])


def states_of(store: ArtifactStore, run: str, step: int) -> list[dict[str, Any]]:
    """The run's state in each checkpoint of a step: several where trainers came to other bits. One
    that cannot be read is empty.
    """
    result: list[dict[str, Any]] = []
    for key in _numbered(store, keys.checkpoints(run)).get(step, []):
        try:
            document = json.loads(store.read_file(store.require(key), keys.RUN_STATE_FILE))
            result.append(document.get("state", {}))
        except (FileNotFoundError, CorruptArtifact, ValueError):
            result.append({})
    return result


def _cut_for(store: ArtifactStore, run: str, after_step: int) -> Iterator[int]:
    """Train counters of the groups that were cut for steps after `after_step`."""
    for key in store.committed_keys(keys.step_groups(run, 0, "").rpartition("/")[0]):
        match = _CUT.fullmatch(key.rpartition("/")[2])
        if match and int(match[1]) > after_step:
            try:
                groups = store.get_json(store.require(key))["groups"]
            except (FileNotFoundError, CorruptArtifact):
                # Nobody knows which they were: all stay.
                groups = ["train/0"]
            for group in groups:
                yield int(group.removeprefix("train/").partition(".")[0])


def prune_rollouts(
    store: ArtifactStore,
    run: str,
    newest: int,
    keep: int | Literal["all"],
    states: Sequence[dict[str, Any]],
    oldest: int,
) -> None:
    """Deletes rollouts and groups of steps that are neither among the `keep` up to `newest` nor
    after `oldest`, the oldest checkpoint's; of evals likewise. What one of `states` needs stays,
    which are those of that checkpoint and of now; an empty one may need anything.
    """
    if keep == "all" or (last := min(newest - keep, oldest)) < 0 or not all(states):
        return
    below = min([settled_below(state) for state in states] + [*_cut_for(store, run, last)])
    places = [f"{keys.run_folder(run)}/{kind}" for kind in ("groups", "rollouts")]
    _delete(store, _old_groups(store.committed_keys(f"{places[0]}/train"), below))
    for folder in _old_groups(store.folders(f"{places[1]}/train"), below):
        store.delete_folder(f"{places[1]}/train/{folder}")
    for place in places:
        for epoch in store.folders(f"{place}/eval"):
            match = _EVAL.fullmatch(epoch)
            old = match is not None and int(match[1]) <= last
            if old and not any(_needs_eval(state, epoch) for state in states):
                store.delete_folder(f"{place}/eval/{epoch}")


def _needs_eval(state: dict[str, Any], epoch: str) -> bool:
    """Whether an eval is open, is being finalized, is the last of its env, or may begin yet: then
    it is of the state's step at least.
    """
    step = int(epoch.partition("-")[0])
    named = {name for text in _texts(state) for name in _NAMED_EVAL.findall(text)}
    needed = {*named, *state.get("evals", {}).get("finalizing", [])}
    return step >= state.get("steps", {}).get("step", 0) or not needed.isdisjoint({epoch, step})


def _old_groups(names: Iterable[str], below: int) -> Iterator[str]:
    for name in names:
        match = _GROUP.fullmatch(name.rpartition("/")[2])
        if match and int(match[1]) < below:
            yield name
