"""`make bench-batches`: CPU seconds that the tokens of a step cost in our own data plane.

TOKENS (1000000) in rollouts of LENGTH (1000) become rollout documents, a batch file, and the
samples that the trainer reads. The last line of stdout is one JSON object: seconds of each.
"""

import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

from ratchet.activities.rollouts.samples import Rollout, RolloutSample, to_document
from ratchet.activities.storage.batch import Sample, decode_batch, encode_batch


def rollouts(tokens: int, length: int) -> list[Rollout]:
    """Rollouts of one sample each, of which half of the tokens were sampled."""
    rng = random.Random(0)
    mask = [place >= length // 2 for place in range(length)]
    made = []
    for _ in range(tokens // length):
        ids = [rng.randrange(50_000) for _ in mask]
        logprobs = [-rng.random() if on else 0.0 for on in mask]
        versions = [7 if on else -1 for on in mask]
        made.append(Rollout(1.0, [RolloutSample(ids, mask, logprobs, versions)], {}, ["7.1a"]))
    return made


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and the CPU seconds that it took."""
    began = time.process_time()
    return work(), time.process_time() - began


def main() -> None:
    """Prints the result."""
    tokens = int(os.environ.get("TOKENS", "1000000"))
    made = rollouts(tokens, int(os.environ.get("LENGTH", "1000")))
    documents, document_s = timed(lambda: [to_document(rollout) for rollout in made])
    texts, dump_s = timed(lambda: [json.dumps(document) for document in documents])
    _, parse_s = timed(lambda: [json.loads(text) for text in texts])
    samples = [
        Sample(
            group=f"train/{number}",
            rollout=0,
            env="a",
            reward=1.0,
            temperature=1.0,
            advantages=[0.5 * on for on in one.loss_mask],
            token_ids=one.token_ids,
            loss_mask=one.loss_mask,
            logprobs=one.logprobs,
            versions=one.versions,
        )
        for number, rollout in enumerate(made)
        for one in rollout.samples
    ]
    data, encode_s = timed(lambda: encode_batch(samples))
    read, decode_s = timed(lambda: decode_batch(data))
    assert read == samples
    result = {
        "tokens": tokens,
        "document_s": document_s,
        "json_dump_s": dump_s,
        "json_parse_s": parse_s,
        "batch_encode_s": encode_s,
        "batch_decode_s": decode_s,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
