"""Recomputes what a run computed, in a process of its own: `python -m tests.chaos.numerics`.

    python -m tests.chaos.numerics STORE_URL RUN SEQ_LEN LAST_STEP

Two questions, answered as one JSON line: do the weights of each token's version give the
log-probability that the engine told; and does training the recorded batches once more, without
any fault, give the very weights that the run ended with, bit for bit?
"""

import json
import sys
import tempfile
from pathlib import Path

from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.batch import Sample, decode_batch
from ratchet.activities.storage.store import ArtifactStore
from tests.chaos.checker import Verdict
from tests.e2e.rescoring import worst_difference

TOLERANCE = 1e-4
VERSIONS = 12
"""Versions whose tokens are scored again, evenly over the run."""
STEPS = 400
"""Most steps that are trained again; a longer run is followed from a checkpoint on."""
WEIGHTS = "model.safetensors"


def rescored(store: ArtifactStore, run: str, seq_len: int, last: int) -> tuple[Verdict, float]:
    """Scores tokens of some versions with their weights; and the largest difference in nats."""
    verdict = Verdict(f"sampled tokens rescored within {TOLERANCE:g}")
    steps = sorted({round(1 + k * (last - 1) / max(VERSIONS - 1, 1)) for k in range(VERSIONS)})
    worst, checked = 0.0, 0
    for step in steps:
        samples = batch_samples_of(store, run, step)
        difference, count = worst_difference(store, run, samples, seq_len)
        worst, checked = max(worst, difference), checked + count
        text = f"batch {step}: {difference} nats over {count} tokens"
        verdict.expect(difference <= TOLERANCE, text)
    verdict.checked = checked
    return verdict, worst


def batch_samples_of(store: ArtifactStore, run: str, step: int) -> list[Sample]:
    """The samples of one batch."""
    return decode_batch(store.get(store.require(keys.batch(run, step))))


def replayed(store: ArtifactStore, run: str, last: int) -> Verdict:
    """Trains the recorded batches again and compares the weights of every version, as bytes."""
    from ratchet.activities.training.trainer import Trainer

    verdict = Verdict("replay of the batches gives the same weights, bit for bit")
    config = configs.document(store, run)
    trainer, begin = Trainer(), max(last - STEPS, 0)
    start = _start(store, run, begin)
    folder = keys.checkpoint(run, start) if start else keys.weights(run, 0)
    trainer.load(store.fetch_folder(store.require(folder)), config, checkpoint=start > 0)
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(start + 1, last + 1):
            out = Path(scratch) / str(step)
            trainer.train(step, store.get(store.require(keys.batch(run, step))), out)
            kept = store.fetch_folder(store.require(keys.weights(run, step)))
            same = (kept / WEIGHTS).read_bytes() == (out / WEIGHTS).read_bytes()
            verdict.expect(same, f"weights of version {step} differ from those of a replay")
    final = store.committed(keys.checkpoint(run, last))
    if final is not None:
        kept = store.fetch_folder(store.require(keys.weights(run, last)))
        same = (kept / WEIGHTS).read_bytes() == (store.fetch_folder(final) / WEIGHTS).read_bytes()
        verdict.expect(
            same, f"the checkpoint of step {last} holds other weights than version {last}"
        )
    return verdict


def _start(store: ArtifactStore, run: str, begin: int) -> int:
    """The last checkpoint up to `begin`, 0 if there is none."""
    found = [int(key.rpartition("step-")[2]) for key in store.committed_keys(keys.checkpoints(run))]
    return max((step for step in found if step <= begin), default=0)


def main(arguments: list[str]) -> None:
    """Prints both verdicts and the largest difference."""
    url, run, seq_len, last = arguments
    store = ArtifactStore(url)
    scores, worst = rescored(store, run, int(seq_len), int(last))
    again = replayed(store, run, int(last))
    print(json.dumps({"worst_nats": worst, "verdicts": [vars(scores), vars(again)]}))


if __name__ == "__main__":
    main(sys.argv[1:])
