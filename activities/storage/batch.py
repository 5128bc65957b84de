"""The batch file: what the trainer saw, one Parquet row per training sample.

Every per-token list of a row has the length of `token_ids`. Positions that were not sampled by
the policy have loss_mask False, logprob 0.0, advantage 0.0 and version -1. `docs/data.md` describes
the columns, and how to read a file in one line with pyarrow or duckdb.

Some lists may be absent (null). Without rl_weights, the weight is 1 on the loss mask; without
ce_weights or ref_kl_weights, no token belongs to that component of the loss. Advantages may be
absent only if no token belongs to rl, and ref_logprobs only if none belongs to ref_kl. Schema 1
has none of these except advantages, which it always has.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ratchet.activities.storage.columns import PER_TOKEN, STREAMS, column, list_type, plain

SCHEMA_VERSION = 2
READABLE = ("1", "2")
_SCHEMA_KEY = b"ratchet.batch.schema"


@dataclass(frozen=True)
class Sample:
    """One training sequence of T tokens.

    token_ids [T]; loss_mask [T]: sampled by the policy; logprobs [T]: the engine's, in nats;
    advantages [T]; versions [T]: policy version that sampled the token, or -1. rl_weights,
    ce_weights and ref_kl_weights [T]: weights in the components of the loss, where 0 means that a
    token is not a member; ref_logprobs [T]: the reference model's, in nats. Raises ValueError if
    members lack what their component needs.
    """

    group: str
    rollout: int
    env: str
    reward: float
    temperature: float
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    advantages: Sequence[float] | None
    versions: Sequence[int]
    rl_weights: Sequence[float] | None = None
    ce_weights: Sequence[float] | None = None
    ref_kl_weights: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "versions", *STREAMS):
            values = getattr(self, name)
            aligned = len(values) == length if values is not None else name in STREAMS
            assert aligned, f"{name} is not aligned with token_ids"
        where = f"sample {self.group}/{self.rollout}"
        if self.advantages is None and self.trains_rl:
            raise ValueError(f"{where} has tokens for the rl loss, but no advantages")
        if self.ref_logprobs is None and any(self.ref_kl_weights or ()):
            raise ValueError(f"{where} has tokens for the ref_kl loss, but no ref_logprobs")

    @property
    def trains_rl(self) -> bool:
        """Whether a token belongs to the rl component of the loss."""
        if self.rl_weights is None:
            return any(self.loss_mask)
        return any(
            on and weight for on, weight in zip(self.loss_mask, self.rl_weights, strict=True)
        )


def _schema() -> Any:
    import pyarrow as pa

    own = {
        "group": pa.string(),
        "rollout": pa.int32(),
        "env": pa.string(),
        "reward": pa.float64(),
        "temperature": pa.float64(),
    }
    types = {
        field.name: list_type(field.name) if field.name in PER_TOKEN else own[field.name]
        for field in fields(Sample)
    }
    return pa.schema(types.items(), metadata={_SCHEMA_KEY: str(SCHEMA_VERSION)})


def encode_batch(samples: list[Sample]) -> bytes:
    """Parquet bytes of a batch; the same samples always give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    columns = []
    for field in schema:
        values = [getattr(sample, field.name) for sample in samples]
        per_token = field.name in PER_TOKEN
        columns.append(column(field.name, values) if per_token else pa.array(values, field.type))
    table = pa.Table.from_arrays(columns, schema=schema)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_batch(data: bytes) -> list[Sample]:
    """Samples of a batch file; raises ValueError for an incomplete Parquet file, or for an unknown
    schema.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    version = (table.schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode()
    if version not in READABLE:
        raise ValueError(
            f"batch schema {version} is unknown (this build reads {', '.join(READABLE)}): another "
            "version of Ratchet wrote the batch; train on it with that version"
        )
    columns = [plain(one) for one in table.columns]
    rows = zip(*columns, strict=True)
    return [Sample(**dict(zip(table.column_names, row, strict=True))) for row in rows]
