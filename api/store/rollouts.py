"""Finished rollouts as the store holds them: found by step, env, kind or group, and read whole.

A rollout's id is its group's with ':' for '/', then ':' and its index: 'train:12:3' is rollout 3 of
group 'train/12'. `step_groups.py` says which groups belong to a step; how the trainer scored tokens
is read from the file of the step's scores. If several attempts of a run hold groups with the same
id, the newest attempt's group counts. Everything blocks.
"""

import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from cachetools import LRUCache, TLRUCache, cachedmethod

from ratchet.activities.contracts.redact import redacted_all
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.fencing import variants
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import CorruptArtifact
from ratchet.activities.storage.token_logprobs import SCHEMA_VERSION as SCORES_SCHEMA
from ratchet.activities.storage.token_logprobs import decode_token_logprobs
from ratchet.api.schemas.rollouts import RolloutFull, RolloutItem, RolloutPage, TokenStrip
from ratchet.api.store.records import Records
from ratchet.api.store.step_groups import LISTING_SHARE, LISTINGS, Place, StepGroups, place_of
from ratchet.api.store.tokens import Tokenizers

_NUMBER, _ENV = "[0-9]{1,18}", "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_TRAIN, _EPOCH = rf"{_NUMBER}(?:\.{_NUMBER})?", f"{_NUMBER}-{_NUMBER}"
# What these admit names a file of the store and nothing else.
RID = re.compile(rf"(train:{_TRAIN}|eval:{_EPOCH}:{_ENV}:{_NUMBER}):([0-9]{{1,6}})")
GROUP = re.compile(rf"train/{_TRAIN}|eval/{_EPOCH}/{_ENV}/{_NUMBER}")
EXAMPLE = re.compile(_NUMBER)
EPOCH = re.compile(f"({_NUMBER})-({_NUMBER})")
PAST = 999_999
"""Sorts after every group."""
KEPT = 4096
PREVIEW = 160
"""Characters of a prompt that a list shows."""
ASKED = 2
"""How many rollouts of a group are searched for its prompt."""
SCAN_S = 1.5
"""Time limit of one page; the next page covers the rest. Also of the search for a group's step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupAt:
    """A group of an attempt; `step` if known."""

    attempt: str
    group: str
    step: int | None = None


@dataclass(frozen=True)
class _Group:
    """A group in brief; `version_start`: the oldest policy version of its tokens, or, without any,
    the one that it began at. `spent`: nothing of it is left to train on.
    """

    items: list[RolloutItem]
    version_start: int
    spent: bool


@dataclass(frozen=True)
class Wanted:
    """Which rollouts a page should hold."""

    step: int | None = None
    env: str | None = None
    group: str | None = None
    kind: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    errored: bool | None = None

    def admits(self, item: RolloutItem) -> bool:
        """Whether a rollout matches."""
        low, high, reward = self.reward_min, self.reward_max, item.reward
        return (
            self.env in (None, item.env)
            and self.errored in (None, item.error is not None)
            and (low is None or (reward is not None and reward >= low))
            and (high is None or (reward is not None and reward <= high))
        )


def prompt_of(rollout: dict[str, Any]) -> str | None:
    """The beginning of the last user message in a rollout's first prompt, in one line."""
    prompts = rollout.get("prompts") or [rollout]
    said = [m["content"] for m in prompts[0].get("messages") or [] if m.get("role") == "user"]
    if not said:
        return None
    content = said[-1 if rollout.get("prompts") else 0]
    parts = content if isinstance(content, list) else [{"text": content}]
    text = " ".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return " ".join(text[: 4 * PREVIEW].split())[:PREVIEW] or None


def rollout_id(group: str, index: int) -> str:
    """The id of a rollout, as addresses have it."""
    return f"{group.replace('/', ':')}:{index}"


def _versions(samples: list[dict[str, Any]]) -> tuple[int, int] | None:
    result = [v for sample in samples for v in sample["versions"] if v >= 0]
    return (min(result), max(result)) if result else None


