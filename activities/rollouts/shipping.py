"""Writes the batch of a step from groups that were finalized.

A batch whose metrics are committed is complete, from the groups that the metrics' name identifies.
Every later attempt adopts it, even if these groups have changed since: each must train only once.
"""

import hashlib

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import BatchResult, ShipBatchInput
from ratchet.activities.rollouts import groups
from ratchet.activities.runtime.failing import final
from ratchet.activities.scoring import batches, subsets
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact
from ratchet.configs.filters import FiltersConfig

ROLLOUTS = "progress/rollouts"
COUNTED = ("progress/samples", "progress/tokens", ROLLOUTS)


def delivered(store: ArtifactStore, run_id: str, group: str) -> ArtifactRef:
    """The document of a finalized group; raises CorruptArtifact if the store no longer has it."""
    key = keys.group(run_id, group)
    ref = store.committed(key)
    if ref is None:
        raise CorruptArtifact(f"{key}: it was committed, but its marker is missing")
    return ref


def ship(
    store: ArtifactStore,
    input: ShipBatchInput,
    judge: groups.Judge,
    slots: FiltersConfig,
    *,
    attempt: str,
) -> BatchResult:
    """Writes the batch of `given.groups` without the rollouts that `judge` removes, the names of
    these groups, and the batch's metrics.

    If nothing is left, no batch is written. Raises ApplicationError (not retryable) if the store's
    groups are not those of `given.digest`, or if its batch of that step was written from others;
    CorruptArtifact if a group is damaged.
    """
    if (before := _shipped(store, input)) is not None:
        return before
    refs = [delivered(store, input.run_id, group) for group in input.groups]
    digest = hashlib.sha256("".join(ref.sha256 for ref in refs).encode()).hexdigest()
    if digest != input.digest:
        raise final(
            names.CORRUPT,
            f"the groups of step {input.step} in {store.url} are not the ones that were "
            f"delivered (digest {digest[:16]}, expected {input.digest[:16]})",
        )
    # Most of what they hold goes into the batch as it is.
    found = [documents.read(store, ref, views=True) for ref in refs]
    judged = [(document, groups.judge_survivors(document, judge)) for document in found]
    rows = [row for doc, verdicts in judged for row in groups.batch_samples(doc, verdicts)]
    tokens = sum(len(row.token_ids) for row in rows)
    decoded = sum(sum(row.loss_mask) for row in rows)
    counted = [groups.batch_group(doc, verdicts) for doc, verdicts in judged]
    metrics = subsets.summarize(counted) | batches.summarize(
        counted,
        input.step,
        pre_batch=[config.type for config in slots.pre_batch],
        post_batch=[config.type for config in slots.post_batch],
        filtered_out=input.barren,
    )
    metrics[ROLLOUTS] = float(
        sum(not verdict.removed for _, verdicts in judged for verdict in verdicts.values())
    )
    metrics[batches.SCORING] = max((doc.get("scoring_s", 0.0) for doc in found), default=0.0)
    metrics["progress/samples"] = float(len(rows))
    metrics["progress/tokens"] = float(tokens)
    metrics["progress/prefill_tokens"] = float(tokens - decoded)
    metrics["progress/decode_tokens"] = float(decoded)
    metrics["progress/problems"] = float(len(found))
    batch = _put(store, input, encode_batch(rows), attempt) if rows else None
    cut = {"step": input.step, "groups": input.groups}
    store.put_json(keys.step_groups(input.run_id, input.step, digest), cut, attempt=attempt)
    # Last, since it vouches for the batch.
    key = keys.batch_metrics(input.run_id, input.step, digest)
    return _result(batch, metrics, store.put_json(key, metrics, attempt=attempt))


def _put(store: ArtifactStore, input: ShipBatchInput, data: bytes, attempt: str) -> ArtifactRef:
    key = keys.batch(input.run_id, input.step)
    batch = store.put(key, data, attempt=attempt)
    if batch.sha256 != hashlib.sha256(data).hexdigest():
        raise final(
            names.CORRUPT,
            f"{key} in {store.url} was written from other groups than those that this run has for "
            f"step {input.step}: Temporal's state of the run is older than the store, as after a "
            "backup was restored. Cancel the run and resume it: it then continues from its last "
            "checkpoint in the store",
        )
    return batch


def _shipped(store: ArtifactStore, input: ShipBatchInput) -> BatchResult | None:
    """The batch that an earlier attempt wrote; None if that attempt did not finish."""
    kept = store.committed(keys.batch_metrics(input.run_id, input.step, input.digest))
    if kept is None:
        return None
    metrics = store.get_json(kept)
    if not metrics["progress/samples"]:
        return _result(None, metrics, kept)
    batch = store.committed(keys.batch(input.run_id, input.step))
    # Older builds, whose metrics count no rollouts, wrote metrics before the batch.
    return _result(batch, metrics, kept) if batch and ROLLOUTS in metrics else None


def _result(
    batch: ArtifactRef | None, metrics: dict[str, float], metrics_ref: ArtifactRef
) -> BatchResult:
    samples, tokens, rollouts = (int(metrics.get(name, 0)) for name in COUNTED)
    headline = {name: metrics[name] for name in batches.HEADLINE if name in metrics}
    unusual = subsets.rewards_outside(metrics, 0.0, 1.0)
    return BatchResult(batch, samples, tokens, rollouts, headline, metrics_ref, unusual)
