"""Versions of a run's policy that the store keeps: as weights, in checkpoints, or as both.

A run's versions are those of its lineage: its own, and those of each source up to the step at
which the run left it. Version n is the policy after n steps. Exported weights are what engines
served, in their dtype; checkpoints hold the trainer's float32 weights or, if the run trains an
adapter, only that, which belongs to version 0 of the attempt.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.fencing import variants
from ratchet.activities.storage.lineage import attempts, segments
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact, digest
from ratchet.configs.model import LICENSES


@dataclass(frozen=True)
class Held:
    """Weights or a checkpoint of a step, held by `attempt` as one or more variants under `keys`, in
    the order in which runs continue from them (`ratchet.activities.storage.fencing`).
    """

    step: int
    attempt: str
    keys: tuple[str, ...]


class NoVersion(ValueError):
    """A version that the store does not hold; `removed` says whether it once did."""

    def __init__(self, text: str, *, removed: bool = False) -> None:
        super().__init__(text)
        self.removed = removed


def _held(store: ArtifactStore, run_id: str, key_of: Callable[[str, int], str]) -> dict[int, Held]:
    result: dict[int, Held] = {}
    for attempt, last in reversed(segments(store, attempts(store, run_id)[-1])):
        committed = store.committed_keys(key_of(attempt, 0).rpartition("/")[0])
        for step in {step for key in committed if (step := number_of(key)) is not None}:
            named = variants(key_of(attempt, step), committed)
            if named and (last is None or step <= last):
                result[step] = Held(step, attempt, tuple(reversed(named)))
    return {step: result[step] for step in sorted(result)}


def weights_of(store: ArtifactStore, run_id: str) -> dict[int, Held]:
    """Exported weights of a run, by step. The newest attempt that has a step holds it."""
    return _held(store, run_id, keys.weights)


def checkpoints_of(store: ArtifactStore, run_id: str) -> dict[int, Held]:
    """Checkpoints that a run can be restored from, by step; likewise."""
    return _held(store, run_id, keys.checkpoint)


def no_version(
    store: ArtifactStore, run_id: str, step: int, kept: Mapping[int, object]
) -> NoVersion:
    """Why version `step` of a run is not among those `kept`, and which are. The newest version is
    always kept, so that an older one that is missing has been removed.
    """
    there = f"kept versions: {', '.join(map(str, sorted(kept))) or 'none'}"
    if step > max(kept, default=-1):
        return NoVersion(f"run {run_id} has no version {step}; {there}")
    config = configs.latest(store, attempts(store, run_id)[-1])
    every = config.checkpoint.keep_every
    return NoVersion(
        f"version {step} of run {run_id} was removed by its retention (retention.weights = "
        f"{config.retention.weights}, checkpoint.keep_last = {config.checkpoint.keep_last}, "
        f"checkpoint.keep_every {'is not set' if every is None else f'= {every}'}); {there}. To "
        'keep every version set retention.weights = "all", to keep those of every n-th step set '
        "checkpoint.keep_every = n, a multiple of checkpoint.interval",
        removed=True,
    )


def find(store: ArtifactStore, run_id: str, step: int) -> Held:
    """What another run starts from that names version `step` of this one: the checkpoint, or the
    weights if there is none. Raises NoVersion.
    """
    if store.committed(keys.config(run_id)) is None:
        raise NoVersion(f"there is no run {run_id!r} in this artifact store")
    kept = weights_of(store, run_id) | checkpoints_of(store, run_id)
    if step not in kept:
        raise no_version(store, run_id, step, kept)
    return kept[step]


def in_model(name: str) -> bool:
    """Whether a file of weights or a checkpoint is part of a model in Hugging Face layout."""
    beside = name in keys.NOT_MODEL or keys.is_trainer_state(name)
    return not beside and not name.startswith(f"{keys.ADAPTER_FOLDER}/")


def model_of(store: ArtifactStore, held: Held, ref: ArtifactRef) -> ArtifactRef:
    """The artifact with the files of a whole model: `ref`, one of those `held`, or version 0 if
    that is the checkpoint of an adapter. Raises CorruptArtifact, FileNotFoundError.
    """
    alone = keys.ADAPTER_FILE in store.manifest(ref) and not any(
        in_model(name) for name in store.manifest(ref)
    )
    return store.require(keys.weights(held.attempt, 0)) if alone else ref


def _copy_model(store: ArtifactStore, held: Held, ref: ArtifactRef, folder: Path) -> None:
    """Raises CorruptArtifact, and FileNotFoundError if a file is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    model = model_of(store, held, ref)
    _copy_files(store, model, folder, in_model)
    if model is not ref:
        _copy_files(store, ref, folder, lambda name: name.startswith(f"{keys.ADAPTER_FOLDER}/"))


def _copy_files(
    store: ArtifactStore, ref: ArtifactRef, folder: Path, wanted: Callable[[str], bool]
) -> None:
    for name, (sha, _) in store.manifest(ref).items():
        if not wanted(name):
            continue
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.writelines(store.pieces(ref, name))
        if digest(file) != sha:
            raise CorruptArtifact(f"{ref.key}: {ref.path}/{name} does not match its sha256")


def fetch(store: ArtifactStore, run_id: str, step: int, folder: Path) -> None:
    """Copies the files of version `step` that make up a model, verified, to `folder`: retention may
    remove the version at any moment. For an adapter these are its base, and the adapter in a folder
    inside. Raises NoVersion, CorruptArtifact.
    """
    held = find(store, run_id, step)
    damage: CorruptArtifact | None = None
    for key in held.keys:
        try:
            if (ref := store.committed(key)) is not None:
                _copy_model(store, held, ref, folder)
                return
        except CorruptArtifact as error:
            damage = error
        except FileNotFoundError as error:
            if store.committed(key) is not None:
                damage = CorruptArtifact(f"{key}: a file of it is missing: {error}")
    raise damage or NoVersion(f"version {step} of run {run_id} has been removed", removed=True)


def about(store: ArtifactStore, run_id: str) -> dict[str, Any]:
    """{base, license, parameters} of a run's policy: the model that it descends from, as a config
    would name it; that model's licence, None if unknown; its parameters, likewise.
    """
    first = weights_of(store, run_id).get(0)
    ref = store.committed(first.keys[0]) if first else None
    info = json.loads(store.read_file(ref, keys.POLICY_FILE)) if ref else {}
    # Older builds recorded neither base nor licence.
    base = info.get("base") or configs.load(store, run_id).model.name
    return {
        "base": base,
        "license": info.get("license") or LICENSES.get(base),
        "parameters": info.get("parameters"),
    }
