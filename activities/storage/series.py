"""Series: samples that a process takes over time, kept in chunks that are rewritten as they grow.

A series shows how things went; no decision depends on it. Invariants:

- A source is one process in one role, `<role>-<process>`, so that names alone show whose samples a
  chunk has. Its chunks hold at most CHUNK_SAMPLES samples each, in ascending time, and one begins
  when the previous is full. A chunk is named by its start time, so that the next one's name bounds
  its contents.
- A chunk is replaced as a whole, which every filesystem can do; readers see it before or after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore

CHUNK_SAMPLES = 360
CHUNK_SPAN_S = 4000.0
"""A chunk of samples taken every ten seconds is full by then."""

Sample = dict[str, Any]
"""JSON values by name; 'time' is in Unix seconds."""


@dataclass(frozen=True)
class Chunk:
    """A chunk as it should be stored at one moment."""

    key: str
    samples: Sequence[Sample]

    def write(self, store: ArtifactStore) -> None:
        """Stores it. Blocks; chunks of one source must be written one after the other."""
        store.write_lines(self.key, self.samples)


class Series:
    """The growing end of the series of one source."""

    def __init__(self, run: str, source: str) -> None:
        self._run, self._source = run, source
        self._samples: list[Sample] = []
        self._start = 0

    @property
    def last(self) -> float:
        """When the latest sample was taken (Unix seconds); 0.0 before the first."""
        return self._samples[-1]["time"] if self._samples else 0.0

    def add(self, sample: Sample, *, replace_after: float | None = None) -> Chunk:
        """Adds a sample, later than all before; returns the chunk that must then be written.

        It replaces the previous sample if that was taken after `replace_after` (Unix seconds).
        """
        assert sample["time"] > self.last, "samples come in ascending time"
        if replace_after is not None and self.last > replace_after:
            self._samples[-1] = sample
        elif not self._samples or len(self._samples) >= CHUNK_SAMPLES:
            self._start = int(sample["time"] * 1000)
            self._samples = [sample]
        else:
            self._samples.append(sample)
        return Chunk(keys.series(self._run, self._source, self._start), tuple(self._samples))


def role_of(source: str) -> str:
    """The role of the worker that is the source."""
    return source.partition("-")[0]


def _name(key: str) -> tuple[int, str]:
    """When a chunk was begun (Unix time, ms), and its source."""
    start, _, source = key.rpartition("/")[2].removesuffix(".jsonl").partition("-")
    return int(start), source


def _chunks_after(keys_found: Sequence[str], after: float) -> list[tuple[int, str, str]]:
    """Begin, source and key of the chunks that may hold samples later than `after`, ascending."""
    next_start: dict[str, int] = {}
    chunks = []
    for key in reversed(keys_found):
        start, source = _name(key)
        # A chunk is older than the millisecond after the one that names the next chunk.
        if source not in next_start or next_start[source] + 1 > after * 1000:
            chunks.append((start, source, key))
        next_start[source] = start
    return chunks[::-1]


def page(
    store: ArtifactStore, run: str, after: float, limit: int, role: str | None = None
) -> tuple[list[Sample], bool]:
    """Samples of all sources, or of those in `role`, taken later than `after` (Unix seconds),
    ascending, each with its 'source'; and whether more follow.

    At most `limit` of them, plus all others taken at the same time as the last one, so that this
    time is the cursor of the next page.
    """
    samples: list[Sample] = []
    more = False
    chunks = [
        key
        for key in store.live_keys(keys.series_folder(run), ".jsonl")
        if role is None or role_of(_name(key)[1]) == role
    ]
    for start, source, key in _chunks_after(chunks, after):
        if len(samples) > limit and start > samples[limit]["time"] * 1000:
            more = True
            break
        own = [{**sample, "source": source} for sample in store.read_lines(key)]
        samples += [sample for sample in own if sample["time"] > after]
        samples.sort(key=lambda sample: (sample["time"], sample["source"]))
    end = min(limit, len(samples))
    while 0 < end < len(samples) and samples[end]["time"] == samples[end - 1]["time"]:
        end += 1
    return samples[:end], more or len(samples) > end


def last_heard(store: ArtifactStore, run: str, now: float) -> dict[str, float]:
    """When the newest sample of each role was taken (Unix seconds)."""
    result: dict[str, float] = {}
    for key in reversed(store.live_keys(keys.series_folder(run), ".jsonl")):
        start, source = _name(key)
        role = role_of(source)
        # A chunk that still grows began lately; of older ones the newest suffices.
        wanted = role not in result or start > (now - CHUNK_SPAN_S) * 1000
        if wanted and (samples := store.read_lines(key)):
            result[role] = max(result.get(role, 0.0), samples[-1]["time"])
    return result
