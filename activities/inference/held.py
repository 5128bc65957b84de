"""What an engine holds, read inside the engine: `Held` is mixed into vLLM's workers.

`/collective_rpc` calls `held_fingerprints` on every rank, between steps of the engine: a call reads
for some time and returns where the next one continues. Only fingerprints leave the engine. This
module runs in the engine's process and imports as little as possible.

Facts about vLLM 0.32 that this relies on:

- A model's `hf_to_vllm_mapper` maps names of exported tensors to its own, and its
  `packed_modules_mapping` says which of its layers fuse several, and in which order.
- A linear layer knows its shard: its rank, and the sizes of its partitions. A vocabulary is padded
  at the end of every shard.
- A layer that adapters may change is the `base_layer` of another one, which holds the factors of
  adapters in slots: A and B for each layer that it fuses, B times alpha / rank. Their ids rise.
- On a CPU with AVX-512 a linear layer keeps its weights packed, where `cpu_linear` finds them, and
  not otherwise. The output layer keeps both, and computes with the packed ones. Those that
  `compat` packs have a method `dense`.

Invariant: a packed layer is read exactly or not at all. Of one that cannot be converted back, a row
of the identity as input yields a column of the weights, since products with 1 and sums with 0 are
not rounded; one more row shows whether a kernel rounds its input.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ratchet.activities.inference.fingerprints import (
    BLOCK,
    WORD,
    as_rows,
    block_rows,
    fingerprint,
    hexed,
)

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

UNPACKED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
OUTPUT = "ParallelLMHead"
COLUMNS = 64
"""Fewest columns that one multiplication reads."""
WORK = 10**9
"""Floating-point operations of one larger multiplication: some milliseconds."""
ADAPTED = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
"""Names of an adapter's factors: of the layer, and which factor."""
PROBE = 1 + 2**-9 + 2**-23
"""A float32 that kernels of lower precision round, even those that use two bfloat16 for each."""

Row = tuple[str, list[int], int, str]
"""The name of an exported tensor, the range [row, row, column, column] of it that a rank holds, and
the fingerprint of `count` elements of that.
"""


class Unreadable(Exception):
    """Why the bits of a tensor cannot be compared."""


@dataclass(frozen=True)
class Part:
    """The part of an exported tensor that a layer holds: from its row `local` on, `rows` rows and
    `columns` columns, which begin at `row` and `column` of the tensor.
    """

    name: str
    local: int
    rows: int
    row: int
    columns: int
    column: int

    def result(self, count: int, fingerprint: int) -> Row:
        """The Row for this part."""
        span = [self.row, self.row + self.rows, self.column, self.column + self.columns]
        return self.name, span, count, hexed(fingerprint)


@dataclass(frozen=True)
class Step:
    """Some milliseconds of reading. `names` are the tensors that `run` reads parts of."""

    names: list[str]
    run: Callable[[], list[Row]]


class Held:
    """A worker extension of vLLM."""

    model_runner: Any
    rank: int
    _held_plan: tuple[list[Step], dict[str, str]] | None = None
    """The plan of a reading in progress, which began at place 0."""

    def held_fingerprints(
        self, tensors: dict[str, list[int]], starts: list[int], seconds: float
    ) -> dict[str, Any]:
        """Continues reading at place `starts[rank]` (0 if it has none) for about `seconds`.

        `tensors` are the shapes of the exported tensors; an adapter's are those of the adapter that
        was loaded last. Returns {dtype, next, rows, unread}: the
        engine's dtype; the next place, None at the end; rows; why tensors are not read, by name.
        """
        import torch

        end = time.monotonic() + seconds
        dtype = self.model_runner.model_config.dtype
        place = starts[self.rank] if self.rank < len(starts) else 0
        rows: list[Row] = []
        with torch.inference_mode():
            if place == 0 or self._held_plan is None:
                self._held_plan = plan(self.model_runner.get_model(), tensors, dtype)
            steps, unread = self._held_plan
            while place < len(steps):
                step = steps[place]
                try:
                    rows += step.run()
                except Unreadable as error:
                    unread |= dict.fromkeys(step.names, str(error))
                place += 1
                if time.monotonic() >= end:
                    break
        if place >= len(steps):
            self._held_plan = None
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "next": place if place < len(steps) else None,
            "rows": rows,
            "unread": unread,
        }


