"""The batch file: what the trainer saw, one Parquet row per training sample.

Every per-token list of a row has the length of `token_ids`. Positions that were not sampled by
the policy have loss_mask False, logprob 0.0, advantage 0.0 and version -1. Readable in one line:
`pyarrow.parquet.read_table(path)` or duckdb's `select * from 'step-00000001.parquet@…'`.
"""

import io
from dataclasses import asdict, dataclass, fields
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """One training sequence of T tokens.

    token_ids [T]; loss_mask [T]: sampled by the policy; logprobs [T]: the engine's, in nats;
    advantages [T]; versions [T]: policy version that sampled the token, or -1.
    """

    group: str
    rollout: int
    env: str
    reward: float
    temperature: float
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    versions: list[int]

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "advantages", "versions"):
            assert len(getattr(self, name)) == length, f"{name} is not aligned with token_ids"


def _schema() -> Any:
    import pyarrow as pa

    types = {
        "group": pa.string(),
        "rollout": pa.int32(),
        "env": pa.string(),
        "reward": pa.float64(),
        "temperature": pa.float64(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float64()),
        "advantages": pa.list_(pa.float64()),
        "versions": pa.list_(pa.int32()),
    }
    assert list(types) == [field.name for field in fields(Sample)]
    return pa.schema(types.items(), metadata={"ratchet.batch.schema": str(SCHEMA_VERSION)})


def encode_batch(samples: list[Sample]) -> bytes:
    """Parquet bytes of a batch; the same samples always give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([asdict(sample) for sample in samples], schema=_schema())
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_batch(data: bytes) -> list[Sample]:
    """Samples of a batch file; raises ValueError for a schema this code does not know."""
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    version = (table.schema.metadata or {}).get(b"ratchet.batch.schema", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"batch schema {version} is not the one read here ({SCHEMA_VERSION})")
    return [Sample(**row) for row in table.to_pylist()]
