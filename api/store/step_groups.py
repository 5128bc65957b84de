"""Which groups were assigned to which step. Everything blocks.

The assignment is recorded when a batch is written, including groups that filters emptied, and
retention keeps it. For batches of older builds only the batch file has it, for as long as it is
kept.

A group that leaves nothing to train on enters no batch. It counts for the step that was being
collected then: the first one, after the version at which the group began, whose batch has a group
that was admitted later.
"""

import io
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from cachetools import LRUCache, TLRUCache, cachedmethod

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import CorruptArtifact
from ratchet.api.store.curves import Span
from ratchet.api.store.records import Records
from ratchet.configs.run import RunConfig

RECORD = re.compile(r"step-([0-9]{8,})-[0-9a-f]{16}\.json")
KEPT = 1024
LISTINGS = 16
LISTING_SHARE = 5
"""A listing that took t seconds is reused for so many t, so that listing takes a bounded share."""


@dataclass(frozen=True)
class _Listing:
    """Keys of an attempt's records by step, and how long it took to list them. A batch that turned
    out to be empty leaves its step to another one.
    """

    keys: dict[int, list[str]]
    took_s: float


def _lasts(_: str, listing: _Listing, now: float) -> float:
    return now + LISTING_SHARE * listing.took_s


def _within(span: Span, step: int) -> bool:
    return span.first < step and (span.last is None or step <= span.last)


Place = tuple[int, int]


def place_of(group: str) -> Place:
    """The place of 'train/<counter>.<again>' in the order in which its examples were drawn."""
    number, _, again = group.rpartition("/")[2].partition(".")
    return int(number), int(again or 0)


