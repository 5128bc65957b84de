"""The trainer's scores of samples, as a step computes them."""

from collections.abc import Sequence
from typing import Any

import torch

from ratchet.activities.storage.batch import Sample
from ratchet.activities.training.batching import micro_batches
from ratchet.activities.training.head import split
from ratchet.activities.training.model import score_batch


def rescore(
    model: Any,
    samples: Sequence[Sample],
    *,
    seq_len: int,
    micro_batch_tokens: int,
    packing: bool = False,
) -> list[list[float]]:
    """The trainer's log-probabilities of every token of every sample, aligned with `token_ids`.

    Takes the path of a training step's forward pass, and cuts samples at `seq_len` as it does. With
    `packing`, the model must accept packed rows (`attention.enable`). The first token of each
    sample gets ln(1/V).
    """
    head = split(model)
    result: list[list[float]] = [[] for _ in samples]
    with torch.no_grad():
        for batch in micro_batches(samples, seq_len, micro_batch_tokens, packing=packing):
            logprobs, _ = score_batch(model, batch.to(model.device), head)
            for index, (row, start, stop) in zip(batch.indices, batch.spans(), strict=True):
                result[index] = logprobs[row, start:stop].tolist()
    return result
