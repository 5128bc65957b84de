"""Attention over a packed row of sequences, in which each sequence attends only to itself.

Operations per token run on the packed row, which holds a prefix that sequences share only once. For
attention the row is cut into its sequences again: those of similar length are padded together and
go through plain causal attention. So the cost is that of the sequences, not of the squared row, and
no mask is needed.

Invariants:

- No value of one sequence enters another's attention: there they are separate rows of a batch.
- Without a `layout` the function is transformers' own scaled dot-product attention, to the bit.
- Gathering is an embedding look-up, whose gradient is summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "ratchet_packed"
LIKE = 0.75
"""Sequences are padded together if each has at least this share of the longest one's length."""
PROBE = (11, 7)
"""Lengths of the sequences that test whether a model can be packed."""


@dataclass(frozen=True)
class Layout:
    """How a packed row of N tokens is computed from U <= N of them, the unique ones ("own").

    groups: the own tokens of each batch of sequences, int64 [b, t] each; padding repeats token 0
    and is never read. back: the place of each own token in the concatenated groups, int64 [U].
    Only if sequences share a prefix: own, the place of each own token in the row, int64 [U]; of,
    the own token that represents each place, int64 [N]; before, the own token in front of each own
    one, int64 [U], without meaning for the first of a sequence.
    """

    groups: tuple[Tensor, ...]
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

    shared = of is not None
    tokens = torch.arange(sum(lengths)) if of is None else torch.tensor(of)
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    groups, where, offset = [], torch.empty_like(tokens), 0
    for chosen in _alike(lengths):
        width = lengths[chosen[0]]
        group = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, place in enumerate(chosen):
            start, length = starts[place], lengths[place]
            group[row, :length] = tokens[start : start + length]
            first = offset + row * width
            where[start : start + length] = torch.arange(first, first + length)
        offset += group.numel()
        groups.append(group)
    if not shared:
        return Layout(tuple(groups), where)
    # The highest so far: a place holds an own token if no place before it is as high.
    highest = tokens.cummax(0).values
    fresh = torch.cat([torch.ones(1, dtype=torch.bool), highest[1:] > highest[:-1]])
    own = fresh.nonzero().squeeze(-1)
    return Layout(tuple(groups), where[own], own, tokens, tokens[(own - 1).clamp(min=0)])


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Sets of sequences of similar length, the longest of each set first."""
    sets: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        if sets and lengths[place] >= LIKE * lengths[sets[-1][0]]:
            sets[-1].append(place)
        else:
            sets.append([place])
    return sets


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

    if layout is None:
        whole, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return whole, None
    if kwargs.get("sliding_window") is not None:
        raise ValueError("its attention has a sliding window")
    look_up = torch.nn.functional.embedding
    rows = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    heads = [x.shape[1] for x in (query, key, value)]
    outputs = []
    for group in layout.groups:
        b, t = group.shape
        cut = [
            look_up(group, flat).view(b, t, count, -1).transpose(1, 2)
            for flat, count in zip(rows, heads, strict=True)
        ]
        output, _ = sdpa_attention_forward(module, *cut, None, **kwargs)
        outputs.append(output.reshape(b * t, -1))
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
        tolerance = 1e-4 if packed.dtype == torch.float32 else 0.1
        if not difference.max().item() <= tolerance:
            reason = f"packed scores differ from unpacked ones by {difference.max().item():.2g}"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason
