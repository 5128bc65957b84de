"""Model FLOPs of a training step, and the share of a device's peak that they are (MFU).

Counted as by Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B: 6 FLOPs (2 forward, 4
backward) for each weight that a token is multiplied by, and 12 · layers · heads · width of a head ·
T for its attention to a sequence of T tokens, causal or not. A look-up in the embedding costs
nothing. What is computed twice (activation checkpointing, blocks of the head) counts once; so does
a prefix that packed samples share, but for attention. Frozen weights have no gradient and cost 4;
the adapter on them is not counted.

Pure: no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.activities.training.memory import Shape

PEAKS: Mapping[str, float] = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""FLOPs a second of dense bfloat16 products by the name of a device, as NVIDIA's data sheets have
them. All words of the first entry that fits are in the device's name.
"""


def peak(device: str) -> float | None:
    """Peak of a device in bfloat16, by the driver's name for it; None for an unknown one."""
    words = set(device.replace("-", " ").split())
    return next((most for name, most in PEAKS.items() if words.issuperset(name.split())), None)


def model_flops(shape: Shape, tokens: int, squares: int, *, frozen: bool = False) -> int:
    """FLOPs to train `tokens` tokens in sequences whose squared lengths add up to `squares`;
    `frozen`: only an adapter trains.
    """
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.met * shape.hidden * shape.inner
    met = shape.layers * layer + shape.vocab * shape.hidden
    pairs = 12 * shape.layers * shape.heads * squares
    return (4 if frozen else 6) * met * tokens + pairs
