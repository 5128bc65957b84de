"""Fingerprints of weights: 64 bits for a tensor, summed over its parts.

The trainer writes one for every tensor that it exports; an engine takes them of what it holds: in
shards, in layers that fuse several tensors, in parts of some milliseconds. Invariants:

- A fingerprint is a sum over words of 8 bytes, each mixed with its row and its place in the row:
  parts of a tensor may be summed in any order, padding with zeros adds nothing, and two tensors
  that differ in a single word always have different fingerprints.
- It is a function of shape and values alone: the same on every device. Numbers that kernels need
  not distinguish from zero count as zero: -0.0, and those below the smallest normal one (1.2e-38).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.activities.storage.keys import FINGERPRINTS_FILE
from ratchet.configs.versions import SCHEMA, Versions

if TYPE_CHECKING:
    from torch import Tensor

FINGERPRINTS = Versions(FINGERPRINTS_FILE, {}, oldest=1)
"""{schema, shapes: {tensor: its shape}, dtypes: {dtype: {tensor: fingerprint in hex}}}"""

WORD = 8
"""In bytes. Parts of a row begin at a multiple of it."""
BLOCK, BLOCK_ON_GPU = 2**17, 2**24
"""Elements processed at once: what fits into a cache, and what keeps a GPU busy."""
_LARGEST_SUBNORMAL = 1.1754942106924411e-38
_GOLDEN, _MIX, _MIX_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of splitmix64, as signed numbers."""


def hexed(fingerprint: int) -> str:
    """A fingerprint in its written form."""
    return f"{fingerprint % 2**64:016x}"


def lanes(tensor: Tensor) -> int:
    """Elements per word."""
    return WORD // tensor.element_size()


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor in two dimensions; a vector as one column."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)


def block_rows(tensor: Tensor) -> int:
    """Rows of `tensor` [R, C] that are processed at once."""
    most = BLOCK if tensor.device.type == "cpu" else BLOCK_ON_GPU
    return max(1, most // max(tensor.shape[1], 1))


def _odd(first: int, count: int, device: object) -> Tensor:
    """Odd factors for places from `first` on."""
    import torch

    z = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device) * _GOLDEN  # type: ignore[call-overload]
    z = (z ^ (z >> 30)) * _MIX
    z = (z ^ (z >> 27)) * _MIX_AGAIN
    odd: Tensor = (z ^ (z >> 31)) | 1
    return odd


def _words(block: Tensor, per_word: int) -> Tensor:
    """The words of a block [R, C] of whole words: int64 [R, W], in the block's own memory order,
    row by row or column by column.
    """
    import torch

    if block.stride(0) != 1:
        return block.contiguous().view(torch.int64)
    # Neighbours in a row are far apart in memory: packed here without a transposition.
    lanes_of = [block.t()[lane::per_word] for lane in range(per_word)]
    return torch.stack(lanes_of, -1).view(torch.int64).squeeze(-1).t()


def fingerprint(tensor: Tensor, row: int = 0, column: int = 0) -> int:
    """The fingerprint of a part [R, C] of a tensor that begins at `row`, `column`.

    Raises ValueError if the part begins inside a word.
    """
    import torch

    per_word = lanes(tensor)
    if column % per_word:
        raise ValueError(f"column {column} is not a multiple of {per_word}")
    rows, columns = tensor.shape
    words = -(-columns // per_word)
    places = _odd(column // per_word, words, tensor.device)
    # Rows have factors of their own, far beyond those of any place.
    weights = _odd(2**40 + row, rows, tensor.device)
    total, step = torch.zeros((), dtype=torch.int64, device=tensor.device), block_rows(tensor)
    for begin in range(0, rows, step):
        block = tensor[begin : begin + step]
        if block.is_floating_point():
            block = torch.nn.functional.hardshrink(block, _LARGEST_SUBNORMAL)
        if columns % per_word:
            block = torch.nn.functional.pad(block, (0, words * per_word - columns))
        mixed = _words(block, per_word) * places
        mixed ^= mixed >> 32
        total += (mixed.sum(1) * weights[begin : begin + step]).sum()
    return int(total) % 2**64


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of every exported tensor, by the dtype in which an engine holds it."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, dict[str, str]]


def take(tensors: Iterable[tuple[str, Tensor]], dtypes: Iterable[str]) -> Fingerprints:
    """The fingerprints of `tensors` as they are, or will be cast, in each of `dtypes`."""
    import torch

    wanted = {dtype: getattr(torch, dtype) for dtype in dtypes}
    result = Fingerprints({}, {dtype: {} for dtype in wanted})
    for name, tensor in tensors:
        result.shapes[name] = list(tensor.shape)
        for dtype, torch_dtype in wanted.items():
            cast = tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
            result.dtypes[dtype][name] = hexed(fingerprint(as_rows(cast.detach())))
    return result


def write(folder: Path, fingerprints: Fingerprints) -> None:
    """Writes them beside the weights."""
    document = {SCHEMA: FINGERPRINTS.current, **vars(fingerprints)}
    (folder / FINGERPRINTS_FILE).write_text(json.dumps(document))


def read(folder: Path) -> Fingerprints | None:
    """The fingerprints of exported weights; None if their build wrote none. Raises NewerSchema."""
    file = folder / FINGERPRINTS_FILE
    if not file.is_file():
        return None
    document: Mapping[str, dict[str, dict[str, str]]]
    document = FINGERPRINTS.upgraded(json.loads(file.read_text()), str(file))
    return Fingerprints(document["shapes"], document["dtypes"])  # type: ignore[arg-type]
