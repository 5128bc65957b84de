"""What a run recorded of its training: states to begin at, batches, and the results.

A run may consist of several attempts, or be a fork of another run: up to the step of the restore
the artifacts of the source count, after it those of the run itself. Only references and small
records are read here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys
from ratchet.activities.storage.fencing import variants
from ratchet.activities.storage.lineage import segments
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import ArtifactStore

MOST_NAMED = 8

KeyOf = Callable[[str, int], str]


class NotReplayable(ValueError):
    """The requested steps are not recorded; the message says what is missing and what helps."""


@dataclass(frozen=True)
class RecordedStep:
    """Step `step` as attempt `attempt` trained it: its batch and the revision of the config.

    `weights` and `checkpoints` are what is kept of the state after it. Several trainers may have
    committed theirs; the one that the run continued with is among them.
    """

    step: int
    attempt: str
    batch: ArtifactRef
    revision: int
    weights: list[ArtifactRef]
    checkpoints: list[ArtifactRef]


@dataclass(frozen=True)
class Plan:
    """Steps in order, at least one, from the state after step `start`: a checkpoint, or the weights
    of version 0.
    """

    run: str
    start: int
    state: ArtifactRef
    steps: list[RecordedStep]

    @property
    def from_checkpoint(self) -> bool:
        """Whether `state` is a checkpoint."""
        return self.start > 0


@dataclass(frozen=True)
class _Span:
    """Steps above `above`, up to `last` (None: all), were trained by `attempt`."""

    attempt: str
    above: int
    last: int | None

    def trained(self, step: int) -> bool:
        return self.above < step and (self.last is None or step <= self.last)

    def stood_at(self, step: int) -> bool:
        return step == self.above or self.trained(step)


def plan(store: ArtifactStore, run: str, start: int | None = None, stop: int | None = None) -> Plan:
    """What to train to replay steps `start` + 1 to `stop` of a run.

    `run` is a run, meaning the newest of its attempts, or one attempt ('X+2', and 'X+1' for the
    first). `start` is the step of a checkpoint, or 0; None: the oldest checkpoint, or 0 without
    any. `stop` None: the newest step with a kept artifact. Raises NotReplayable, and
    CorruptArtifact for damaged records.
    """
    return _Recording(store, _attempt(store, run)).plan(start, stop)


def _attempt(store: ArtifactStore, run: str) -> str:
    base, mark, number = run.partition(names.ATTEMPT_MARK)
    if mark and not (number.isdigit() and int(number) >= 1):
        raise NotReplayable(f"{run!r} names no run: an attempt is written like '{base}+2'")
    attempt = names.attempt_id(base, int(number or 1))
    if not base or store.committed(keys.config(attempt)) is None:
        there = ", ".join(store.folders("runs")[:MOST_NAMED]) or "none"
        raise NotReplayable(f"there is no run {run!r} in {store.url}; its runs: {there}")
    if mark:
        return attempt
    count = 2
    # An attempt that has not restored its checkpoint yet has trained nothing.
    while store.committed(keys.config(names.attempt_id(base, count))) is not None:
        later = names.attempt_id(base, count)
        attempt = later if store.committed(keys.lineage(later)) is not None else attempt
        count += 1
    return attempt


class _Recording:
    def __init__(self, store: ArtifactStore, attempt: str) -> None:
        self._store = store
        self._run = attempt
        self._spans: list[_Span] = []
        self._listed: dict[str, list[str]] = {}
        above = 0
        for owner, last in reversed(segments(store, attempt)):
            self._spans.append(_Span(owner, above, last))
            above = above if last is None else max(above, last)

    def plan(self, start: int | None, stop: int | None) -> Plan:
        checkpoints = self._steps_of("checkpoints")
        newest = max([*checkpoints, *self._steps_of("weights")], default=0)
        begin = min(checkpoints, default=0) if start is None else start
        end = newest if stop is None else stop
        kept = f"begin at a checkpoint (kept: {_ranges(checkpoints) or 'none'})"
        choices = f"{kept} or at 0, the weights that the run began with"
        if begin and begin not in checkpoints:
            raise NotReplayable(f"{self._run} has no checkpoint of step {begin}; {choices}")
        if not begin < end <= newest:
            raise NotReplayable(
                f"{self._run} cannot be replayed from step {begin} to {end}: the newest step with "
                f"weights or a checkpoint is {newest}; {choices}"
            )
        batches = {step: self._batch(step) for step in range(begin + 1, end + 1)}
        if missing := [step for step, batch in batches.items() if batch is None]:
            raise NotReplayable(
                f"the batches of steps {_ranges(missing)} of {self._run} were removed: without "
                'retention.batches="all" in its config, a run keeps only those since its oldest '
                f"checkpoint; {kept}"
            )
        steps = [
            RecordedStep(
                step,
                self._owner(step),
                batch,
                self._revision(step, batch),
                self._states(keys.weights, step),
                self._states(keys.checkpoint, step),
            )
            for step, batch in batches.items()
            if batch is not None
        ]
        if not any(step.weights or step.checkpoints for step in steps):
            raise NotReplayable(
                f"{self._run} has no weights or checkpoint of steps {begin + 1} to {end} to "
                'compare with: retention.weights="all" keeps the weights of every step'
            )
        return Plan(self._run, begin, self._beginning(begin), steps)

    def _owner(self, step: int) -> str:
        (attempt,) = [span.attempt for span in self._spans if span.trained(step)]
        return attempt

    def _keys(self, folder: str) -> list[str]:
        if folder not in self._listed:
            self._listed[folder] = self._store.committed_keys(folder)
        return self._listed[folder]

    def _steps_of(self, kind: str) -> set[int]:
        """Steps above 0 with an artifact of a kind ('weights', 'checkpoints') that counts."""
        return {
            number
            for span in self._spans
            for key in self._keys(f"runs/{span.attempt}/{kind}")
            if (number := number_of(key)) and span.stood_at(number)
        }

    def _refs(self, key: str) -> list[ArtifactRef]:
        result = variants(key, self._keys(key.rpartition("/")[0]))
        return [ref for name in result if (ref := self._store.committed(name)) is not None]

    def _states(self, kind: KeyOf, step: int) -> list[ArtifactRef]:
        return [
            ref
            for span in self._spans
            if span.stood_at(step)
            for ref in self._refs(kind(span.attempt, step))
        ]

    def _beginning(self, step: int) -> ArtifactRef:
        if step:
            # If trainers computed different bits, the run continued with the last.
            return self._states(keys.checkpoint, step)[-1]
        for span in self._spans:
            if (ref := self._store.committed(keys.weights(span.attempt, 0))) is not None:
                return ref
        raise NotReplayable(f"the weights that {self._run} began with are not kept")

    def _batch(self, step: int) -> ArtifactRef | None:
        return self._store.committed(keys.batch(self._owner(step), step))

    def _revision(self, step: int, batch: ArtifactRef) -> int:
        """The revision of the config that trained a step: from the step's record, or if that was
        not written from the trainer's part of it.
        """
        attempt, store = self._owner(step), self._store
        if store.committed(keys.config(attempt, 1)) is None:
            return 0
        if (record := store.committed(keys.step_record(attempt, step))) is not None:
            metrics = store.get_json(record)["metrics"]
        else:
            parts = self._refs(keys.train_metrics(attempt, step, batch.sha256))
            metrics = store.get_json(parts[-1]) if parts else {}
        return int(metrics.get("config_revision", 0))


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: '1 to 3, 7'."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