def plan(
    model: nn.Module, tensors: Mapping[str, list[int]], dtype: dtype
) -> tuple[list[Step], dict[str, str]]:
    """How to read all that `model` holds of `tensors`, and why some of it cannot be read."""
    parts: dict[tuple[str, str], list[Part]] = {}
    unread: dict[str, str] = {}
    steps: list[Step] = []
    for name, shape in tensors.items():
        try:
            if (found := ADAPTED.fullmatch(name)) is not None:
                steps.append(_factor_step(model, name, shape, found[1], found[2], dtype))
                continue
            held, index = held_name(model, name)
            path, _, leaf = held.rpartition(".")
            layer = _submodule(model, path)
            own = parts_of(layer, leaf, name, shape, index)
        except Unreadable as error:
            unread[name] = str(error)
        else:
            parts.setdefault((path, leaf), []).extend(own)
    for (path, leaf), held_there in parts.items():
        layer = _submodule(model, path)
        if leaf == "weight" and _is_packed(layer):
            how = _packed_steps if _readable(layer) is None else _dense_steps
            steps += how(layer, held_there, dtype)
        else:
            tensor = partial(_parameter, layer, leaf)
            steps += _steps(tensor, block_rows(tensor()), held_there, dtype)
    return steps, unread


def held_name(model: Any, name: str) -> tuple[str, int | None]:
    """The parameter of `model` that holds the exported tensor `name`, and its index among those
    that the parameter fuses. Raises Unreadable if the model drops such a tensor.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    held = mapper.map_name(name) if mapper is not None else name
    if held is None:
        raise Unreadable("the engine does not load it")
    module, _, leaf = name.rpartition(".")
    kind = module.rpartition(".")[2]
    fused_layers: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for fused, kinds in fused_layers.items():
        if kind in kinds and len(kinds) > 1:
            path = held.rpartition(".")[0].rpartition(".")[0]
            return f"{path}.{fused}.{leaf}" if path else f"{fused}.{leaf}", kinds.index(kind)
    return held, None


def _adapted(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise Unreadable(f"this rank has no {path}") from None


def _submodule(model: nn.Module, path: str) -> nn.Module:
    layer = _adapted(model, path)
    base: nn.Module = getattr(layer, "base_layer", layer)
    return base


def _factor_step(
    model: Any, name: str, shape: list[int], path: str, factor: str, dtype: dtype
) -> Step:
    """How to read A or B of the layer `path` of the adapter that was loaded last."""
    held, index = held_name(model, f"{path}.weight")
    layer: Any = _adapted(model, held.rpartition(".")[0])
    stacked = getattr(layer, f"lora_{factor.lower()}_stacked", None)
    if stacked is None:
        raise Unreadable(f"a {type(layer).__name__} of the engine takes no adapter")
    if layer.tp_size > 1:
        raise Unreadable("ranks of the engine hold it in parts")
    slot = newest_slot(model.lora_manager)
    rows, columns = shape

    def read() -> list[Row]:
        block = _exactly(stacked[index or 0][slot, 0, :rows, :columns], dtype)
        return [(name, [0, rows, 0, columns], block.numel(), hexed(fingerprint(block)))]

    return Step([name], read)


def newest_slot(manager: Any) -> int:
    """The slot of the adapter that was loaded last; raises Unreadable if others have taken all."""
    newest = max(manager.list_adapters(), default=None)
    if newest is None or newest not in manager.lora_index_to_id:
        raise Unreadable("the adapter is in none of the engine's slots")
    slot: int = manager.lora_index_to_id.index(newest)
    return slot


def parts_of(layer: Any, leaf: str, name: str, shape: list[int], index: int | None) -> list[Part]:
    """What `layer` holds of an exported tensor in its parameter `leaf`: one part, or as many as the
    tensor itself fuses. Raises Unreadable if the layer holds it in another way.
    """
    held = getattr(layer, leaf, None)
    if held is None:
        raise Unreadable(f"a {type(layer).__name__} of the engine has no {leaf}")
    method = type(getattr(layer, "quant_method", None)).__name__
    if method not in (*UNPACKED, "NoneType"):
        raise Unreadable(f"the engine holds it in the format of {method}")
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // columns
    if hasattr(layer, "shard_indices"):
        shard = layer.shard_indices
        segments = [(shard.num_org_elements, shard.org_vocab_start_index, layer.org_vocab_size)]
    elif hasattr(layer, "output_partition_sizes"):
        segments = _segments(layer)
    else:
        segments = [(rows, 0, rows)]
    column = 0
    if hasattr(layer, "input_is_parallel") and len(shape) > 1:
        columns = layer.input_size_per_partition
        column = layer.tp_rank * columns
        if column % WORD:
            raise Unreadable(f"this rank holds its columns from {column} on")
    local = base = 0
    parts = []
    for number, (size, row, whole) in enumerate(segments):
        if index in (None, number):
            parts.append(Part(name, local, size, base + row, columns, column))
            base += whole
        local += size
    fits = held.numel() == 0 or (
        as_rows(held).shape[0] >= parts[-1].local + parts[-1].rows
        and as_rows(held).shape[1] == columns
    )
    if base != rows or not fits:
        raise Unreadable(f"the engine holds it as {list(held.shape)}, but {shape} was exported")
    return parts


def _segments(layer: Any) -> list[tuple[int, int, int]]:
    """Rows, first row and rows over all ranks of each tensor whose output a linear layer fuses."""
    sizes = layer.output_partition_sizes
    if not hasattr(layer, "gather_output"):
        return [(size, 0, size) for size in sizes]
    # Heads of keys and values are repeated if there are more ranks than such heads.
    copies = getattr(layer, "num_kv_head_replicas", 1)
    shared = [1, copies, copies] if len(sizes) == 3 else [1] * len(sizes)
    return [
        (size, layer.tp_rank // times * size, size * layer.tp_size // times)
        for size, times in zip(sizes, shared, strict=True)
    ]


def _is_packed(layer: Any) -> bool:
    """Whether a layer computes with weights that are only in the closure of its kernel."""
    kernel = getattr(layer, "cpu_linear", None)
    if getattr(kernel, "__closure__", None) is None:
        return False
    return bool(layer.weight.numel() == 0) or type(layer).__name__ == OUTPUT


def _readable(layer: Any) -> Any:
    """What a layer computes with, if that can be converted back; else None."""
    held = (cell.cell_contents for cell in layer.cpu_linear.__closure__)
    return next((one for one in held if hasattr(one, "dense")), None)


def _dense_steps(layer: Any, parts: list[Part], dtype: dtype) -> list[Step]:
    """How to read a packed layer that can be converted back: once, and then piece by piece."""
    copy: list[Tensor] = []

    def convert() -> list[Row]:
        copy.append(_readable(layer).dense())
        return []

    def drop() -> list[Row]:
        copy.clear()
        return []

    names = [part.name for part in parts]
    step = max(1, BLOCK // parts[0].columns)
    return [Step(names, convert), *_steps(lambda: copy[0], step, parts, dtype), Step(names, drop)]


def _steps(tensor: Callable[[], Tensor], step: int, parts: list[Part], dtype: dtype) -> list[Step]:
    """How to read parts of a tensor [R, C], `step` rows at a time."""

    def reader(part: Part, begin: int, end: int) -> Callable[[], list[Row]]:
        def read() -> list[Row]:
            block = _exactly(tensor()[part.local + begin : part.local + end], dtype)
            print_ = fingerprint(block, part.row + begin, part.column)
            return [part.result(block.numel(), print_)]

        return read

    return [
        Step([part.name], reader(part, begin, min(begin + step, part.rows)))
        for part in parts
        for begin in range(0, part.rows, step)
    ]


def _parameter(layer: Any, leaf: str) -> Tensor:
    """Looked up at each call: plans are made once, and loading may replace the tensor."""
    return as_rows(getattr(layer, leaf))


def _exactly(block: Tensor, dtype: dtype) -> Tensor:
    """The block in the engine's dtype; some parameters have a wider one."""
    if not block.is_floating_point() or block.dtype == dtype:
        return block
    cast = block.to(dtype)
    if not (cast.to(block.dtype) == block).all():
        raise Unreadable(f"the engine holds it in {block.dtype}")
    return cast


