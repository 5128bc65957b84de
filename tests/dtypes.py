"""What this machine computes in quickly."""

from pathlib import Path


def quick_dtypes() -> list[str]:
    """What of a config to override where bfloat16 is emulated, which takes four times as long."""
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        return []
    return ["trainer.compute_dtype=float32", "inference.dtype=float32"]
