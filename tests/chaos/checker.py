"""Judges a run by its evidence. Pure; every verdict says how much it checked and what is wrong.

A verdict that found nothing to check is a violation itself: it proves nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import PUSH_TRIES, push_label
from ratchet.workflows.rules.sources import next_attempt, train_counter
from tests.chaos.history import Activity, Evidence

SHOWN = 5


@dataclass
class Verdict:
    """`checked` things were looked at; `violations` are in words."""

    name: str
    checked: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether it was checked and nothing is wrong."""
        return self.checked > 0 and not self.violations

    def expect(self, holds: bool, otherwise: str) -> None:
        """Counts one check."""
        self.checked += 1
        if not holds:
            self.violations.append(otherwise)

    def as_json(self) -> dict[str, Any]:
        """The verdict in brief."""
        return {
            "good": self.good,
            "checked": self.checked,
            "violations": len(self.violations),
            "first": self.violations[:SHOWN],
        }


@dataclass(frozen=True)
class Delivery:
    """A group as its run accepted it; `place` counts deliveries."""

    place: int
    group: str
    result: Mapping[str, Any]

    @property
    def cancelled(self) -> bool:
        """Whether it was given up."""
        return bool(self.result.get("cancelled"))


def deliveries(evidence: Evidence) -> list[Delivery]:
    """Groups in order of delivery, from the reports that the run accepts: of a generation only
    those with a number above all before.
    """
    seen: dict[int, int] = {}
    found: list[Delivery] = []
    for signal in evidence.signals_named("dispatch_report"):
        if signal.workflow != evidence.run_id:
            continue
        report = signal.value
        if report["seq"] <= seen.get(report["generation"], -1):
            continue
        seen[report["generation"]] = report["seq"]
        for group in report["groups"]:
            found.append(Delivery(len(found), group["group"], group))
    return found


def shipped(evidence: Evidence) -> dict[int, tuple[Activity, Mapping[str, Any]]]:
    """By step: the activity that shipped its batch, and the batch's reference."""
    return {
        activity.input["step"]: (activity, activity.result["ref"])
        for activity in evidence.of(names.SHIP_BATCH)
        if activity.outcome == "completed" and activity.result["ref"] is not None
    }


def works(activity: Activity) -> list[Mapping[str, Any]]:
    """The groups that an activity runs rollouts of."""
    return [activity.input["work"], *activity.input.get("more", ())]


def delivery(evidence: Evidence) -> Verdict:
    """Every dispatched group reached the run once, as a result, an error or a cancellation.

    A group given up by a pause keeps its id and comes once more; nothing else may.
    """
    verdict = Verdict("every dispatched group delivered once")
    activities = evidence.of(names.RUN_ROLLOUTS)
    dispatched = {work["group"] for activity in activities for work in works(activity)}
    ended, given_up = Counter[str](), Counter[str]()
    for found in deliveries(evidence):
        (given_up if found.cancelled else ended)[found.group] += 1
    for group in sorted(dispatched | ended.keys()):
        verdict.expect(ended[group] <= 1, f"group {group} was delivered {ended[group]} times")
        verdict.expect(
            ended[group] + given_up[group] > 0, f"group {group} was dispatched and never delivered"
        )
    return verdict


def no_losses(evidence: Evidence) -> Verdict:
    """No fault turned a rollout into an error: the environment of the suite makes none itself."""
    verdict = Verdict("no rollout lost to a fault")
    for found in deliveries(evidence):
        if not found.cancelled:
            result = found.result
            text = f"group {found.group}: {result['errored']} of {result['size']} rollouts erred"
            error = result.get("error", "")
            verdict.expect(not result["errored"] and not error, f"{text}: {error}"[:300])
    return verdict