def columns_at_once(inputs: int, outputs: int) -> int:
    """Columns that one multiplication with a layer of this size reads; a multiple of COLUMNS."""
    return max(1, WORK // (2 * inputs * outputs * COLUMNS)) * COLUMNS


def _packed_steps(layer: Any, parts: list[Part], dtype: dtype) -> list[Step]:
    inputs = parts[0].columns
    step = columns_at_once(inputs, sum(part.rows for part in parts))

    def reader(begin: int, end: int) -> Callable[[], list[Row]]:
        def read() -> list[Row]:
            block = through_kernel(layer, inputs, begin, end, dtype)
            return [
                part.result(
                    part.rows * (end - begin),
                    fingerprint(
                        block[part.local : part.local + part.rows], part.row, part.column + begin
                    ),
                )
                for part in parts
            ]

        return read

    names = [part.name for part in parts]
    return [
        Step(names, reader(begin, min(begin + step, inputs))) for begin in range(0, inputs, step)
    ]


def through_kernel(layer: Any, inputs: int, begin: int, end: int, dtype: dtype) -> Tensor:
    """Columns `begin` to `end` of a layer's weights, as its kernel sees them.

    Raises Unreadable if the kernel computes float32 with less precision.
    """
    import torch

    count = end - begin
    rows = torch.zeros(count + 1, inputs, dtype=dtype)
    rows[torch.arange(count), torch.arange(begin, end)] = 1
    rows[count, begin] = PROBE
    output = layer.quant_method.apply(layer, rows, None)
    if dtype == torch.float32:
        column, probed = output[0], output[count]
        exact = (column.double() * rows[count, begin].double()).float()
        if bool(column.isfinite().all()) and not torch.equal(exact, probed):
            raise Unreadable("its kernel computes in less than float32")
    columns: Tensor = output[:count].t()
    return columns
