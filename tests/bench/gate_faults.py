"""A worker extension of vLLM that reads what an engine holds, and does it wrong on command.

Wrong tensors take the values that they have in another folder of weights.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ratchet.activities.inference.compat import Reader
from ratchet.activities.inference.held import held_name, parts_of, through_kernel

Named = Iterable[tuple[str, Any]]


def _stored(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


class Faults(Reader):
    """Adds faults at the two places that lie inside an engine."""

    def fault_in_stream(self, names: list[str], folder: str) -> None:
        """The next time that weights are loaded, `names` have the values of `folder`."""
        model = self.model_runner.get_model()
        load, other = type(model).load_weights, _stored(folder)

        def faulty(weights: Named) -> Any:
            def stream() -> Iterator[tuple[str, Any]]:
                for name, tensor in weights:
                    yield name, other[name] if name in names else tensor

            del model.load_weights
            return load(model, stream())

        model.load_weights = faulty

    def fault_in_held(self, names: list[str], folder: str) -> dict[str, int]:
        """Gives what the engine holds as `names` the values of `folder`, packed or not."""
        import torch

        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        other = _stored(folder)
        packed = 0
        with torch.inference_mode():
            for name in names:
                held, index = held_name(model, name)
                path, _, leaf = held.rpartition(".")
                layer = model.get_submodule(path)
                shape = list(other[name].shape)
                (part,) = parts_of(layer, leaf, name, shape, index)
                rows = slice(part.local, part.local + part.rows)
                if getattr(layer, leaf).numel():
                    getattr(layer, leaf).data[rows] = other[name].to(dtype)
                if getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
                    self._pack_again(layer, rows, other[name].to(dtype), shape[1])
                    packed += 1
        return {"packed": packed}

    def _pack_again(self, layer: Any, rows: slice, tensor: Any, inputs: int) -> None:
        import torch
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        keeps = layer.weight.numel() > 0
        if not keeps:
            whole = through_kernel(layer, inputs, 0, inputs, tensor.dtype).contiguous()
            whole[rows] = tensor
            layer.weight = torch.nn.Parameter(whole, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=not keeps)
