"""Attention over a packed row of sequences, in which each sequence attends only to itself.

Operations per token run on the packed row, which holds a prefix that sequences share only once. For
attention the row is cut into its sequences again: those of similar length are padded together and
go through plain causal attention. A sequence that is mostly another's prefix leaves it out of its
queries. So the cost is that of the sequences, or of their ends, not of the squared row.

Invariants:

- No value of one sequence enters another's attention: there they are separate rows of a batch.
- Without a `layout` the function is transformers' own scaled dot-product attention, to the bit.
- Gathering is an embedding look-up, whose gradient is summed in a fixed order.
- On a CPU it is computed in float32 whatever a pass lowers: the kernel in bfloat16 takes longer
  there, and its products are further off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "ratchet_packed"
LIKE = 0.75
"""Sequences are padded together if each has at least this share of the longest one's length."""
PROBE = (11, 7)
"""Lengths of the sequences that test whether a model can be packed."""


@dataclass(frozen=True)
class Rows:
    """Sequences that go through attention together, given by the own tokens of a `Layout`.

    keys, int64 [b, t], has the tokens of each sequence; padding repeats token 0 and is never read.
    All but the first `skip` of a row are queries; those that they see are, if `skip` is above 0, in
    mask, bool [t - skip, t], else it is plain causal attention.
    """

    keys: Tensor
    skip: int = 0
    mask: Tensor | None = None

    @property
    def queries(self) -> Tensor:
        """The tokens that are computed here, int64 [b, t - skip]."""
        return self.keys[:, self.skip :]

    def to(self, device: str) -> Rows:
        """The same rows on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        return Rows(self.keys.to(device), self.skip, mask)


@dataclass(frozen=True)
class Layout:
    """How a packed row of N tokens is computed from U <= N of them, the unique ones ("own").

    back: the place of each own token in the concatenated queries of `groups`, int64 [U].
    Only if sequences share a prefix: own, the place of each own token in the row, int64 [U]; of,
    the own token that represents each place, int64 [N]; before, the own token in front of each own
    one, int64 [U], without meaning for the first of a sequence.
    """

    groups: tuple[Rows, ...]
    back: Tensor
    own: Tensor | None = None
    of: Tensor | None = None
    before: Tensor | None = None

    def to(self, device: str) -> Layout:
        """The same layout on `device`."""
        own, of, before = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.own, self.of, self.before)
        )
        groups = tuple(group.to(device) for group in self.groups)
        return Layout(groups, self.back.to(device), own, of, before)


def layout(lengths: Sequence[int], of: Sequence[int] | None = None) -> Layout:
    """The layout of sequences of `lengths`, in the order of the row. No length may be 0.

    `of` names the own token of each place, in the order in which they first occur; None: each
    place has one to itself.
    """
    import torch

    tokens = torch.arange(sum(lengths)) if of is None else torch.tensor(of)
    # The highest so far: a place holds an own token if no place before it is as high.
    highest = torch.cat([torch.tensor([-1]), tokens.cummax(0).values])
    fresh = highest[1:] > highest[:-1]
    spans = [slice(*ends) for ends in pairwise([0, *accumulate(lengths)])]
    sequences = [tokens[span] for span in spans]
    known = [int((~fresh[span]).sum()) for span in spans]
    # Plain causal attention leaves out half of the pairs, which a mask does not.
    skips = [n if 2 * n > length else 0 for n, length in zip(known, lengths, strict=True)]
    groups, back, offset = [], torch.empty(int(highest[-1]) + 1, dtype=torch.int64), 0
    for chosen in _alike(lengths, skips):
        rows = _rows([sequences[k] for k in chosen], min(skips[k] for k in chosen))
        for row, place in enumerate(chosen):
            computed = sequences[place][rows.skip :]
            first = offset + row * rows.queries.shape[1]
            back[computed] = torch.arange(first, first + len(computed))
        offset += rows.queries.numel()
        groups.append(rows)
    if of is None:
        return Layout(tuple(groups), back)
    own = fresh.nonzero().squeeze(-1)
    return Layout(tuple(groups), back, own, tokens, tokens[(own - 1).clamp(min=0)])


def _alike(lengths: Sequence[int], skips: Sequence[int]) -> list[list[int]]:
    """Sets of sequences of similar length and skip, the longest of each set first. A sequence that
    another equals is in none.
    """
    sets: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda p: (skips[p] > 0, -lengths[p])):
        if skips[place] == lengths[place]:
            continue
        first = sets[-1][0] if sets else place
        pairs = (lengths[place], lengths[first]), (skips[place], skips[first])
        if sets and all(min(pair) >= LIKE * max(pair) for pair in pairs):
            sets[-1].append(place)
        else:
            sets.append([place])
    return sets


def _rows(sequences: list[Tensor], skip: int) -> Rows:
    """Sequences as rows of attention, without their first `skip` tokens as queries."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    keys = pad_sequence(sequences, batch_first=True)
    if not skip:
        return Rows(keys)
    width = keys.shape[1]
    return Rows(keys, skip, torch.ones(width - skip, width, dtype=torch.bool).tril(skip))


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers asks for: [1, heads, N, dim] to [1, N, heads, dim].

    Raises ValueError for a sliding window, which is not cut out here.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    computing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        computing = torch.autocast("cpu", enabled=False)
        query, key, value = query.float(), key.float(), value.float()
    if layout is None:
        with computing:
            whole, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return whole, None
    if kwargs.get("sliding_window") is not None:
        raise ValueError("its attention has a sliding window")
    look_up = torch.nn.functional.embedding
    flat = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    heads = [x.shape[1] for x in (query, key, value)]
    outputs = []
    for rows in layout.groups:
        cut = [
            look_up(chosen, values).view(*chosen.shape, count, -1).transpose(1, 2)
            for chosen, values, count in zip(
                (rows.queries, rows.keys, rows.keys), flat, heads, strict=True
            )
        ]
        with computing:
            output, _ = sdpa_attention_forward(module, *cut, rows.mask, **kwargs)
        outputs.append(output.reshape(rows.queries.numel(), -1))
    joined = look_up(layout.back, torch.cat(outputs))
    return joined.view(1, joined.shape[0], heads[0], -1), None


def enable(model: Any) -> str | None:
    """Makes a model accept a `layout`. Returns None, or the reason why it cannot; the model is then
    unchanged.

    Besides reading the config, this scores short sequences both packed and separately: that finds
    models that pass no arguments to their attention, or mix tokens elsewhere.
    """
    import torch
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if kinds:
        return f"it has layers of {', '.join(kinds)}"
    before = config._attn_implementation
    if before not in ("sdpa", NAME):
        return f"its attention is {before!r}"
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)
    vocab, device = config.vocab_size, str(model.device)
    ids = [torch.arange(1, length + 1, device=device) * 7 % vocab for length in PROBE]
    positions = torch.cat([torch.arange(length, device=device) for length in PROBE])
    reason = None
    try:
        with torch.no_grad():
            packed = model(
                input_ids=torch.cat(ids).unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                layout=layout(PROBE).to(device),
                use_cache=False,
            ).logits[0]
            alone = [model(input_ids=row.unsqueeze(0), use_cache=False).logits[0] for row in ids]
    except (TypeError, ValueError) as error:
        reason = str(error)
    else:
        difference = (
            packed.float().log_softmax(-1) - torch.cat(alone).float().log_softmax(-1)
        ).abs()
        tolerance = 1e-3 if packed.dtype == torch.float32 else 0.1
        if not difference.max().item() <= tolerance:
            reason = f"packed scores differ from unpacked ones by {difference.max().item():.2g}"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason
