"""Per-token lists as Arrow columns: their types, and how they become lists again.

Invariant: a list comes back as it was, to the type and the bits of each item. Nothing here needs
numpy, which processes that only read the store may lack.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""Per-token lists that may be absent."""
PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "versions", *STREAMS)
"""The per-token lists of a sample."""
_ITEMS = {"token_ids": "int32", "loss_mask": "bool", "versions": "int32"}
_FORMATS = {"int32": "i", "float": "f", "double": "d"}
"""Of memory, by Arrow's type."""


def list_type(name: str) -> pa.DataType:
    """The type of the column of a per-token list."""
    import pyarrow as pa

    return pa.list_(pa.type_for_alias(_ITEMS.get(name, "float64")))


def column(name: str, lists: Sequence[Sequence[Any] | None]) -> pa.ListArray:
    """The column of a per-token list of several samples; each is a list, or a view of `plain`."""
    import pyarrow as pa

    kind = _ITEMS.get(name, "float64")
    there: list[Any] = [values or [] for values in lists]
    ends = array("i", accumulate(map(len, there), initial=0))
    if kind == "bool":
        masks = pa.py_buffer(b"".join(map(bytes, there)))
        items = pa.Array.from_buffers(pa.uint8(), ends[-1], [None, masks]).cast(pa.bool_())
    else:
        joined = array("i" if kind == "int32" else "d")
        for values in there:
            if isinstance(values, memoryview):
                assert values.format == joined.typecode, "a view is of another column"
                joined.frombytes(values.cast("B"))
            else:
                joined.fromlist(values)
        of = pa.type_for_alias(kind)
        items = pa.Array.from_buffers(of, ends[-1], [None, pa.py_buffer(joined)])
    offsets = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
    absent = [values is None for values in lists]
    mask = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(offsets, items, mask=mask)


def plain(column: pa.ChunkedArray | pa.Array, *, views: bool = False) -> list[Any]:
    """The values of a column, None where they are absent. Items of lists are never absent.

    Lists are cut out of all their items, since pyarrow makes an object of its own of each item that
    is read through it. With `views`, each list is a memoryview, and an item becomes an object only
    when it is read; a batch hands most items on without a look.
    """
    import pyarrow as pa

    found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_list(found.type):
        values: list[Any] = found.to_pylist()
        return values
    items = _items(found.values) if views else _items(found.values).tolist()
    ends = _items(found.offsets).tolist()
    if not found.null_count:
        return [items[start:stop] for start, stop in pairwise(ends)]
    spans = zip(ends, ends[1:], found.is_valid().to_pylist(), strict=False)
    return [items[start:stop] if there else None for start, stop, there in spans]


def _items(values: pa.Array) -> memoryview:
    import pyarrow as pa

    assert values.null_count == 0, "a per-token list lacks an item"
    if not len(values):
        return memoryview(b"")
    form: Any = _FORMATS.get(str(values.type))
    if pa.types.is_boolean(values.type):
        # Arrow packs eight into a byte.
        values, form = values.cast(pa.uint8()), "?"
    width = values.type.bit_width // 8
    start, stop = values.offset * width, (values.offset + len(values)) * width
    return memoryview(values.buffers()[1])[start:stop].cast(form)
