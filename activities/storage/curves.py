"""Step records packed as columns, a hundred steps per chunk, so that a long run loads at once.

Invariants: the single records are authoritative and a chunk repeats them, so that a missing or
damaged chunk costs only time. A chunk holds steps of one attempt only, and is not written unless it
has all hundred of them.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact, StoreUnavailable

CHUNK_STEPS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Records of steps in ascending order, as columns: `times` in Unix seconds, and each metric's
    values, None where a record has no number.
    """

    steps: list[int]
    times: list[float]
    metrics: dict[str, list[float | None]]


def bounds(step: int) -> tuple[int, int]:
    """First and last step of the chunk that `step` belongs to. Steps count from 1."""
    last = -(-step // CHUNK_STEPS) * CHUNK_STEPS
    return last - CHUNK_STEPS + 1, last


def time_of(record: dict[str, Any]) -> float:
    """When a step was recorded (Unix seconds); 0.0 if its record does not say."""
    return float(record.get("time") or 0.0)


def packed(records: list[dict[str, Any]]) -> Chunk:
    """Step records, ascending, as columns."""
    metrics: dict[str, list[float | None]] = {}
    for row, record in enumerate(records):
        for name, value in (record.get("metrics") or {}).items():
            column = metrics.setdefault(name, [None] * len(records))
            column[row] = float(value) if isinstance(value, int | float) else None
    return Chunk([int(r["step"]) for r in records], [time_of(r) for r in records], metrics)


def pack(store: ArtifactStore, run: str, step: int, *, attempt: str = "") -> None:
    """Commits the chunk that `step` belongs to, if all records of it are there and sound.

    Call it after the record of `step` was committed, in whatever order steps come: the one that
    completes the hundred writes the chunk. Blocks; raises StoreUnavailable.
    """
    first, last = bounds(step)
    if step != last and store.committed(keys.step_record(run, last)) is None:
        return
    records = []
    try:
        for number in range(first, last + 1):
            ref = store.committed(keys.step_record(run, number))
            if ref is None:
                return
            records.append(store.get_json(ref))
    except CorruptArtifact as damage:
        logger.warning("steps %d to %d of %s are not packed: %s", first, last, run, damage)
        return
    chunk = packed(records)
    value = {"steps": chunk.steps, "times": chunk.times, "metrics": chunk.metrics}
    data = json.dumps(value, separators=(",", ":")).encode()
    store.put(keys.step_chunk(run, last), data, attempt=attempt)


def read(store: ArtifactStore, run: str, last: int) -> Chunk | None:
    """The chunk that ends with step `last`; None if there is no readable one. Blocks."""
    try:
        ref = store.committed(keys.step_chunk(run, last))
        data = store.get(ref) if ref is not None else None
    except (CorruptArtifact, StoreUnavailable) as damage:
        logger.warning("single records are read instead of a chunk: %s", damage)
        return None
    if data is None:
        return None
    # A chunk has about 30,000 numbers; the standard library takes seven times as long for them.
    chunk = Chunk(**from_json(data))
    assert chunk.steps == list(range(bounds(last)[0], last + 1)), f"{run}: chunk of other steps"
    return chunk
