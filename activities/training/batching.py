"""From samples to micro-batches: cut, order, pad.

Invariants:

- The micro-batches of a batch are a pure function of the samples and two numbers. Another split
  gives other bits in the gradient, so the split is part of what makes a step reproducible.
- Every per-token list of a sample is cut alike, and nothing is renormalised after a cut.
- Every sample appears exactly once.

Sequences are padded here. Packing several into one row would replace `plan` and `_collate` and
leave the trainer as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from activities.storage.batch import Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """B samples padded to T tokens.

    token_ids [B, T] int64; loss_mask [B, T] bool, False on padding; logprobs and advantages
    [B, T] float32; temperature [B, 1] float32. `indices[b]` is the sample's place in the batch,
    `lengths[b]` its tokens.
    """

    indices: list[int]
    lengths: list[int]
    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    temperature: Tensor

    def to(self, device: str) -> MicroBatch:
        """The same micro-batch on `device`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            loss_mask=self.loss_mask.to(device),
            logprobs=self.logprobs.to(device),
            advantages=self.advantages.to(device),
            temperature=self.temperature.to(device),
        )


def cut(sample: Sample, seq_len: int) -> Sample:
    """The first `seq_len` tokens of a sample."""
    if len(sample.token_ids) <= seq_len:
        return sample
    return replace(
        sample,
        token_ids=sample.token_ids[:seq_len],
        loss_mask=sample.loss_mask[:seq_len],
        logprobs=sample.logprobs[:seq_len],
        advantages=sample.advantages[:seq_len],
        versions=sample.versions[:seq_len],
    )


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Which samples share a micro-batch, longest first.

    Rows times longest row is at most `max_tokens`, except that a sample longer than that gets a
    micro-batch of its own. Ties keep the order of the batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    bins: list[list[int]] = []
    for index in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def micro_batches(samples: Sequence[Sample], seq_len: int, max_tokens: int) -> Iterator[MicroBatch]:
    """Micro-batches of a batch, in a fixed order. Raises ValueError for greedy samples.

    Tokens sampled at temperature 0 have no distribution to compare with.
    """
    short = [cut(sample, seq_len) for sample in samples]
    for sample in short:
        if sample.temperature <= 0:
            raise ValueError(
                f"sample {sample.group}/{sample.rollout} has temperature {sample.temperature}; "
                "training samples need one above 0"
            )
    for chosen in plan([len(sample.token_ids) for sample in short], max_tokens):
        yield _collate(chosen, [short[index] for index in chosen])


def member_count(samples: Sequence[Sample], seq_len: int) -> int:
    """Tokens of a batch that the loss is about, after the cut."""
    return sum(sum(sample.loss_mask[:seq_len]) for sample in samples)


def _collate(indices: list[int], samples: list[Sample]) -> MicroBatch:
    import torch

    lengths = [len(sample.token_ids) for sample in samples]
    width = max(lengths)

    def padded(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        rows = [getattr(s, name) + [fill] * (width - len(s.token_ids)) for s in samples]
        return torch.tensor(rows, dtype=dtype)

    return MicroBatch(
        indices=indices,
        lengths=lengths,
        token_ids=padded("token_ids", 0, torch.int64),
        loss_mask=padded("loss_mask", False, torch.bool),
        logprobs=padded("logprobs", 0.0, torch.float32),
        advantages=padded("advantages", 0.0, torch.float32),
        temperature=torch.tensor([[sample.temperature] for sample in samples]),
    )
