"""Makes a checkpoint of one run the start of another: a later attempt of it, or a fork.

Invariants:

- The new run owns everything that it refers to: it is copied, since the source's retention may
  delete it. Copies keep their bytes, and their names within the run except for the checkpoint: one
  of its variants (`fencing`) is chosen, and goes under the plain key.
- A checkpoint is used only if it, and everything that its state refers to, is complete: that is
  checked before anything is copied. A damaged one is skipped for the one before; one of a newer
  build waits for a worker of that build (NewerSchema), since an older one would lose good steps.
- The checkpoint of an adapter goes with version 0 and with the merged weights of its step: it is
  complete if they are, and the new run owns copies of both.
- The lineage is committed last. When repeated, an attempt that got half-way adopts existing copies;
  one that finished gives the same result, even if the source has changed since.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.redact import writable
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import CheckpointResult, RestoreInput, RestoreResult
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE, TRAINER_STATE
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.fencing import variants
from ratchet.activities.storage.lineage import segments
from ratchet.activities.storage.policies import is_trainer_state
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact, FutureArtifact
from ratchet.configs.run import data_of
from ratchet.configs.upgrades import read_config
from ratchet.configs.versions import NewerSchema, Versions

_REFERENCE = frozenset(field.name for field in fields(ArtifactRef))
"""Keys that distinguish a reference from any other object of a state, which is not decoded here."""


@dataclass(frozen=True)
class _Candidate:
    """The checkpoint of `step` that attempt `source` committed under `key`."""

    source: str
    step: int
    key: str

    @property
    def place(self) -> tuple[str, int]:
        """Attempt and step, which its variants share."""
        return self.source, self.step


def restore(store: ArtifactStore, input: RestoreInput, attempt: str) -> RestoreResult:
    """Copies a sound checkpoint of `input.source`, with all that it needs, to `input.run_id`.

    A checkpoint that the source itself started from is also looked for where it was restored from.
    Of the variants of one step, the run continued with that of the last trainer. Raises ValueError
    if the requested step has no sound checkpoint, or no step has one; CorruptArtifact if a lineage
    or the weights of version 0 are damaged; NewerSchema.
    """
    assert input.run_id != input.source, "a run cannot be restored from itself"
    result = everything = _candidates(store, input.source)
    if input.step is not None:
        result = [candidate for candidate in everything if candidate.step == input.step]
    begun = _begun(store, input.run_id)
    if begun is not None:
        result = [*_up_to(result, begun.place), begun]
    refused: list[tuple[int, str]] = []
    for candidate in result:
        try:
            ref, state = _sound(store, input.run_id, candidate)
        except FutureArtifact as error:
            raise NewerSchema(f"{error}; {error.remedy}") from error
        except CorruptArtifact as error:
            text = f"checkpoint of step {candidate.step} is damaged: {error}"
            refused.append((candidate.step, text))
            continue
        if begun is None or begun.place == candidate.place:
            reported = [_passed_over(why, step, candidate.step) for step, why in refused]
            return _Adoption(store, input, candidate, attempt).perform(ref, state, reported)
    raise ValueError(_nothing_sound(input, everything, [why for _, why in refused]))


def _passed_over(why: str, step: int, used: int) -> str:
    which = "another one of that step" if step == used else f"that of step {used}"
    return writable(f"{why}; {which} is used instead")


def _nothing_sound(
    input: RestoreInput, everything: Sequence[_Candidate], refused: Sequence[str]
) -> str:
    wanted = "" if input.step is None else f" of step {input.step}"
    text = f"run {input.source} has no checkpoint{wanted} that it could continue from"
    if refused:
        text += f": {'; '.join(refused)}"
    steps = sorted({candidate.step for candidate in everything} - {input.step})
    if input.step is None:
        return f"{text}; restore one from a copy of the store, or start a new run"
    there = f"those of steps {', '.join(map(str, steps))}" if steps else "no others"
    return f"{text}; there are {there}"


def _candidates(store: ArtifactStore, source: str) -> list[_Candidate]:
    """All checkpoints on the way to `source`, the newest first."""
    result = []
    for attempt, limit in segments(store, source):
        kept = store.committed_keys(keys.checkpoints(attempt))
        steps = {step for key in kept if (step := number_of(key)) is not None}
        for step in sorted(steps, reverse=True):
            if limit is None or step <= limit:
                named = variants(keys.checkpoint(attempt, step), kept)
                result += [_Candidate(attempt, step, key) for key in reversed(named)]
    return result


def _begun(store: ArtifactStore, run_id: str) -> _Candidate | None:
    """The checkpoint that `run_id` has started from, if it has: its own copy."""
    ref = store.committed(keys.lineage(run_id))
    if ref is None:
        return None
    origin = store.get_json(ref)
    return _Candidate(origin["source"], origin["step"], keys.checkpoint(run_id, origin["step"]))


def _up_to(result: Sequence[_Candidate], place: tuple[str, int]) -> list[_Candidate]:
    """Candidates examined before a place was chosen, and those of the place."""
    places = [candidate.place for candidate in result]
    if place in places:
        return list(result[: len(places) - places[::-1].index(place)])
    return [candidate for candidate in result if candidate.step > place[1]]


def _sound(
    store: ArtifactStore, run_id: str, candidate: _Candidate
) -> tuple[ArtifactRef, dict[str, Any]]:
    """A checkpoint, and the run's state in it; raises CorruptArtifact unless all of it is complete.

    Parts that `run_id` already has a copy of are checked there instead of at the source.
    """
    own = store.committed(keys.checkpoint(run_id, candidate.step))
    ref = store.committed(candidate.key)
    if ref is None and own is None:
        raise CorruptArtifact(f"{candidate.key}: it was deleted in the meantime")
    if ref is not None and (own is None or own.sha256 != ref.sha256):
        state = _whole(store, run_id, candidate, ref)
    if own is None:
        assert ref is not None
        return ref, state
    # Once a variant was copied, another one is not mixed with it.
    return own, _whole(store, run_id, candidate, own)


def _merged_weights(
    store: ArtifactStore, run_id: str, candidate: _Candidate, ref: ArtifactRef
) -> ArtifactRef | None:
    """If the checkpoint `ref` holds only an adapter, the weights of its step that this very adapter
    is merged into; None for a checkpoint with all weights. Raises CorruptArtifact.
    """
    adapter = store.manifest(ref).get(keys.ADAPTER_FILE)
    if adapter is None:
        return None
    for attempt in (run_id, candidate.source):
        key = keys.weights(attempt, candidate.step)
        for name in variants(key, store.committed_keys(key.rpartition("/")[0])):
            weights = store.committed(name)
            # Version 0 has no adapter yet.
            if weights is not None and (
                candidate.step == 0 or store.manifest(weights).get(keys.ADAPTER_FILE) == adapter
            ):
                return weights
    raise CorruptArtifact(
        f"{ref.key}: the weights of step {candidate.step}, into which its adapter is merged, are "
        "missing"
    )


def _whole(
    store: ArtifactStore, run_id: str, candidate: _Candidate, ref: ArtifactRef
) -> dict[str, Any]:
    """The document with the run's state in a checkpoint; raises CorruptArtifact unless all that it
    needs is complete.
    """
    source = candidate.source
    folder = store.fetch_folder(ref)
    if (weights := _merged_weights(store, run_id, candidate, ref)) is not None:
        store.verify(weights)
    _document(folder, ref, keys.TRAINER_FILE, TRAINER_STATE)
    state = _document(folder, ref, keys.RUN_STATE_FILE, CHECKPOINT_STATE)

    def verify(named: ArtifactRef) -> ArtifactRef:
        if _stood_in_for(named) is None:
            store.verify(_nearest(store, named, run_id, source))
        return named

    _replaced(state, verify)
    return state


def _document(folder: Path, ref: ArtifactRef, name: str, versions: Versions) -> dict[str, Any]:
    """A JSON object of a checkpoint; raises CorruptArtifact unless it has a schema, NewerSchema if
    that is a newer one.
    """
    where = f"{ref.key}: {ref.path}/{name}"
    if not (folder / name).exists():
        raise CorruptArtifact(f"{where} is missing")
    try:
        value = json.loads((folder / name).read_text())
    except ValueError:
        raise CorruptArtifact(f"{where} is not JSON") from None
    try:
        return versions.upgraded(value if isinstance(value, dict) else {}, where)
    except ValueError as error:
        raise CorruptArtifact(str(error)) from None


def _owner(key: str) -> str | None:
    """The attempt that an artifact belongs to; None for a shared one."""
    room, _, rest = key.partition("/")
    return rest.partition("/")[0] if room == "runs" else None


def _moved(key: str, run_id: str) -> str:
    """The key of another attempt's artifact as one of `run_id`."""
    return keys.run_folder(run_id) + key.removeprefix(keys.run_folder(_owner(key) or ""))


def _nearest(store: ArtifactStore, named: ArtifactRef, *attempts: str) -> ArtifactRef:
    """The copy of an artifact that the first of `attempts` has, or the artifact itself.

    A copied checkpoint still names the artifacts of the previous attempt, which may be gone since.
    """
    for attempt in attempts:
        copy = store.committed(_moved(named.key, attempt))
        if copy is not None and copy.sha256 == named.sha256:
            return copy
    return named


def _stood_in_for(ref: ArtifactRef) -> str | None:
    """'weights' or 'checkpoints' for a reference to one, which the restored one replaces: retention
    may have removed the source's own.
    """
    folder, owner = ref.key.rpartition("/")[0], _owner(ref.key) or ""
    if folder == keys.checkpoints(owner):
        return "checkpoints"
    return "weights" if folder == keys.weights(owner, 0).rpartition("/")[0] else None


def _replaced(value: Any, by: Callable[[ArtifactRef], ArtifactRef]) -> Any:
    """JSON, with each reference to an artifact of an attempt replaced by `by` of it."""
    if isinstance(value, list):
        return [_replaced(item, by) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != _REFERENCE:
        return {name: _replaced(item, by) for name, item in value.items()}
    ref = ArtifactRef(**value)
    return value if _owner(ref.key) is None else asdict(by(ref))


@dataclass(frozen=True)
class _Adoption:
    """Copies everything that belongs to one sound checkpoint."""

    store: ArtifactStore
    input: RestoreInput
    candidate: _Candidate
    attempt: str

    def perform(self, ref: ArtifactRef, state: dict[str, Any], refused: list[str]) -> RestoreResult:
        """Copies all, then commits the lineage."""
        run_id, (source, step) = self.input.run_id, (self.candidate.source, self.candidate.step)
        checkpoint = self._copied(ref, keys.checkpoint(run_id, step))
        merged = _merged_weights(self.store, run_id, self.candidate, ref)
        files = self.store.manifest(ref)
        left_out = [name for name in files if merged is None and is_trainer_state(name)]
        weights = self._copied(merged or ref, keys.weights(run_id, step), without=left_out)
        first = self.store.committed(keys.weights(source, 0))
        if first is not None:
            self._copied(first, keys.weights(run_id, 0))

        goes_on = self._goes_on(state)

        def own(named: ArtifactRef) -> ArtifactRef:
            kind = _stood_in_for(named)
            if kind is not None:
                return checkpoint if kind == "checkpoints" else weights
            if not goes_on:
                return named
            result = _nearest(self.store, named, run_id, source)
            return self._copied(result, _moved(named.key, run_id))

        value = _replaced(state, own)
        resumed = workflow_of(self.input.source) == workflow_of(run_id)
        origin = {"source": source, "step": step, "kind": "resume" if resumed else "fork"}
        self.store.put_json(keys.lineage(run_id), origin, attempt=self.attempt)
        return RestoreResult(CheckpointResult(step, checkpoint), weights, value, refused, source)

    def _goes_on(self, state: dict[str, Any]) -> bool:
        """Whether the new run continues with the data of the source. If it uses other data, its
        groups and batches have the same names as the source's, whose copies it would take for its
        own.
        """
        run_id = self.input.run_id
        if self.store.committed(keys.config(run_id)) is None or "config" not in state:
            return True
        mine, theirs = configs.load(self.store, run_id), read_config(state["config"])
        return data_of(mine) == data_of(theirs)

    def _copied(self, ref: ArtifactRef, key: str, *, without: Sequence[str] = ()) -> ArtifactRef:
        result = self.store.committed(key)
        return result or self.store.copy(ref, key, attempt=self.attempt, without=without)
