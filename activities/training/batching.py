"""Makes micro-batches of samples: cuts, orders, and pads or packs them.

Invariants:

- The micro-batches of a batch are a pure function of the samples and the settings. Another split
  gives other bits in the gradient, so a step is reproducible only if the split is.
- All per-token lists of a sample are cut at the same length, and nothing is renormalised after.
- Every sample appears exactly once, on one of the workers.

A padded micro-batch has one sample per row. A packed one has a single row with all samples in
sequence; `positions` start at 0 for each of them.

A stream that a sample lacks is None. Without rl_weights the weight is 1 on the loss mask; without
the streams of ce or ref_kl no token is a member. A micro-batch has a stream if any of its samples
has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ratchet.activities.storage.batch import Sample
from ratchet.activities.storage.columns import PER_TOKEN
from ratchet.activities.training.attention import Layout, layout
from ratchet.activities.training.loss import MemberCounts
from ratchet.activities.training.packing import TOKENS, Cost, grid

if TYPE_CHECKING:
    from torch import Tensor

STREAMS = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}
"""Optional per-token streams, each with the value that fills in for a sample without it."""
PACKED_PAD_TOKEN = 1
WORTH_SHARING = 0.1
"""Least share of a row's tokens that repeat others for each to be computed only once."""


@dataclass(frozen=True)
class MicroBatch:
    """B rows of T tokens: B samples padded, or one row of packed samples.

    token_ids [B, T] int64; loss_mask [B, T] bool, False on padding; logprobs and advantages
    [B, T] float32; temperature [B, 1] padded, [1, T] packed, float32; streams [B, T] float32 or
    None. `indices` are the samples' places in the batch, `lengths` their numbers of tokens, both in
    the order of rows, or along the row. Packed only: positions [1, T] int64 and the attention
    layout.
    """

    indices: list[int]
    lengths: list[int]
    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    temperature: Tensor
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    positions: Tensor | None = None
    layout: Layout | None = None

    def to(self, device: str) -> MicroBatch:
        """The same micro-batch on `device`."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in held.items() if hasattr(v, "to")})

    def work(self) -> tuple[int, int]:
        """Tokens of its samples that the model computes, each shared one once, and the squared
        lengths that causal attention from these tokens amounts to: a token at place n adds 2n + 1.
        """
        lengths = self.lengths[: len(self.indices)]
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        if lengths and self.layout is not None and self.layout.own is not None:
            assert self.positions is not None
            padding = self.lengths[len(lengths) :]
            tokens = self.layout.own.numel() - sum(padding)
            seen = int((2 * self.positions[0, self.layout.own] + 1).sum())
            squares = seen - sum(length * length for length in padding)
        return tokens, squares

    def spans(self) -> list[tuple[int, int, int]]:
        """Where each sample of `indices` lies: (row, start, stop), in their order."""
        lengths = self.lengths[: len(self.indices)]
        if self.positions is None:
            return [(row, 0, length) for row, length in enumerate(lengths)]
        stops = list(accumulate(lengths))
        starts = [0, *stops][: len(stops)]
        return [(0, start, stop) for start, stop in zip(starts, stops, strict=True)]


def cut(sample: Sample, seq_len: int) -> Sample:
    """The first `seq_len` tokens of a sample, in all of its per-token lists."""
    length = len(sample.token_ids)
    lists: dict[str, Any] = {
        name: value for name in PER_TOKEN if (value := getattr(sample, name)) is not None
    }
    for name, values in lists.items():
        assert len(values) == length, f"{name} is not aligned with token_ids"
    if length <= seq_len:
        return sample
    return replace(sample, **{name: values[:seq_len] for name, values in lists.items()})


def stream(sample: Sample, name: str) -> list[float] | None:
    """A per-token stream [T] of a sample, or None where it is absent."""
    found: list[float] | None = getattr(sample, name)
    return found


def _require_trainable(sample: Sample) -> None:
    where = f"sample {sample.group}/{sample.rollout}"
    if sample.temperature <= 0:
        raise ValueError(
            f"{where} has temperature {sample.temperature}; training samples need one above 0"
        )


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups samples into padded micro-batches, longest first.

    The number of rows times the longest row is at most `max_tokens`; a sample longer than that gets
    its own micro-batch. Ties keep the order of the batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    bins: list[list[int]] = []
    for index in order:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def prepared(samples: Sequence[Sample], seq_len: int) -> list[Sample]:
    """The samples as they are trained: cut at `seq_len`.

    Raises ValueError for a sample at temperature 0, which has no distribution to compare with.
    """
    short = [cut(sample, seq_len) for sample in samples]
    for sample in short:
        _require_trainable(sample)
    return short


def micro_batches(
    samples: Sequence[Sample],
    seq_len: int,
    max_tokens: int,
    *,
    packing: bool = False,
    worker: int = 0,
    workers: int = 1,
    cost: Cost = TOKENS,
    pad_to_multiple_of: int = 1,
) -> Iterator[MicroBatch]:
    """Micro-batches of a batch for one of `workers`, in a fixed order. Dummies give every worker
    the same number; `cost` is spread evenly over the workers.

    `max_tokens` is the most tokens of a padded micro-batch, padding included, or the size of a bin,
    which is padded to a multiple of `pad_to_multiple_of`. Raises ValueError for samples that cannot
    be trained.
    """
    short = prepared(samples, seq_len)
    if not short:
        return
    lengths = [len(sample.token_ids) for sample in short]
    bins = None if packing else plan(lengths, max_tokens)
    for slot in grid(lengths, max_tokens, workers, cost, bins=bins)[worker]:
        chosen = [short[index] for index in slot.indices]
        if packing:
            batch = pack(slot.indices, chosen, pad_to_multiple_of)
        else:
            batch = _collate(slot.indices, chosen)
        yield dummy(batch) if slot.dummy else batch


def _counts(sample: Sample, seq_len: int | None = None) -> MemberCounts:
    mask = sample.loss_mask[:seq_len]
    weights = {name: (stream(sample, name) or [])[:seq_len] for name in STREAMS}
    rl = weights["rl_weights"] if stream(sample, "rl_weights") is not None else [1.0] * len(mask)
    return MemberCounts(
        rl=sum(m and w != 0 for m, w in zip(mask, rl, strict=True)),
        ce=sum(w != 0 for w in weights["ce_weights"]),
        ref_kl=sum(w != 0 for w in weights["ref_kl_weights"]),
    )


def member_counts(samples: Sequence[Sample], seq_len: int) -> MemberCounts:
    """The number of member tokens of each loss component in a batch, after the cut."""
    counts = [_counts(sample, seq_len) for sample in samples]
    return MemberCounts(
        rl=sum(c.rl for c in counts),
        ce=sum(c.ce for c in counts),
        ref_kl=sum(c.ref_kl for c in counts),
    )


def _rows(name: str, samples: Sequence[Sample]) -> list[list[float]] | None:
    """A per-token list of every sample, filled where a sample lacks it; None if all lack it."""
    rows = [stream(sample, name) for sample in samples]
    if all(row is None for row in rows):
        return None
    fill = STREAMS.get(name, 0.0)
    return [
        [fill] * len(sample.token_ids) if row is None else row
        for row, sample in zip(rows, samples, strict=True)
    ]


def _streams(tensor_of: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    rows = {name: _rows(name, samples) for name in STREAMS}
    return {name: tensor_of(rows[name]) for name in STREAMS if rows[name] is not None}


def _advantages(samples: Sequence[Sample]) -> list[list[float]]:
    return _rows("advantages", samples) or [[0.0] * len(s.token_ids) for s in samples]


def _collate(indices: list[int], samples: list[Sample]) -> MicroBatch:
    import torch

    lengths = [len(sample.token_ids) for sample in samples]
    width = max(lengths)

    def padded(rows: Sequence[Sequence[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)

    return MicroBatch(
        indices=indices,
        lengths=lengths,
        token_ids=padded([s.token_ids for s in samples], 0, torch.int64),
        loss_mask=padded([s.loss_mask for s in samples], False, torch.bool),
        logprobs=padded([s.logprobs for s in samples], 0.0, torch.float32),
        advantages=padded(_advantages(samples), 0.0, torch.float32),
        temperature=torch.tensor([[sample.temperature] for sample in samples]),
        **_streams(lambda rows: padded(rows, 0.0, torch.float32), samples),
    )


def _own_tokens(samples: Sequence[Sample]) -> list[int] | None:
    """For each token of a row, the number of the first equal token after the same prefix.

    A model computes the same for both. They are numbered in the order in which they first occur;
    prefixes at unlike temperatures are different. None: too few tokens repeat to be worth it.
    """
    known: dict[tuple[Any, int], int] = {}
    result = []
    for sample in samples:
        last: Any = ("at", sample.temperature)
        for token in sample.token_ids:
            last = known.setdefault((last, token), len(known))
            result.append(last)
    return result if len(result) - len(known) >= WORTH_SHARING * len(result) else None


def pack(indices: list[int], samples: list[Sample], pad_to_multiple_of: int = 1) -> MicroBatch:
    """One row of samples in sequence, padded to a multiple of `pad_to_multiple_of` tokens.

    Padding is a separate sequence, then the last of `lengths`, and a member of no component.
    """
    import torch

    lengths = [len(sample.token_ids) for sample in samples]
    used = sum(lengths)
    padding = -used % pad_to_multiple_of

    def joined(rows: Sequence[Sequence[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        flat = [value for row in rows for value in row] + [fill] * padding
        assert len(flat) == used + padding, "a per-token list is not aligned with token_ids"
        return torch.tensor([flat], dtype=dtype)

    all_lengths = lengths + [padding] * (padding > 0)
    own = _own_tokens(samples)
    if own is not None:
        own += range(max(own) + 1, max(own) + 1 + padding)
    positions = [place for length in all_lengths for place in range(length)]
    temperatures = [[s.temperature] * len(s.token_ids) for s in samples]
    return MicroBatch(
        indices=indices,
        lengths=all_lengths,
        token_ids=joined([s.token_ids for s in samples], PACKED_PAD_TOKEN, torch.int64),
        loss_mask=joined([s.loss_mask for s in samples], False, torch.bool),
        logprobs=joined([s.logprobs for s in samples], 0.0, torch.float32),
        advantages=joined(_advantages(samples), 0.0, torch.float32),
        temperature=joined(temperatures, 1.0, torch.float32),
        positions=torch.tensor([positions], dtype=torch.int64),
        layout=layout(all_lengths, own),
        **_streams(lambda rows: joined(rows, 0.0, torch.float32), samples),
    )


def dummy(batch: MicroBatch) -> MicroBatch:
    """The same forward pass without samples and without members of any component."""
    import torch

    return replace(
        batch,
        indices=[],
        loss_mask=torch.zeros_like(batch.loss_mask),
        advantages=torch.zeros_like(batch.advantages),
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        ref_logprobs=None,
    )