def items_of(document: dict[str, Any], attempt: str) -> list[RolloutItem]:
    """The rollouts of a group's document, in brief."""
    return [
        RolloutItem(
            id=rollout_id(document["group"], member["rollout"]),
            group=document["group"],
            index=member["rollout"],
            kind=document["kind"],
            env=document["env"],
            example=document["example"],
            attempt=attempt,
            reward=member.get("reward"),
            advantage=member.get("advantage"),
            error=redacted_all(member["error"]),
            sampled_tokens=member.get("sampled_tokens") or 0,
            turns=member.get("turns"),
            truncated=member.get("truncated"),
            stop=member.get("stop"),
            filtered=bool(member.get("filtered") or member.get("post_filtered")),
            versions=_versions(member.get("samples") or []),
        )
        for member in document["rollouts"]
    ]


def _group(document: dict[str, Any], attempt: str) -> _Group:
    items = items_of(document, attempt)
    left = [item for item in items if item.error is None and not item.filtered]
    spent = not left or document.get("rejected", False)
    return _Group(items, document.get("version_start", 0), spent)


def _named(place: Place) -> str:
    """The train group of a place."""
    number, again = place
    return f"train/{number}.{again}" if again else f"train/{number}"


def _eval_place(group: str) -> tuple[int, int, str, int]:
    """The sort key of 'eval/<step>-<k>/<env>/<example>' in an attempt."""
    _, epoch, env, example = group.split("/")
    step, _, k = epoch.partition("-")
    return -int(step), -int(k), env, int(example)


@dataclass(frozen=True)
class _Listing:
    """Train groups of an attempt by counter, ascending, and how long it took to list them. Folders
    grow as long as a run is running, and all pages share the listing.
    """

    counters: dict[Place, None]
    took_s: float


def _listing_lasts(_: str, listing: _Listing, now: float) -> float:
    return now + LISTING_SHARE * listing.took_s


