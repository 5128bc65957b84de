"""Compares the tensors of two folders bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model*.safetensors"
"""Exported weights: one file, or the parts of many."""


@dataclass(frozen=True)
class Difference:
    """The first tensor, by name, that differs between two folders.

    `what` says how it differs; `elements` of `size` have other bits, and `largest` is their largest
    absolute difference (None: it is not finite).
    """

    tensor: str
    what: str
    elements: int = 0
    size: int = 0
    largest: float | None = 0.0


def first_difference(ours: Path, theirs: Path, pattern: str) -> Difference | None:
    """The first difference between the tensors in the safetensors files of both folders that match
    `pattern`; None if all are the same. How tensors are spread over files does not matter: several
    files may hold the rows of one tensor, in the order of the files.
    """
    mine, other = _places(ours, pattern), _places(theirs, pattern)
    for name in sorted(mine.keys() | other.keys()):
        if name not in mine or name not in other:
            return Difference(name, "only recorded" if name in other else "only in the replay")
        result = _difference(name, _read(mine[name], name), _read(other[name], name))
        if result is not None:
            return result
    return None


def _places(folder: Path, pattern: str) -> dict[str, list[Path]]:
    from safetensors import safe_open

    places: dict[str, list[Path]] = {}
    for file in sorted(folder.glob(pattern)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                places.setdefault(name, []).append(file)
    return places


def _read(files: list[Path], name: str) -> Tensor:
    import torch
    from safetensors import safe_open

    parts: list[Tensor] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            parts.append(tensors.get_tensor(name))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _difference(name: str, ours: Tensor, theirs: Tensor) -> Difference | None:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        sorts = [f"{t.dtype} {tuple(t.shape)}" for t in (ours, theirs)]
        return Difference(name, f"{sorts[0]} in the replay, {sorts[1]} recorded")
    other = (_bytes(ours) != _bytes(theirs)).any(-1)
    if not other.any():
        return None
    largest: Any = (ours.double() - theirs.double()).abs().reshape(-1)[other].max().item()
    count = int(other.sum().item())
    return Difference(
        name, "values", count, ours.numel(), largest if math.isfinite(largest) else None
    )