class StepGroups:
    """Reads which groups were assigned to the steps of any run."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._store = records.store
        self._kept: LRUCache[str, list[str]] = LRUCache(KEPT)
        self._lock = threading.Lock()
        self._listings = TLRUCache[str, _Listing](LISTINGS, _lasts)
        self._listed = threading.Condition()

    def spans_of(self, run_id: str, step: int) -> list[tuple[Span, list[Span]]]:
        """The spans of a run that a step belongs to, each with those before it, the newest first,
        where groups of its batch may lie: a restored run continues with earlier groups.
        """
        spans = self._records.spans(run_id)
        return [(span, spans[place::-1]) for place, span in enumerate(spans) if _within(span, step)]

    def cut_for(self, attempt: str, step: int) -> list[str] | None:
        """Ids of the groups assigned to a step, in order; None if no record says which."""
        if recorded := self._listing(attempt).keys.get(step):
            named = [group for key in recorded for group in self._records.read(key)["groups"]]
            return list(dict.fromkeys(named))
        key = keys.batch(attempt, step)
        ref = self._store.committed(key)
        try:
            return self.groups_in(ref) if ref is not None else None
        except CorruptArtifact:
            # Retention deletes batches while a run is running.
            if self._store.committed(key) is not None:
                raise
            return None

    @cachedmethod(
        lambda self: self._listings, lambda _, attempt: attempt, condition=lambda self: self._listed
    )
    def _listing(self, attempt: str) -> _Listing:
        began = time.monotonic()
        result: dict[int, list[str]] = {}
        folder = keys.step_groups(attempt, 0, "").rpartition("/")[0]
        for key in self._store.committed_keys(folder):
            if named := RECORD.fullmatch(key.rpartition("/")[2]):
                result.setdefault(int(named[1]), []).append(key)
        return _Listing(result, time.monotonic() - began)

    @cachedmethod(lambda self: self._kept, lambda _, ref: ref.key, lambda self: self._lock)
    def groups_in(self, ref: ArtifactRef) -> list[str]:
        """Ids of the groups of a batch, or of the scores of its tokens."""
        import pyarrow.parquet as pq

        table = pq.read_table(io.BytesIO(self._store.get(ref)), columns=["group"])
        return list(dict.fromkeys(table["group"].to_pylist()))

    def step_of(
        self,
        run_id: str,
        group: str,
        version_start: int,
        *,
        ageless: bool,
        deadline: float = inf,
    ) -> int | None:
        """The step that a train group was assigned to; None if there is none, or no record says
        so, or none that was read before `deadline` (of the monotonic clock).

        `version_start` is the oldest version that sampled it: it trains after that, and, unless it
        is `ageless` as replies of frozen models are, before it is too old.
        """
        spans = self._records.spans(run_id)
        cut = [(span, step) for span in spans for step in sorted(self._listing(span.attempt).keys)]
        later = [(span, step) for span, step in cut if _within(span, step) and step > version_start]
        last = inf if ageless or not later else version_start + 1 + self.oldest(run_id)
        for span, step in later:
            if step > last:
                continue
            if group in (self.cut_for(span.attempt, step) or ()):
                return step
            if time.monotonic() > deadline:
                return None
        return None

    def last_place(self, attempt: str, step: int) -> Place | None:
        """The highest place in a step's batch; None if no record says what it has."""
        return max(map(place_of, self.cut_for(attempt, step) or ()), default=None)

    def collecting(self, run_id: str, span: Span) -> int | None:
        """The step after all that are recorded of an attempt, at most the run's last one; None if
        the run continued without it, or older builds recorded none.
        """
        done = max([0, span.first, *self._listing(span.attempt).keys])
        if self._store.committed(keys.step_record(span.attempt, done + 1)) is not None:
            return None
        config = self._config(run_id)
        step = done if config is not None and config.last_step <= done else done + 1
        return step if _within(span, step) else None

    def collected_with(self, run_id: str, attempt: str, group: str, began_at: int) -> int | None:
        """The step that was being collected when a train group of `attempt` that began at version
        `began_at` left nothing to train on; None if the run was restored from before that.
        """
        spans = {span.attempt: span for span in self._records.spans(run_id)}
        if (span := spans.get(attempt)) is None:
            return None
        after = max(began_at, span.first)
        for step in sorted(step for step in self._listing(attempt).keys if step > after):
            last = self.last_place(attempt, step)
            if last is not None and last > place_of(group):
                return step if _within(span, step) else None
        return self.collecting(run_id, span)

    def collected_at(self, run_id: str, span: Span, step: int) -> Callable[[Place], bool]:
        """Whether a group at a place may have been collected with a step, so that few are read."""
        last, before = (self.last_place(span.attempt, at) for at in (step, step - 1))
        if step == self.collecting(run_id, span):
            last = None
        elif last is None:
            return lambda place: False
        # An example that is rolled out again keeps its counter.
        oldest = self.oldest(run_id)
        early = self.last_place(span.attempt, step - 1 - int(oldest)) if oldest < step else None

        def may(place: Place) -> bool:
            above = early if place[1] else before
            return (above is None or place > above) and (last is None or place < last)

        return may

    def oldest(self, run_id: str) -> float:
        """How many versions behind a group that trains may be."""
        config = self._config(run_id)
        return config.train.max_off_policy_steps if config is not None else inf

    def _config(self, run_id: str) -> RunConfig | None:
        try:
            return self._records.config(run_id)
        except CorruptArtifact:
            # The other records can be read without it.
            return None

    def missing(self, run_id: str, step: int) -> str | None:
        """Why no record says which groups a step trained on; None if one does."""
        own = [span.attempt for span, _ in self.spans_of(run_id, step)]
        if step == 0 or any(self.cut_for(attempt, step) is not None for attempt in own):
            return None
        if any(self._store.committed(keys.step_record(attempt, step)) for attempt in own):
            return (
                f"retention.batches has removed the batch of step {step}, and the older build "
                "that wrote it recorded nowhere else what it trained on; the rollouts are kept, "
                "and listed without a step"
            )
        return f"no batch of step {step} has been written"
