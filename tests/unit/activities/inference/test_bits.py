"""Fingerprints, what is read of a model's layers and shards, and how it compares."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratchet.activities.contracts.weights import Bits
from ratchet.activities.inference import bits, fingerprints, held
from ratchet.activities.inference.fingerprints import Fingerprints, as_rows, fingerprint
from ratchet.configs.versions import NewerSchema

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, HEAD, VOCAB, INNER = 16, 4, 10, 24


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_in_any_order(dtype: torch.dtype) -> None:
    whole = _random(11, 40).to(dtype)
    parts = [(0, 5, 16, 40), (5, 11, 0, 40), (0, 5, 0, 16)]
    total = sum(fingerprint(whole[r:e, c:f], r, c) for r, e, c, f in parts)
    assert total % 2**64 == fingerprint(whole)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _random(11, 40)
    expected = fingerprint(whole)
    monkeypatch.setattr(fingerprints, "BLOCK", 80)
    assert fingerprint(whole) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(11, 40), (11, 38), (1, 8), (8, 4), (5, 1)])
def test_the_layout_in_memory_does_not_show(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    whole = _random(*shape).to(dtype)
    by_columns = whole.t().contiguous().t()
    assert fingerprint(by_columns, 3, 8) == fingerprint(whole, 3, 8)


def test_a_multiplication_reads_as_much_as_takes_some_milliseconds() -> None:
    assert held.columns_at_once(576, 3072) == 256
    assert held.columns_at_once(576, 49152) == held.columns_at_once(8192, 152_000) == 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_shows(dtype: torch.dtype) -> None:
    whole = _random(6, 9).to(dtype)
    seen = {fingerprint(whole)}
    bits_of = torch.int32 if dtype == torch.float32 else torch.int16
    for place in range(whole.numel()):
        for bit in (0, 3, 6):
            other = whole.clone()
            other.view(bits_of).view(-1)[place] ^= 1 << bit
            seen.add(fingerprint(other))
    assert len(seen) == 1 + whole.numel() * 3


def test_order_and_sign_show_and_padding_and_tiny_numbers_do_not() -> None:
    whole = _random(6, 9)
    swapped = whole[[1, 0, 2, 3, 4, 5]]
    assert len({fingerprint(t) for t in (whole, swapped, -whole, whole.flip(1))}) == 4
    padded = torch.zeros(8, 12)
    padded[:6, :9] = whole
    assert fingerprint(padded) == fingerprint(whole)
    zeros = torch.tensor([[0.0, -0.0, 1e-40, -1e-44]])
    assert fingerprint(zeros) == 0 and fingerprint(torch.tensor([[0.0, 2e-38]])) != 0
    assert fingerprint(torch.tensor([[math.nan]])) != 0


def test_a_part_may_not_begin_inside_a_word() -> None:
    with pytest.raises(ValueError, match="not a multiple of 4"):
        fingerprint(torch.zeros(2, 8, dtype=torch.bfloat16), 0, 2)


def test_they_are_kept_beside_the_weights(tmp_path: Path) -> None:
    assert fingerprints.read(tmp_path) is None
    taken = fingerprints.take([("a", _random(3, 5)), ("b", torch.arange(4))], ["float32"])
    fingerprints.write(tmp_path, taken)
    assert fingerprints.read(tmp_path) == taken
    assert taken.shapes == {"a": [3, 5], "b": [4]}
    (tmp_path / "fingerprints.json").write_text('{"schema": 2}')
    with pytest.raises(NewerSchema):
        fingerprints.read(tmp_path)


class UnquantizedLinearMethod:
    """As in vLLM: a layer's kernel."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = layer.cpu_linear(x, layer.weight, bias)
        return result


class Fp8LinearMethod:
    """A method that keeps something else."""


class Linear(nn.Module):
    """What a rank of a linear layer of vLLM knows of itself; `shards` is the kind of sharding."""

    def __init__(self, weight: Tensor, sizes: list[int], shards: str, rank: int, ranks: int):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.output_partition_sizes, self.tp_rank, self.tp_size = sizes, rank, ranks
        self.input_size_per_partition = weight.shape[1]
        self.quant_method: object = UnquantizedLinearMethod()
        if shards == "rows":
            self.gather_output = False
        if shards == "columns":
            self.input_is_parallel = True

    def pack(self, *, rounds: bool = False) -> None:
        """Keeps the weights for the kernel alone; one that `rounds` computes in bfloat16."""
        packed = self.weight.data
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if rounds:
                return (x.bfloat16() @ packed.bfloat16().T).float()
            return x @ packed.T

        self.cpu_linear = kernel


