"""Layers of float32 that vLLM would pack are read to the bit, and compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from ratchet.activities.contracts.weights import Bits
from ratchet.activities.inference import compat, held
from tests.unit.activities.inference.test_bits import EXPORTED, Linear, _judge, _rank


@pytest.fixture(autouse=True)
def all_layers_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "LARGE", 1)


def packed(weight: Tensor) -> Any:
    return ops.create_onednn_mm(weight.t(), 32)


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """The arguments of each call of a function of vLLM's from now on."""
    calls: list[object] = []
    real: Callable[..., Any] = getattr(torch.ops._C, name)
    monkeypatch.setattr(torch.ops._C, name, lambda *args: (calls.append(args), real(*args))[1])
    return calls


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_computes_what_it_holds(rows: int, biased: bool) -> None:
    drawn = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(*shape, generator=drawn) for shape in ((48, 80), (3, rows, 80)))
    bias = torch.randn(48, generator=drawn) if biased else None
    handler = packed(weight)
    assert isinstance(handler, compat.Readable)
    assert torch.equal(handler.dense(), weight)
    output = ops.onednn_mm(handler, x, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    exact = exact if bias is None else exact + bias.double()
    assert output.shape == (3, rows, 48)
    assert torch.allclose(output.double(), exact, atol=1e-4)


def test_small_layers_and_other_dtypes_stay_with_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = called(monkeypatch, "create_onednn_mm_handler")
    weight = torch.randn(48, 80)
    assert isinstance(packed(weight), compat.Readable) and not own
    monkeypatch.setattr(compat, "LARGE", weight.numel() + 1)
    handler = packed(weight)
    assert not isinstance(handler, compat.Readable) and len(own) == 1
    x = torch.randn(4, 80)
    assert torch.allclose(ops.onednn_mm(handler, x, None), x @ weight.T, atol=1e-4)
    monkeypatch.setattr(compat, "LARGE", 1)
    assert not isinstance(packed(weight.bfloat16()), compat.Readable) and len(own) == 2


async def test_a_packed_model_is_compared_without_a_multiplication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _rank(0, 1)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    for layer in layers:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        assert layer.weight.numel() == 0
    products = called(monkeypatch, "onednn_mm")
    monkeypatch.setattr(compat.Readable, "multiply", lambda *_: pytest.fail("it multiplied"))
    assert await _judge([model]) == Bits(len(EXPORTED)) and not products
    changed = {name: tensor.clone() for name, tensor in EXPORTED.items()}
    changed["model.mlp.up_proj.weight"][-1, -1] += 1e-3
    (wrong,) = (await _judge([model], exported=changed)).wrong
    assert wrong.startswith("model.mlp.up_proj.weight (rank 0)")


def test_what_is_packed_again_between_two_calls_is_read() -> None:
    model = _rank(0, 1)
    layer = next(layer for layer in model.modules() if isinstance(layer, Linear))
    before = layer.weight.data.clone()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    shapes = {name: list(tensor.shape) for name, tensor in EXPORTED.items()}
    steps, _ = held.plan(model, shapes, torch.float32)
    old = _rows(model, shapes)
    layer.weight = torch.nn.Parameter(before + 1, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    rows = [row for step in steps for row in step.run()]
    assert rows == _rows(model, shapes) != old


def _rows(model: torch.nn.Module, shapes: dict[str, list[int]]) -> list[held.Row]:
    steps, _ = held.plan(model, shapes, torch.float32)
    return [row for step in steps for row in step.run()]
