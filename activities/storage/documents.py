"""Rollouts and groups as files: a JSON document whose tokens lie beside it, in Arrow columns.

A file is an Arrow stream. Its rows are the samples of the document in the order in which it has
them, and its columns their per-token lists; the document without those lists is JSON in the
metadata of its schema. `docs/data.md` says how to read one.

Invariants: lists come back to the bit; a list that no sample of a document has is no column. The
keys of documents are those of ever, so that attempts of older and newer builds meet at the same
marker; the schema of a reference says how its content is written. Up to 1 it is JSON as a whole.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage.columns import PER_TOKEN, column, list_type, plain
from ratchet.activities.storage.store import ArtifactStore, require_schema

SCHEMA = 2
"""Of files."""
FIELDS = 1
"""Of the documents in them, by their own field 'schema'."""
_DOCUMENT, _SCHEMA = b"ratchet.document", b"ratchet.document.schema"
INSIDE = 2**16
"""Bytes of a file that its marker may hold: reading a reference reads them, too."""
_COMPRESSION = "lz4"
"""Most of what masks, versions and advantages say is repetition."""


def _holders(document: Mapping[str, Any]) -> Iterator[Any]:
    """The parts of a document that may have samples: a rollout itself, and those of a group."""
    yield document
    yield from document.get("rollouts", ())


def _without_tokens(holder: Mapping[str, Any]) -> dict[str, Any]:
    if "samples" not in holder:
        return dict(holder)
    rest = [{k: v for k, v in s.items() if k not in PER_TOKEN} for s in holder["samples"]]
    return {**holder, "samples": rest}


def encode(document: Mapping[str, Any]) -> bytes:
    """The file of a rollout's or a group's document."""
    import pyarrow as pa

    samples = [sample for one in _holders(document) for sample in one.get("samples", ())]
    head = _without_tokens(document)
    if "rollouts" in head:
        head["rollouts"] = [_without_tokens(member) for member in head["rollouts"]]
    names = [name for name in PER_TOKEN if any(name in sample for sample in samples)]
    columns = [column(name, [s.get(name) for s in samples]) for name in names]
    about = {_DOCUMENT: json.dumps(head, separators=(",", ":")), _SCHEMA: str(SCHEMA)}
    schema = pa.schema([(name, list_type(name)) for name in names], metadata=about)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=_COMPRESSION, use_threads=False)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        if names:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode(data: bytes, *, views: bool = False) -> dict[str, Any]:
    """The document of a file, with `views` for its per-token lists as `columns.plain` has them;
    raises ValueError for bytes that are none.
    """
    import pyarrow as pa

    # Handing buffers to threads costs more than all else here.
    stream = pa.ipc.open_stream(data, options=pa.ipc.IpcReadOptions(use_threads=False))
    document: dict[str, Any] = json.loads((stream.schema.metadata or {}).get(_DOCUMENT, b"null"))
    if not isinstance(document, dict):
        raise ValueError("an Arrow stream without the document of a rollout or a group")
    samples = [sample for one in _holders(document) for sample in one.get("samples", ())]
    if stream.schema.names:
        (batch,) = stream
        for name, lists in zip(stream.schema.names, batch.columns, strict=True):
            for sample, values in zip(samples, plain(lists, views=views), strict=True):
                sample[name] = values
    return document


def put(
    store: ArtifactStore, key: str, document: Mapping[str, Any], *, attempt: str
) -> ArtifactRef:
    """Commits a document; returns the reference of the first to commit."""
    return commit(store, key, encode(document), attempt=attempt)


def commit(store: ArtifactStore, key: str, data: bytes, *, attempt: str) -> ArtifactRef:
    """What `put` does, with the file of the document."""
    put = store.put_inside if len(data) <= INSIDE else store.put
    return put(key, data, attempt=attempt, schema=SCHEMA)


def read(store: ArtifactStore, ref: ArtifactRef, *, views: bool = False) -> dict[str, Any]:
    """The verified document of a reference, in any schema; raises CorruptArtifact. `views` as in
    `decode`; up to schema 1, lists are lists.
    """
    document: dict[str, Any]
    if ref.schema < SCHEMA:
        document = store.get_json(ref, schema=FIELDS)
    else:
        document = decode(store.get(ref, schema=SCHEMA), views=views)
        require_schema(f"{ref.key} ({ref.path})", document.get("schema"), FIELDS)
    return document