def examples(evidence: Evidence, epoch_sizes: Mapping[str, int]) -> Verdict:
    """Of each env every example comes once an epoch, none is skipped, none trained on twice.

    `epoch_sizes` are the numbers of train examples by env.
    """
    verdict = Verdict("every epoch's examples exactly once")
    example_of: dict[int, tuple[str, int]] = {}
    attempts: dict[int, set[int]] = defaultdict(set)
    for work in chain.from_iterable(map(works, evidence.of(names.RUN_ROLLOUTS))):
        if work["kind"] != "train":
            continue
        counter, attempt = train_counter(work["group"])
        attempts[counter].add(attempt)
        drawn = (work["env"], work["example"])
        before = example_of.setdefault(counter, drawn)
        verdict.expect(before == drawn, f"counter {counter} stood for {before} and for {drawn}")
    for counter in range(max(example_of, default=-1) + 1):
        verdict.expect(counter in example_of, f"train counter {counter} was never dispatched")
    turns: dict[str, int] = defaultdict(int)
    used: dict[tuple[str, int, int], int] = {}
    for counter in sorted(example_of):
        env, example = example_of[counter]
        epoch, turns[env] = turns[env] // epoch_sizes[env], turns[env] + 1
        first = used.setdefault((env, epoch, example), counter)
        text = f"example {example} of {env} came twice in epoch {epoch}"
        verdict.expect(first == counter, f"{text}: counters {first} and {counter}")
    _trained_once(verdict, evidence, attempts)
    return verdict


def _trained_once(
    verdict: Verdict, evidence: Evidence, attempts: Mapping[int, Collection[int]]
) -> None:
    batch_of: dict[int, int] = {}
    groups = set()
    # A batch of which the filters left nothing is none, but its groups were used up all the same.
    for activity in evidence.of(names.SHIP_BATCH):
        if activity.outcome != "completed":
            continue
        step = activity.input["step"]
        for group in activity.input["groups"]:
            counter, _ = train_counter(group)
            groups.add(group)
            before = batch_of.setdefault(counter, step)
            text = f"the example of counter {counter} is in batches {before} and {step}"
            verdict.expect(before == step, text)
    usable = [
        found
        for found in deliveries(evidence)
        if found.group.startswith("train/") and not found.cancelled and found.result["survivors"]
    ]
    last = max((found.place for found in usable if found.group in groups), default=-1)
    for found in usable:
        counter, attempt = train_counter(found.group)
        # Batches take groups in order of arrival, so what came before the last is in one, too.
        again = attempt + 1 in attempts[counter]
        late = found.place > last
        text = f"group {found.group} is in no batch, and its example was not rolled out anew"
        verdict.expect(
            found.group in groups or again or late, f"{text} ({next_attempt(found.group)})"
        )


def batches(evidence: Evidence, final_step: int) -> Verdict:
    """Every batch shipped was trained once, in order; what is trained again is the same batch."""
    verdict = Verdict("every shipped batch trained exactly once, in order")
    refs: dict[int, set[str]] = defaultdict(set)
    for activity in evidence.of(names.SHIP_BATCH):
        if activity.outcome == "completed" and activity.result["ref"] is not None:
            refs[activity.input["step"]].add(activity.result["ref"]["sha256"])
    for step in range(1, max([final_step, *refs]) + 1):
        found = refs.get(step, set())
        verdict.expect(len(found) == 1, f"step {step} has {len(found)} batches")
    front, place = 0, -1
    for activity in evidence.activities:
        if activity.outcome != "completed":
            continue
        if activity.name == names.LOAD_TRAINER:
            place = activity.result["step"]
            verdict.expect(place <= front, f"the trainer was loaded at step {place} of {front}")
        elif activity.name == names.TRAIN_STEP:
            step, sha = activity.input["step"], activity.input["batch"]["sha256"]
            text = f"step {step} was trained on a trainer at step {place}"
            verdict.expect(step in (place, place + 1), text)
            verdict.expect(step <= front + 1, f"step {step} was trained after step {front}")
            verdict.expect(refs.get(step) == {sha}, f"step {step} was trained on another batch")
            place, front = step, max(front, step)
    verdict.expect(front == final_step, f"{front} steps were trained, the run tells {final_step}")
    return verdict


def versions(evidence: Evidence, seen: Sequence[int] = ()) -> Verdict:
    """The policy version never falls: neither in reports, nor where dispatch admits, nor in what a
    client has `seen`.
    """
    verdict = Verdict("versions monotonic")
    last = -1
    for _, memo in evidence.memos:
        version = memo.get("policy_version", -1)
        verdict.expect(version >= last, f"the run reported version {version} after {last}")
        last = version
    for before, version in pairwise(seen):
        verdict.expect(version >= before, f"clients saw version {version} after {before}")
    by_workflow: dict[str, int] = {}
    for activity in evidence.of(names.RUN_ROLLOUTS):
        version, before = activity.input["engine"]["version"], by_workflow.get(activity.workflow, 0)
        first_try = activity.outcome != "open"
        text = f"{activity.workflow} sent rollouts to version {version} after {before}"
        verdict.expect(version >= before or not first_try, text)
        by_workflow[activity.workflow] = max(version, before)
    return verdict


@dataclass(frozen=True)
class Pushes:
    """Labels that engines had, with (version, engine, epoch), and when they were verified (Unix
    time); and those that were refused.
    """

    verified: Mapping[str, tuple[int, int, int]]
    refused: Collection[str]
    at: Mapping[str, float] = field(default_factory=dict)


def pushes(evidence: Evidence) -> Pushes:
    """What became of every push. One that failed, however, verified nothing."""
    verified: dict[str, tuple[int, int, int]] = {}
    at: dict[str, float] = {}
    refused: set[str] = set()
    for activity in evidence.of(names.SYNC_WEIGHTS):
        given = activity.input
        if activity.outcome == "completed":
            engine = (given["version"], given["engine_index"], given["engine_epoch"])
            label = activity.result["label"]
            verified[label], at[label] = engine, activity.ended_at
            refused |= set(activity.result["rejected"])
        else:
            labels = (push_label(given["version"], given["push"], n) for n in range(PUSH_TRIES))
            refused |= set(labels)
    return Pushes(verified, refused, at)


@dataclass(frozen=True)
class ServedRollout:
    """A rollout of a batch that was cut at `cut_at` (Unix time): which engine made it, and the
    labels of its tokens.
    """

    group: str
    index: int
    engine: tuple[int, int]
    labels: tuple[str, ...]
    versions: tuple[int, ...]
    cut_at: float = math.inf


def gate(found: Pushes, rollouts: Iterable[ServedRollout]) -> Verdict:
    """Every token that was trained on came from an engine verified at the token's version."""
    verdict = Verdict("no engine served traffic at a wrong version")
    for rollout in rollouts:
        where = f"rollout {rollout.group}/{rollout.index}"
        verdict.expect(bool(rollout.labels), f"{where} does not say what sampled it")
        for label in rollout.labels:
            at = found.verified.get(label)
            refused = " (it was refused)" if label in found.refused else ""
            verdict.expect(at is not None, f"{where}: push {label} was never verified{refused}")
            if at is not None:
                text = f"{where}: push {label} verified engine {at[1:]}, not {rollout.engine}"
                verdict.expect(at[1:] == rollout.engine, text)
                text = f"{where}: its batch was cut before push {label} was verified"
                verdict.expect(found.at.get(label, 0.0) <= rollout.cut_at, text)
        labelled = {int(label.partition(".")[0]) for label in rollout.labels}
        text = f"{where}: tokens of versions {rollout.versions}, labels {rollout.labels}"
        verdict.expect(set(rollout.versions) == labelled, text)
    return verdict


def ended(memo: Mapping[str, Any]) -> Verdict:
    """The run ended as it was asked to, with a checkpoint of its last step."""
    verdict = Verdict("run ended well")
    text = f"status {memo.get('status')}: {memo.get('error') or memo.get('end_reason')}"
    verdict.expect(memo.get("status") == "succeeded", text)
    step, version = memo.get("step"), memo.get("policy_version")
    verdict.expect(step == version, f"step {step} and version {version}")
    kept = (memo.get("checkpoint") or {}).get("step")
    verdict.expect(kept == step, f"the last checkpoint is of step {kept}, the run at {step}")
    return verdict


def witnessed(landed: Sequence[tuple[str, bool, str]], planned: int) -> Verdict:
    """Every one of the `planned` faults landed: (name, whether, proof or why not)."""
    verdict = Verdict("every planned fault witnessed")
    verdict.expect(len(landed) == planned, f"{len(landed)} of {planned} faults were injected")
    for name, whether, text in landed:
        verdict.expect(whether, f"{name}: {text}")
    return verdict
