"""Decides which sequences share a forward pass, and which worker runs it.

Invariants:

- The grid is a pure function of the lengths, the bin size, the workers and the cost model; ties
  keep the order of the batch.
- Every sequence is in exactly one bin that is not a dummy. A bin exceeds the bin size only if it
  holds a single sequence that does.
- Every worker gets the same number of bins, so that all of them join each collective.

Pure: no tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Bin = list[int]
"""Indices of sequences in the batch."""


@dataclass(frozen=True)
class Cost:
    """Floating-point work of a bin with lengths n: linear * sum(n) + quadratic * sum(n^2)."""

    linear: int = 1
    quadratic: int = 0

    def of(self, lengths: Sequence[int]) -> int:
        """Cost of one bin, in arbitrary units."""
        return self.linear * sum(lengths) + self.quadratic * sum(n * n for n in lengths)


TOKENS = Cost()
"""Work counted in tokens, for a model of an unknown kind."""


def model_cost(config: Any) -> Cost:
    """Work of a decoder with grouped-query attention, from its Hugging Face (text) config.

    Per layer and token: query, key, value and output projections and a gated feed-forward; once
    per token the output head; per pair of tokens of a sequence, the two attention products. Of a
    mixture of experts, the routed and shared experts that a token meets count.
    """
    hidden, heads, layers = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_hidden_layers,
    )
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = config.intermediate_size
    if getattr(config, "moe_intermediate_size", None):
        width = config.num_experts_per_tok * config.moe_intermediate_size
        width += getattr(config, "shared_expert_intermediate_size", None) or 0
    projections = 2 * hidden * heads * head_dim + 4 * hidden * kv_heads * head_dim
    layer = projections + 2 * hidden * hidden + 6 * hidden * width
    return Cost(
        linear=layers * layer + 2 * hidden * config.vocab_size,
        quadratic=layers * 2 * heads * head_dim,
    )


def first_fit_decreasing(lengths: Sequence[int], bin_tokens: int) -> list[Bin]:
    """Puts each sequence, longest first, into the first bin that has room for it."""
    bins: list[Bin] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for place, free in enumerate(room):
            if lengths[index] <= free:
                bins[place].append(index)
                room[place] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(bin_tokens - lengths[index])
    return bins


def align(bins: list[Bin], lengths: Sequence[int], workers: int, cost: Cost = TOKENS) -> list[Bin]:
    """Splits the costliest bins until their number is a multiple of `workers`, if possible.

    A bin of one sequence cannot be split; dummies then fill the rest.
    """
    bins = [list(content) for content in bins]
    target = max(-(-len(bins) // workers), 1) * workers
    while workers > 1 and len(bins) < target:
        loads = [
            (cost.of([lengths[i] for i in content]), place)
            for place, content in enumerate(bins)
            if len(content) > 1
        ]
        if not loads:
            break
        _, place = max(loads)
        bins[place], right = _halves(bins[place], lengths, cost)
        bins.append(right)
    return bins


def _halves(content: Bin, lengths: Sequence[int], cost: Cost) -> tuple[Bin, Bin]:
    """Two bins of nearly equal cost: each sequence, costliest first, goes to the cheaper one."""
    sides: tuple[Bin, Bin] = ([], [])
    loads = [0, 0]
    for index in sorted(content, key=lambda i: -cost.of([lengths[i]])):
        side = 0 if loads[0] <= loads[1] else 1
        sides[side].append(index)
        loads[side] += cost.of([lengths[index]])
    return sides


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Splits the indices of `weights` into `parts` sets of equal size and nearly equal sum.

    Differencing by Karmarkar and Karp on `parts` sets at once (Michiels et al. 2003); then the best
    swap of two indices is repeated as long as it lowers (largest sum, largest minus smallest sum).
    Raises ValueError unless `parts` divides the number of weights.
    """
    if parts < 1 or len(weights) % parts:
        raise ValueError(f"{len(weights)} weights cannot be split into {parts} sets of one size")
    if not weights:
        return [[] for _ in range(parts)]
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), parts)):
        sets = [(weights[i], [i]) for i in reversed(order[start : start + parts])]
        sets.sort(key=lambda entry: -entry[0])
        heap.append((sets[-1][0] - sets[0][0], serial, sets))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        sets = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        sets.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], serial, sets))
        serial += 1
    return _swap_descent([sorted(members) for _, members in heap[0][2]], weights)


def _swap_descent(sets: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    loads = [sum(weights[i] for i in members) for members in sets]
    while True:
        score = (max(loads), max(loads) - min(loads))
        best: tuple[tuple[int, int], int, int, int, int] | None = None
        for a in range(len(sets)):
            for b in range(a + 1, len(sets)):
                others = loads[:a] + loads[a + 1 : b] + loads[b + 1 :]
                top, bottom = max(others, default=0), min(others, default=max(loads))
                for i in sets[a]:
                    for j in sets[b]:
                        left = loads[a] - weights[i] + weights[j]
                        right = loads[b] - weights[j] + weights[i]
                        high, low = max(top, left, right), min(bottom, left, right)
                        if (high, high - low) < (score if best is None else best[0]):
                            best = ((high, high - low), a, b, i, j)
        if best is None:
            return sets
        _, a, b, i, j = best
        sets[a] = sorted([*(x for x in sets[a] if x != i), j])
        sets[b] = sorted([*(x for x in sets[b] if x != j), i])
        loads[a] += weights[j] - weights[i]
        loads[b] += weights[i] - weights[j]


@dataclass(frozen=True)
class Slot:
    """One forward pass of a worker. A dummy repeats the first bin and trains nothing."""

    indices: Bin
    dummy: bool = False


def grid(
    lengths: Sequence[int],
    bin_tokens: int,
    workers: int = 1,
    cost: Cost = TOKENS,
    *,
    bins: list[Bin] | None = None,
) -> list[list[Slot]]:
    """The forward passes of each worker: equally many, of nearly equal cost.

    `bins` are those to distribute; None: as few as hold all. Raises ValueError for a batch without
    sequences.
    """
    if not lengths:
        raise ValueError("a batch without sequences cannot be packed")
    bins = first_fit_decreasing(lengths, bin_tokens) if bins is None else bins
    bins = align(bins, lengths, workers, cost)
    slots = [Slot(content) for content in bins]
    slots += [Slot(bins[0], dummy=True)] * (-len(slots) % workers)
    if workers == 1:
        return [slots]
    loads = [cost.of([lengths[i] for i in slot.indices]) for slot in slots]
    return [[slots[place] for place in part] for part in balanced_partition(loads, workers)]
