"""What the store has of a run, judged: artifacts, and the rollouts behind every batch."""

import json
from collections.abc import Iterator

from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import MARKER, ArtifactStore, CorruptArtifact
from tests.chaos.checker import ServedRollout, Verdict, shipped
from tests.chaos.history import Evidence


def artifacts(store: ArtifactStore, evidence: Evidence) -> Verdict:
    """Whatever any message, state or marker refers to is committed and whole.

    The run must keep everything (retention 'all'), since what was deleted cannot be told from
    what never was.
    """
    verdict = Verdict("no artifact uncommitted yet referenced")
    for key, found in sorted(evidence.refs.items()):
        kept = store.committed(key)
        verdict.expect(kept is not None, f"{key} is referred to and not committed")
        if kept is not None:
            wrong = found - {(kept.sha256, kept.path)}
            verdict.expect(not wrong, f"{key} is committed as {kept.path}, referred to as {wrong}")
    for key in marked(store, f"runs/{evidence.run_id}"):
        verdict.expect(*_whole(store, key))
    return verdict


def marked(store: ArtifactStore, prefix: str) -> Iterator[str]:
    """Keys of all markers below `prefix`."""
    start = len(store.root) + 1
    for name in sorted(store.fs.find(store.path(prefix))):
        if name.endswith(MARKER):
            yield name[start : -len(MARKER)]


def _whole(store: ArtifactStore, key: str) -> tuple[bool, str]:
    """Whether the content behind a marker is what was committed, and what is wrong otherwise."""
    try:
        ref = store.require(key)
        if store.fs.isdir(store.path(ref.path)):
            store.fetch_folder(ref)
        else:
            store.get(ref)
    except (CorruptArtifact, FileNotFoundError, json.JSONDecodeError) as error:
        return False, f"{key}: {type(error).__name__}: {error}"
    return True, ""


def rewards(store: ArtifactStore, run: str, last: int) -> list[float]:
    """Mean train reward of every step from 1 to `last`."""
    records = (store.require(keys.step_record(run, step)) for step in range(1, last + 1))
    return [float(store.get_json(ref)["metrics"]["reward/all/mean"]) for ref in records]


def contents(store: ArtifactStore, evidence: Evidence) -> Verdict:
    """Batches hold the groups that they were cut from, and no rollout is in two of them.

    The metrics of every step were recorded once, and none beyond.
    """
    verdict = Verdict("batches hold what was shipped")
    batch_of: dict[tuple[str, int], int] = {}
    found = shipped(evidence)
    for step, (activity, ref) in sorted(found.items()):
        kept = store.require(keys.batch(evidence.run_id, step))
        text = f"batch {step} is {kept.sha256[:8]}, shipped was {ref['sha256'][:8]}"
        verdict.expect(kept.sha256 == ref["sha256"], text)
        for sample in decode_batch(store.get(kept)):
            strange = f"batch {step} holds {sample.group}, which it was not cut from"
            verdict.expect(sample.group in activity.input["groups"], strange)
            place = (sample.group, sample.rollout)
            first = batch_of.setdefault(place, step)
            text = f"rollout {place} is in batches {first} and {step}"
            verdict.expect(first == step, text)
    last = max((memo.get("step") or 0 for _, memo in evidence.memos), default=0)
    recorded = [
        int(key.rpartition("step-")[2].removesuffix(".json"))
        for key in store.committed_keys(keys.step_records(evidence.run_id))
        if "/step-" in key
    ]
    missing = sorted(set(range(1, last + 1)) ^ set(recorded))
    verdict.expect(not missing, f"metrics of steps {missing[:5]} are missing or of no step")
    return verdict


def served(store: ArtifactStore, evidence: Evidence) -> Iterator[ServedRollout]:
    """The rollouts of all shipped groups, with what sampled their tokens."""
    for _, (activity, _) in sorted(shipped(evidence).items()):
        for group in activity.input["groups"]:
            folder = f"runs/{evidence.run_id}/rollouts/{group}"
            for key in store.committed_keys(folder):
                document = documents.read(store, store.require(key))
                samples = document["samples"]
                if document["error"] is None:
                    yield ServedRollout(
                        group,
                        document["index"],
                        (document["engine"]["index"], document["engine"]["epoch"]),
                        tuple(document["labels"]),
                        tuple(sorted({v for s in samples for v in s["versions"] if v >= 0})),
                        activity.scheduled_at,
                    )
