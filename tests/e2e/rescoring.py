"""What the engines sampled, scored once more with the weights of each token's own version."""

from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.model import load_model
from tests.scoring import rescore


def batch_samples(store: ArtifactStore, run_id: str, steps: int) -> list[Sample]:
    """The samples of all batches of a run."""
    samples: list[Sample] = []
    for step in range(1, steps + 1):
        samples += decode_batch(store.get(store.require(keys.batch(run_id, step))))
    return samples


def worst_difference(
    store: ArtifactStore, run_id: str, samples: list[Sample], seq_len: int
) -> tuple[float, int]:
    """Largest difference in nats between engine and trainer, and how many tokens were compared.

    Needs the weights of every version that sampled: a run with `retention.weights = "all"`.
    """
    versions = {v for sample in samples for v in sample.versions if v >= 0}
    checked, worst = 0, 0.0
    for version in sorted(versions):
        folder = store.fetch_folder(store.require(keys.weights(run_id, version)))
        served = [sample for sample in samples if version in sample.versions]
        model = load_model(folder)
        scores = rescore(model, served, seq_len=seq_len, micro_batch_tokens=8192)
        for sample, row in zip(served, scores, strict=True):
            for mask, at, engine, ours in zip(
                sample.loss_mask, sample.versions, sample.logprobs, row, strict=True
            ):
                if mask and at == version:
                    checked += 1
                    worst = max(worst, abs(engine - ours))
    return worst, checked
