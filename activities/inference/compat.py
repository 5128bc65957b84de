"""The worker extension of engines, which keeps what a CPU engine packs readable.

vLLM hands the weights of a large float32 layer to a oneDNN handler whose memory nobody can read:
its bits could only be had by multiplying with the identity, 206 GFLOP for SmolLM2. Here such a
layer is packed by torch, for the same kernels of oneDNN, into a tensor that converts back to the
bit.
Importing this module makes the change, in an engine's process, before a model is loaded.

Invariants: layers of other dtypes, and small ones, whose time is the call's own, are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm._custom_ops as ops

from ratchet.activities.inference.held import Held

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 2**17
"""Weights of a layer from which on reading them costs more than the longer call."""


class Readable:
    """The weights [N, K] of a layer, packed."""

    def __init__(self, weights: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weights.contiguous())

    def dense(self) -> Tensor:
        """A copy of the weights [N, K] that the layer computes with."""
        dense: Tensor = self._packed.to_dense()
        return dense

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output for `x` [..., K]."""
        linear = torch.ops.mkldnn._linear_pointwise
        output: Tensor = linear(x, self._packed, bias, "none", [], "")
        return output


def _keep_readable() -> None:
    create, multiply = ops.create_onednn_mm, ops.onednn_mm

    def created(weight: Tensor, *args: Any) -> Any:
        if weight.dtype == torch.float32 and weight.numel() >= LARGE:
            return Readable(weight.t())
        return create(weight, *args)

    def multiplied(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(handler, Readable):
            return handler.multiply(x, bias)
        result: Tensor = multiply(handler, x, bias)
        return result

    ops.create_onednn_mm, ops.onednn_mm = created, multiplied


if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _keep_readable()


class Reader(Held):
    """What `--worker-extension-cls` names."""
