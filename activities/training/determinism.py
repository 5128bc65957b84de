"""Deterministic mode of a process: torch uses only kernels that always give the same bits.

It is switched on once, before anything runs on a GPU, and stays on for the life of the process:
cuBLAS reads its setting when it starts. On a CPU the bits are the same with and without it.

On a GPU (torch 2.13) it needs:

- `use_deterministic_algorithms`: an operation without a deterministic kernel raises RuntimeError.
- A fixed workspace for cuBLAS, which may otherwise sum in another order.
- cuDNN without benchmarks, which choose kernels by their speed.
- Attention by plain matrix products ("math"), which hold the square of a sequence's length in
  memory. In this mode torch's flash and memory-efficient kernels promise a backward pass in fixed
  order as well, but only on CUDA; plain products need no such promise.
"""

from __future__ import annotations

import os

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
_REFUSED = "does not have a deterministic implementation"


def enable() -> None:
    """Puts this process into deterministic mode."""
    # Overrides what the worker inherited: another size may sum in another order.
    os.environ[CUBLAS_VARIABLE] = CUBLAS_WORKSPACE

    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if torch.cuda.is_available():
        # The switches apply to a CPU, too, whose own flash kernel gives other bits than "math".
        torch.backends.cuda.enable_math_sdp(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def enabled() -> bool:
    """Whether this process is in deterministic mode."""
    import torch

    return torch.are_deterministic_algorithms_enabled()


def refusal(error: Exception) -> str | None:
    """The message for the user if torch refused an operation in deterministic mode; None for any
    other `error`.
    """
    operation, result, _ = str(error).partition(_REFUSED)
    if not isinstance(error, RuntimeError) or not result:
        return None
    return (
        f"trainer.deterministic is true, and {operation.strip()!r}, which the model or the loss "
        "uses, has no deterministic implementation in torch; set it to false, or do without the "
        "operation where it is in a loss of yours"
    )