class Mapper:
    """`hf_to_vllm_mapper` of a model whose layers lie one level deeper."""

    def map_name(self, name: str) -> str | None:
        return None if name == "left_out" else name.replace("model.", "inner.", 1)


EXPORTED = {
    "model.embed.weight": _random(VOCAB, HIDDEN, seed=1),
    "model.attn.q_proj.weight": _random(4 * HEAD, HIDDEN, seed=2),
    "model.attn.k_proj.weight": _random(2 * HEAD, HIDDEN, seed=3),
    "model.attn.v_proj.weight": _random(2 * HEAD, HIDDEN, seed=4),
    "model.mlp.gate_proj.weight": _random(INNER, HIDDEN, seed=5),
    "model.mlp.up_proj.weight": _random(INNER, HIDDEN, seed=6),
    "model.mlp.down_proj.weight": _random(HIDDEN, 2 * HIDDEN, seed=7),
    "model.norm.weight": _random(HIDDEN, seed=8),
}
SHAPES = {name: list(tensor.shape) for name, tensor in EXPORTED.items()}


def _rank(rank: int, ranks: int, copies: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What a rank holds of EXPORTED, loaded without a fault."""
    exported = {name.split(".", 1)[1]: tensor.to(dtype) for name, tensor in EXPORTED.items()}

    def rows(name: str, times: int = 1) -> Tensor:
        tensor = exported[f"{name}.weight"]
        return tensor.chunk(ranks // times)[rank // times]

    model = nn.Module()
    model.hf_to_vllm_mapper = Mapper()  # type: ignore[assignment]
    model.packed_modules_mapping = {  # type: ignore[assignment]
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.inner = inner = nn.Module()
    inner.embed, inner.attn, inner.mlp, inner.norm = (nn.Module() for _ in range(4))
    qkv = [rows("attn.q_proj"), rows("attn.k_proj", copies), rows("attn.v_proj", copies)]
    inner.attn.qkv_proj = Linear(torch.cat(qkv), [len(t) for t in qkv], "rows", rank, ranks)
    inner.attn.qkv_proj.num_kv_head_replicas = copies  # type: ignore[assignment]
    gate_up = [rows("mlp.gate_proj"), rows("mlp.up_proj")]
    sizes = [len(tensor) for tensor in gate_up]
    inner.mlp.gate_up_proj = Linear(torch.cat(gate_up), sizes, "rows", rank, ranks)
    down = exported["mlp.down_proj.weight"].chunk(ranks, 1)[rank].contiguous()
    inner.mlp.down_proj = Linear(down, [HIDDEN], "columns", rank, ranks)
    inner.norm.weight = nn.Parameter(exported["norm.weight"].clone(), requires_grad=False)
    per_rank = -(-VOCAB // ranks)
    mine = exported["embed.weight"][rank * per_rank : (rank + 1) * per_rank]
    padded = torch.full((per_rank + 6, HIDDEN), 7.0, dtype=dtype)
    padded[: len(mine)] = mine
    inner.embed.weight = nn.Parameter(padded, requires_grad=False)
    inner.embed.org_vocab_size = VOCAB  # type: ignore[assignment]
    inner.embed.shard_indices = SimpleNamespace(  # type: ignore[assignment]
        num_org_elements=len(mine), org_vocab_start_index=rank * per_rank
    )
    return model


class Engine:
    """An engine of as many ranks as there are models, behind the RPC."""

    model = "m"

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype = torch.float32) -> None:
        self.calls: list[list[int]] = []
        self.workers = []
        for rank, model in enumerate(models):
            worker = held.Held()
            worker.rank = rank
            worker.model_runner = SimpleNamespace(
                model_config=SimpleNamespace(dtype=dtype), get_model=partial(lambda m: m, model)
            )
            self.workers.append(worker)

    async def post(self, path: str, **body: Any) -> Any:
        call = body["json"]
        assert (path, call["method"]) == ("/collective_rpc", "held_fingerprints")
        self.calls.append(call["kwargs"]["starts"])
        return {"results": [worker.held_fingerprints(**call["kwargs"]) for worker in self.workers]}


async def _judge(
    models: Sequence[nn.Module],
    dtype: torch.dtype = torch.float32,
    exported: Mapping[str, Tensor] = EXPORTED,
) -> Bits:
    name = str(dtype).removeprefix("torch.")
    expected = fingerprints.take(exported.items(), [name])
    return bits.compare(expected, await bits.held(Engine(models, dtype), expected.shapes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2)])
async def test_shards_and_fused_layers_make_up_what_was_exported(
    ranks: int, copies: int, dtype: torch.dtype
) -> None:
    models = [_rank(rank, ranks, copies, dtype) for rank in range(ranks)]
    assert await _judge(models, dtype) == Bits(len(EXPORTED))


@pytest.mark.parametrize("name", EXPORTED)
async def test_one_wrong_tensor_is_named(name: str) -> None:
    other = {**EXPORTED, name: EXPORTED[name].clone()}
    other[name].view(-1)[-1] += 1e-6
    verdict = await _judge([_rank(0, 1)], exported=other)
    (wrong,) = verdict.wrong
    assert wrong.startswith(f"{name} (rank 0): expected ")
    assert verdict.compared == len(EXPORTED) and verdict.unread == {}


def test_what_replaces_a_tensor_between_two_calls_is_read() -> None:
    model = _rank(0, 1)
    (worker,) = Engine([model]).workers
    expected = fingerprints.take(EXPORTED.items(), ["float32"])
    begun = worker.held_fingerprints(SHAPES, [0], 0.0)
    assert begun["next"] == 1
    found = bits.Held()
    found.add(0, begun)
    norm = EXPORTED["model.norm.weight"] + 1
    model.inner.norm.weight = nn.Parameter(norm, requires_grad=False)  # type: ignore[union-attr]
    found.add(0, worker.held_fingerprints(SHAPES, [1], 60.0))
    (wrong,) = bits.compare(expected, found).wrong
    assert wrong.startswith("model.norm.weight")


async def test_a_rank_that_differs_from_its_copy_is_named() -> None:
    models = [_rank(rank, 4, 2) for rank in range(4)]
    models[3].inner.attn.qkv_proj.weight.data[-1, 0] += 1e-3  # type: ignore[union-attr, operator]
    models[1].inner.norm.weight.data[0] += 1e-3  # type: ignore[union-attr, operator]
    wrong = (await _judge(models)).wrong
    assert wrong[0].startswith("model.attn.v_proj.weight, rows 4-8, columns 0-16: ranks differ")
    assert "model.norm.weight" in wrong[1] and "[1] hold" in wrong[1]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_packed_layers_are_read_through_their_kernel(dtype: torch.dtype) -> None:
    model = _rank(0, 1, 1, dtype)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    layers[0].weight.data[-1, 0] = -0.0
    exported = {
        **EXPORTED,
        "model.attn.v_proj.weight": EXPORTED["model.attn.v_proj.weight"].clone(),
    }
    exported["model.attn.v_proj.weight"][-1, 0] = -0.0
    for layer in layers:
        layer.pack()
    assert await _judge([model], dtype, exported) == Bits(len(EXPORTED))
    assert (await _judge([model], dtype)).wrong[0].startswith("model.attn.v_proj.weight (rank 0)")


async def test_a_kernel_that_rounds_cannot_be_read() -> None:
    model = _rank(0, 1)
    model.inner.mlp.down_proj.pack(rounds=True)  # type: ignore[union-attr, operator]
    verdict = await _judge([model])
    assert verdict.unread == {
        "model.mlp.down_proj.weight": "its kernel computes in less than float32"
    }
    assert (verdict.compared, verdict.wrong) == (len(EXPORTED) - 1, [])


async def test_what_cannot_be_compared_is_named_with_its_reason() -> None:
    model = _rank(0, 1)
    model.inner.mlp.gate_up_proj.quant_method = Fp8LinearMethod()  # type: ignore[union-attr, assignment]
    model.inner.norm.weight = nn.Parameter(torch.zeros(3))  # type: ignore[union-attr, assignment]
    missing = {"left_out": torch.ones(2), "model.nowhere.weight": torch.ones(2)}
    verdict = await _judge([model], exported={**EXPORTED, **missing})
    assert verdict.wrong == []
    assert verdict.unread == {
        "model.mlp.gate_proj.weight": "the engine holds it in the format of Fp8LinearMethod",
        "model.mlp.up_proj.weight": "the engine holds it in the format of Fp8LinearMethod",
        "model.norm.weight": "the engine holds it as [3], but [16] was exported",
        "left_out": "the engine does not load it",
        "model.nowhere.weight": "this rank has no inner.nowhere",
    }


async def test_an_engine_in_another_dtype_is_not_compared() -> None:
    expected = fingerprints.take(EXPORTED.items(), ["float32"])
    engine = Engine([_rank(0, 1, 1, torch.bfloat16)], torch.bfloat16)
    verdict = bits.compare(expected, await bits.held(engine, SHAPES))
    assert set(verdict.unread.values()) == {
        "the engine holds bfloat16, but fingerprints are of float32"
    }


async def test_calls_are_short_and_go_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bits, "SLICE_S", 0.0)
    engine = Engine([_rank(rank, 2) for rank in range(2)])
    result = await bits.held(engine, SHAPES)
    assert engine.calls[:3] == [[], [1, 1], [2, 2]] and len(engine.calls) == len(EXPORTED)
    expected: Fingerprints = fingerprints.take(EXPORTED.items(), ["float32"])
    assert bits.compare(expected, result) == Bits(len(EXPORTED))


def test_a_tensor_that_ranks_hold_some_of_is_not_compared() -> None:
    expected = fingerprints.take([("a", EXPORTED["model.embed.weight"])], ["float32"])
    half = fingerprint(as_rows(EXPORTED["model.embed.weight"])[:5])
    answer = {"dtype": "float32", "unread": {}}
    for count, why in [(80, "holds 80 of its 160"), (64, "read only some of it")]:
        engine = bits.Held()
        engine.add(0, {**answer, "rows": [("a", [0, 5, 0, 16], count, f"{half:x}")]})
        verdict = bits.compare(expected, engine)
        assert why in verdict.unread["a"] and verdict.wrong == []


class Adapted(nn.Module):
    """As vLLM wraps a layer that adapters may change: `slots` of A and B for each fused part."""

    def __init__(self, base: Linear, slots: int = 3, most: int = 8) -> None:
        super().__init__()
        self.base_layer, self.tp_size = base, base.tp_size
        inputs, sizes = base.weight.shape[1], base.output_partition_sizes
        self.lora_a_stacked = tuple(torch.zeros(slots, 1, most, inputs) for _ in sizes)
        self.lora_b_stacked = tuple(torch.zeros(slots, 1, size, most) for size in sizes)

    def set(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Puts an adapter's factors into a slot."""
        self.lora_a_stacked[part][slot, 0, : a.shape[0]] = a
        self.lora_b_stacked[part][slot, 0, :, : b.shape[1]] = b


RANK = 3
FACTORS = {
    f"base_model.model.model.attn.{kind}.lora_{factor}.weight": tensor
    for n, (kind, out) in enumerate([("q_proj", 4 * HEAD), ("v_proj", 2 * HEAD)])
    for factor, tensor in (
        ("A", _random(RANK, HIDDEN, seed=20 + n)),
        ("B", _random(out, RANK, seed=30 + n)),
    )
}


def _with_adapters(ids: list[int | None], slot: int) -> nn.Module:
    """A model of which FACTORS are in a slot; `ids` are the adapters by slot."""
    model: Any = _rank(0, 1)
    layer = model.inner.attn.qkv_proj = Adapted(model.inner.attn.qkv_proj)
    for part, kind in ((0, "q_proj"), (2, "v_proj")):
        name = f"base_model.model.model.attn.{kind}.lora_"
        layer.set(slot, part, FACTORS[f"{name}A.weight"], FACTORS[f"{name}B.weight"])
    adapters = dict.fromkeys(one for one in ids if one is not None)
    model.lora_manager = SimpleNamespace(lora_index_to_id=ids, list_adapters=lambda: adapters)
    return model  # type: ignore[no-any-return]


async def test_base_and_newest_adapter_are_compared() -> None:
    model = _with_adapters([7, 9, None], slot=1)
    exported = {**EXPORTED, **FACTORS}
    assert await _judge([model], exported=exported) == Bits(len(exported))


@pytest.mark.parametrize("name", FACTORS)
async def test_one_wrong_factor_is_named(name: str) -> None:
    other = {**EXPORTED, **FACTORS, name: FACTORS[name].clone()}
    other[name].view(-1)[-1] += 1e-6
    (wrong,) = (await _judge([_with_adapters([9], slot=0)], exported=other)).wrong
    assert wrong.startswith(f"{name} (rank 0): expected ")


async def test_the_adapter_before_is_not_taken_for_the_newest() -> None:
    model = _with_adapters([7, 9], slot=0)
    wrong = (await _judge([model], exported={**EXPORTED, **FACTORS})).wrong
    assert len(wrong) == len(FACTORS)


async def test_an_adapter_that_cannot_be_read_is_named_with_its_reason() -> None:
    exported = {**EXPORTED, **FACTORS}
    (name, *_) = FACTORS
    gone: Any = _with_adapters([7, None], slot=0)
    gone.lora_manager.list_adapters = lambda: {7: None, 9: None}
    verdict = await _judge([gone], exported=exported)
    assert verdict.unread[name] == "the adapter is in none of the engine's slots"
    parted: Any = _with_adapters([9], slot=0)
    parted.inner.attn.qkv_proj.tp_size = 2
    shared = await _judge([parted], exported=FACTORS)
    assert shared.unread[name] == "ranks of the engine hold it in parts"
    plain: Any = _rank(0, 1)
    without = await _judge([plain], exported=exported)
    assert without.unread[name] == "a Linear of the engine takes no adapter"
    assert (verdict.wrong, without.wrong, without.compared) == ([], [], len(EXPORTED))
