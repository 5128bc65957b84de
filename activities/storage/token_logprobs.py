"""The trainer's log-probabilities of a step: one Parquet row per sample of the step's batch.

Rows lie in the order of the batch. Each list has the length of the sample's `token_ids` and is null
where nothing was scored: at the first token, which nothing predicts, and where the sample was cut
off at `trainer.seq_len`. Scores are of the weights before the step's update, at the temperature
that the sample was drawn at, in nats; they are what `mismatch_kl` compares with the engine's.
`docs/data.md` describes the columns.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ratchet.activities.storage.batch import Sample

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = 1
_SCHEMA_KEY = b"ratchet.token_logprobs.schema"


@dataclass(frozen=True)
class TokenLogprobs:
    """Scores of one sample of T tokens.

    `sample` is its index among those of its rollout; trainer_logprobs [T] in nats, None where
    nothing was scored.
    """

    group: str
    rollout: int
    sample: int
    trainer_logprobs: list[float | None]


def encode_token_logprobs(samples: Sequence[Sample], scores: Sequence[np.ndarray]) -> bytes:
    """Parquet bytes for the samples of a batch.

    `scores[n]` float32 [S] are of the first S tokens of `samples[n]`; the first token's is ignored.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = [len(sample.token_ids) for sample in samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.zeros(offsets[-1], np.float32)
    absent = np.ones(offsets[-1], np.bool_)
    for start, length, score in zip(offsets[:-1], lengths, scores, strict=True):
        assert len(score) <= length, "more scores than tokens"
        scored = slice(start + 1, start + len(score))
        values[scored] = score[1:]
        absent[scored] = False
    counts: dict[tuple[str, int], int] = {}
    places = []
    for sample in samples:
        owner = (sample.group, sample.rollout)
        places.append(counts.get(owner, 0))
        counts[owner] = places[-1] + 1
    columns = {
        "group": pa.array([sample.group for sample in samples], pa.string()),
        "rollout": pa.array([sample.rollout for sample in samples], pa.int32()),
        "sample": pa.array(places, pa.int32()),
        "trainer_logprobs": pa.ListArray.from_arrays(offsets, pa.array(values, mask=absent)),
    }
    assert list(columns) == [field.name for field in fields(TokenLogprobs)]
    table = pa.table(columns, metadata={_SCHEMA_KEY: str(SCHEMA_VERSION)})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_token_logprobs(
    data: bytes, group: str | None = None, rollout: int | None = None
) -> list[TokenLogprobs]:
    """Rows of a file in the order of the batch; of one group or rollout, if specified.

    Raises ValueError for an incomplete Parquet file, or for an unknown schema.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table: Any = pq.read_table(io.BytesIO(data))
    version = (table.schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(
            f"token log-probabilities of schema {version}, and this build reads {SCHEMA_VERSION}: "
            "another version of Ratchet wrote the file; read it with that version"
        )
    for name, wanted in (("group", group), ("rollout", rollout)):
        if wanted is not None:
            table = table.filter(pc.equal(table[name], wanted))
    return [TokenLogprobs(**row) for row in table.to_pylist()]