class Rollouts:
    """Reads rollouts of any run."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._store = records.store
        self._steps = StepGroups(records)
        self._tokens = Tokenizers(records.store)
        self._kept: LRUCache[str, Any] = LRUCache(KEPT)
        self._lock = threading.Lock()
        self._listings = TLRUCache[str, _Listing](LISTINGS, _listing_lasts)
        self._listed = threading.Condition()

    # -- which groups -----------------------------------------------------------------------

    def _trained_at(self, run_id: str, step: int) -> Iterator[GroupAt]:
        """Groups assigned to step `step`, in the order of its batch."""
        for span, holders in self._steps.spans_of(run_id, step):
            for group in self._steps.cut_for(span.attempt, step) or ():
                held = (one.attempt for one in holders if self._has(one.attempt, group))
                yield GroupAt(next(held, span.attempt), group, step)

    def _of_step(self, run_id: str, step: int, begin: str | None) -> Iterator[GroupAt]:
        """Train groups of step `step`: those of its batch, then those that left nothing for it."""
        taken: set[str] = set()
        for at in self._trained_at(run_id, step):
            taken.add(at.group)
            if begin is None or begin in taken:
                yield at
        first = place_of(begin) if begin is not None and begin not in taken else (-1, 0)
        for span, _ in self._steps.spans_of(run_id, step) if step else ():
            may = self._steps.collected_at(run_id, span, step)
            for place in self._listing(span.attempt).counters:
                at = GroupAt(span.attempt, _named(place))
                possible = place >= first and may(place) and at.group not in taken
                if possible and self._was_spent_at(run_id, at, step):
                    yield GroupAt(span.attempt, at.group, step)

    def _was_spent_at(self, run_id: str, at: GroupAt, step: int) -> bool:
        try:
            found = self._items_in(keys.group(at.attempt, at.group), at.attempt)
        except (FileNotFoundError, CorruptArtifact):
            # Retention deletes it; without `step` the list names it if it is damaged.
            return False
        return found.spent and self._step_of(run_id, at, found, inf) == step

    @cachedmethod(
        lambda self: self._listings, lambda _, attempt: attempt, condition=lambda self: self._listed
    )
    def _listing(self, attempt: str) -> _Listing:
        began = time.monotonic()
        committed = self._store.committed_keys(keys.group(attempt, "train/0").rpartition("/")[0])
        names = (key.rpartition("/")[2].removesuffix(".json") for key in committed)
        counters = sorted(place_of(name) for name in names if GROUP.fullmatch(f"train/{name}"))
        return _Listing(dict.fromkeys(counters), time.monotonic() - began)

    def _all_trained(self, run_id: str, begin: str | None) -> Iterator[GroupAt]:
        """Train groups of the run's own attempts, the newest first, from group `begin` on, or where
        it was: retention deletes groups of the newest attempt alone.
        """
        newer: list[dict[Place, None]] = []
        own = self._records.attempts(run_id)[::-1]
        first = place_of(begin) if begin is not None else None
        holding = (attempt for attempt in own if first in self._listing(attempt).counters)
        start = next(holding, own[0]) if first is not None else own[0]
        began = False
        for attempt in own:
            began = began or attempt == start
            result = self._listing(attempt).counters
            for counter in reversed(result) if began else ():
                passed = first is not None and attempt == start and counter > first
                if not passed and not any(counter in known for known in newer):
                    yield GroupAt(attempt, _named(counter))
            newer.append(result)

    def _evals(self, run_id: str, wanted: Wanted, begin: str | None) -> Iterator[GroupAt]:
        """Eval groups, the newest epoch first, examples ascending; from group `begin` on, or where
        it was: retention deletes groups of the newest attempt alone.
        """
        holders: dict[str, list[str]] = {}
        spans = self._records.spans(run_id)[::-1]
        first = _eval_place(begin) if begin is not None else None
        start = spans[0].attempt
        if begin is not None and first is not None:
            reached = [s.attempt for s in spans if s.last is None or -first[0] <= s.last]
            start = next((a for a in reached if self._has(a, begin)), start)
        began = False
        for span in spans:
            began = began or span.attempt == start
            root = keys.group(span.attempt, "eval/0").rpartition("/")[0]
            named = (EPOCH.fullmatch(name) for name in self._store.folders(root))
            epochs = sorted((int(name[1]), int(name[2]), name[0]) for name in named if name)
            for step, _, epoch in reversed(epochs):
                late = span.last is not None and step > span.last
                if late or (wanted.step is not None and step != wanted.step):
                    continue
                newer = holders.get(epoch, [])
                holders[epoch] = [*newer, span.attempt]
                if not began:
                    continue
                for env in self._store.folders(f"{root}/{epoch}"):
                    if wanted.env is not None and env != wanted.env:
                        continue
                    result = self._store.committed_keys(f"{root}/{epoch}/{env}")
                    names = [key.rpartition("/")[2].removesuffix(".json") for key in result]
                    for name in sorted(filter(EXAMPLE.fullmatch, names), key=int):
                        group = f"eval/{epoch}/{env}/{name}"
                        passed = span.attempt == start and first and _eval_place(group) < first
                        if not passed and not any(self._has(a, group) for a in newer):
                            yield GroupAt(span.attempt, group, step)

    def _has(self, attempt: str, group: str) -> bool:
        try:
            return self._store.committed(keys.group(attempt, group)) is not None
        except CorruptArtifact:
            return True

    def _groups(self, run_id: str, wanted: Wanted, begin: str | None) -> Iterator[GroupAt]:
        """Groups that may hold what is wanted, from group `begin` on, or where it was."""
        if wanted.group is not None:
            result = self._find(run_id, wanted.group)
            if result is not None:
                yield result
            return
        in_evals = begin is not None and begin.startswith("eval/")
        if wanted.kind != "eval" and not in_evals:
            if wanted.step is not None:
                yield from self._of_step(run_id, wanted.step, begin)
            else:
                yield from self._all_trained(run_id, begin)
        if wanted.kind != "train":
            yield from self._evals(run_id, wanted, begin if in_evals else None)

    def _find(self, run_id: str, group: str) -> GroupAt | None:
        if GROUP.fullmatch(group) is None:
            return None
        for span in reversed(self._records.spans(run_id)):
            if self._store.committed(keys.group(span.attempt, group)) is not None:
                return GroupAt(span.attempt, group)
        return None

    def _scores(self, run_id: str, at: GroupAt, after: int) -> ArtifactRef | None:
        """The file of the step that trained on a group, of those after `after`; None if none has.

        The attempt that holds the group trained on it, or one that continued with its batch.
        """
        deadline = time.monotonic() + SCAN_S
        spans = self._records.spans(run_id)
        begin = [span.attempt for span in spans].index(at.attempt)
        for span in spans[begin:]:
            folder = keys.token_logprobs(span.attempt, 0).rpartition("/")[0]
            committed = self._store.committed_keys(folder)
            for step in sorted({number_of(key) or 0 for key in committed}):
                late = span.last is not None and step > span.last
                if step <= max(after, span.first) or late:
                    continue
                # The run continues with the output of its newest trainer process.
                named = variants(keys.token_logprobs(span.attempt, step), committed)
                ref = self._store.committed(named[-1]) if named else None
                if ref is None:
                    continue
                if at.group in self._steps.groups_in(ref):
                    return ref
                if time.monotonic() > deadline:
                    return None
        return None

    # -- reading ----------------------------------------------------------------------------

    def _trainer_logprobs(
        self, run_id: str, at: GroupAt, index: int, samples: list[dict[str, Any]]
    ) -> dict[int, list[float | None]]:
        """How the trainer scored the samples of a rollout, by index; others were not scored."""
        sampled = _versions(samples)
        try:
            # A token is trained on no earlier than the step after its version.
            ref = self._scores(run_id, at, sampled[1] if sampled else 0)
            data = self._store.get(ref, schema=SCORES_SCHEMA) if ref is not None else None
        except CorruptArtifact:
            # Retention deletes them while a run is running.
            return {}
        rows = decode_token_logprobs(data, at.group, index) if data is not None else []
        return {row.sample: row.trainer_logprobs for row in rows}

    @cachedmethod(lambda self: self._kept, lambda _, key, attempt: key, lambda self: self._lock)
    def _items_in(self, key: str, attempt: str) -> _Group:
        return _group(documents.read(self._store, self._store.require(key)), attempt)

    def _items(self, run_id: str, at: GroupAt, deadline: float) -> list[RolloutItem]:
        try:
            found = self._items_in(keys.group(at.attempt, at.group), at.attempt)
        except FileNotFoundError:
            # Retention deletes it, or somebody the run.
            return []
        return self._with_step(run_id, at, found, deadline)

    def _with_step(
        self, run_id: str, at: GroupAt, found: _Group, deadline: float
    ) -> list[RolloutItem]:
        step = at.step
        if step is None and (epoch := EPOCH.fullmatch(at.group.split("/")[1])):
            step = int(epoch[1])
        if step is None:
            step = self._step_of(run_id, at, found, deadline)
        if step is None:
            return found.items
        return [item.model_copy(update={"step": step}) for item in found.items]

    def _step_of(self, run_id: str, at: GroupAt, found: _Group, deadline: float) -> int | None:
        """The step of a train group; None if it has none, or it takes too long to find."""
        # A group without any results enters no batch; failed rollouts have no versions, and neither
        # have those of frozen models.
        whole = [item for item in found.items if item.error is None]
        if whole:
            ageless = all(item.versions is None for item in whole)
            step = self._steps.step_of(
                run_id, at.group, found.version_start, ageless=ageless, deadline=deadline
            )
            if step is not None or time.monotonic() > deadline:
                return step
        if not found.spent:
            return None
        return self._steps.collected_with(run_id, at.attempt, at.group, found.version_start)

    @cachedmethod(
        lambda self: self._kept,
        lambda _, attempt, group: f"prompt of {keys.group(attempt, group)}",
        lambda self: self._lock,
    )
    def _prompt(self, attempt: str, group: str) -> str | None:
        """The start of a group's prompt, from the first of its rollouts that has one."""
        for index in range(ASKED):
            try:
                ref = self._store.committed(keys.rollout(attempt, group, index))
                document = documents.read(self._store, ref) if ref is not None else {}
            except CorruptArtifact:
                continue
            if text := prompt_of(document):
                return text
        return None

    def _why_none(self, run_id: str, step: int) -> str | None:
        """Why there is no rollout of a step; None where there is, or where it had none."""
        if (missing := self._steps.missing(run_id, step)) is not None:
            return missing
        group = None
        for group in self._trained_at(run_id, step):
            if self._has(group.attempt, group.group):
                return None
        return f"retention.rollouts has removed those of step {step}" if group else None

    def page(self, run_id: str, wanted: Wanted, after: str | None, limit: int) -> RolloutPage:
        """Rollouts after the one with id `after`, at most `limit`. A page may be short, or empty,
        and still have a cursor.
        """
        deadline = time.monotonic() + SCAN_S
        matched = RID.fullmatch(after) if after is not None else None
        begin = (matched[1].replace(":", "/"), int(matched[2])) if matched else None
        result: list[RolloutItem] = []
        damaged: list[str] = []
        last = after
        of_step = wanted.step if wanted.kind != "eval" and wanted.group is None else None
        note = self._why_none(run_id, of_step) if of_step is not None else None

        def page(cursor: str | None) -> RolloutPage:
            more = cursor is not None
            return RolloutPage(
                data=result, has_more=more, next_after=cursor, damaged=damaged, note=note
            )

        for at in self._groups(run_id, wanted, begin[0] if begin else None):
            passed = begin[1] if begin is not None and begin[0] == at.group else -1
            try:
                items = self._items(run_id, at, deadline)
            except CorruptArtifact as damage:
                items = []
                # Retention may have deleted it meanwhile: its marker goes first.
                if passed < PAST and self._has(at.attempt, at.group):
                    logger.error("group %s of %s is left out: %s", at.group, at.attempt, damage)
                    damaged.append(at.group)
            if not items:
                last = rollout_id(at.group, PAST)
            for item in items:
                if item.index <= passed:
                    continue
                if len(result) == limit:
                    return page(last)
                last = item.id
                if wanted.admits(item):
                    prompt = self._prompt(item.attempt, item.group)
                    result.append(item.model_copy(update={"prompt": prompt}))
            if time.monotonic() > deadline and last != after:
                return page(last)
        return page(None)

    def full(self, run_id: str, rid: str) -> RolloutFull | None:
        """A rollout with all messages and sampled tokens; None if the id is unknown, or retention
        deletes the group meanwhile.
        """
        matched = RID.fullmatch(rid)
        at = self._find(run_id, matched[1].replace(":", "/")) if matched else None
        if matched is None or at is None:
            return None
        try:
            return self._full(run_id, at, int(matched[2]))
        except (FileNotFoundError, CorruptArtifact):
            # A group's marker is deleted before anything of its rollouts.
            if self._has(at.attempt, at.group):
                raise
            return None

    def _full(self, run_id: str, at: GroupAt, index: int) -> RolloutFull | None:
        ref = self._store.require(keys.group(at.attempt, at.group))
        document = documents.read(self._store, ref)
        found, deadline = _group(document, at.attempt), time.monotonic() + SCAN_S
        members = self._with_step(run_id, at, found, deadline)
        if index >= len(members):
            return None
        stored = self._store.committed(keys.rollout(at.attempt, at.group, index))
        reported = documents.read(self._store, stored) if stored is not None else {}
        scored = document["rollouts"][index]
        samples = scored.get("samples") or reported.get("samples") or []
        trained = scored.get("samples") if document["kind"] == "train" else None
        of_trainer = self._trainer_logprobs(run_id, at, index, trained) if trained else {}
        return RolloutFull(
            **members[index].model_dump(),
            rewards=reported.get("rewards") or {},
            metrics=reported.get("metrics") or scored.get("metrics") or {},
            timing=reported.get("timing") or scored.get("timing") or {},
            labels=reported.get("labels") or scored.get("labels") or [],
            temperature=reported.get("temperature"),
            engine=reported.get("engine"),
            messages=reported.get("messages") or [],
            samples=[
                TokenStrip(
                    **sample,
                    pieces=self._tokens.texts(at.attempt, sample["token_ids"]),
                    trainer_logprobs=of_trainer.get(place),
                )
                for place, sample in enumerate(samples)
            ],
            members=members,
        )
