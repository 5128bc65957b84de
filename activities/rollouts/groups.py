"""Finalized groups: scoring, and reading them back as samples, eval rollouts and batch rows.

A group document holds per rollout its reward, error and advantage, what metrics need, and the
scored samples. Pure functions over JSON; `activities.py` does the reading and writing.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, Protocol

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import ABANDONED, LOST, GroupResult, GroupWork
from ratchet.activities.envs.failures import by_type, commonest
from ratchet.activities.envs.samples import version_of
from ratchet.activities.scoring import algorithms
from ratchet.activities.scoring.batches import BatchGroup, BatchRollout, tally_of
from ratchet.activities.scoring.evals import EvalRollout
from ratchet.activities.scoring.filters import Verdict, sampled_advantages
from ratchet.activities.storage.batch import Sample

SCHEMA = 1


class Judge(Protocol):
    """The verdict of a slot of filters on a rollout, from its scored samples and its reward."""

    def __call__(self, samples: Sequence[Mapping[str, Any]], *, reward: float) -> Verdict: ...


def _write_credit(member: dict[str, Any], credit: algorithms.Credit) -> None:
    """Writes a rollout's streams into its samples; its own `advantage` is the mean over its
    sampled tokens, None if they have none.
    """
    masks = [sample["loss_mask"] for sample in member["samples"]]
    for sample, streams in zip(member["samples"], algorithms.lay_out(credit, masks), strict=True):
        sample.update(streams)
    found = sampled_advantages(member["samples"])
    # A rounded mean of equal numbers need not be that number.
    member["advantage"] = (found[0] if len(set(found)) == 1 else fmean(found)) if found else None


def _judged(judge: Judge, member: Mapping[str, Any]) -> Verdict:
    return judge(member["samples"], reward=member["reward"])


async def _give_credit(
    algorithm: algorithms.Algorithm,
    members: list[dict[str, Any]],
    views: Sequence[algorithms.RolloutView],
    judge: Judge | None,
    state: Mapping[str, float] | None,
) -> None:
    """Gives credit to rollouts that did not err [n] and filters them: `filters` names the filters
    that hit a rollout, `filtered` says whether one removes it. Survivors may then get other credit.
    """
    credit = await algorithms.before_filters(algorithm, views, state)
    for member, input in zip(members, credit, strict=True):
        _write_credit(member, input)
        verdict = _judged(judge, member) if judge is not None else Verdict()
        member["filters"] = dict.fromkeys(verdict.hits, True)
        member["filtered"] = verdict.removed
    left = [place for place, member in enumerate(members) if not member["filtered"]]
    rest = [views[place] for place in left]
    final = await algorithms.after_filters(algorithm, rest, [credit[place] for place in left])
    for place, input in zip(left, final, strict=True):
        # Most algorithms have nothing to add by then.
        if input is not credit[place]:
            _write_credit(members[place], input)


async def scored(
    work: GroupWork,
    rollouts: Sequence[dict[str, Any] | None],
    version: int,
    lost: str,
    algorithm: algorithms.Algorithm | None,
    judge: Judge | None,
    *,
    post_batch: Judge | None = None,
    require_full: bool = False,
    state: Mapping[str, float] | None = None,
    task: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a group from its rollout documents [size]; None: never finished.

    `algorithm` (none: of an eval) gives credit to the rollouts that did not err, `judge` (none: no
    filters) says which of them survive, and `post_batch` which of these would not train. With
    `require_full`, one that erred or was lost rejects the group: nothing in it gets credit or
    survives. `state` is the snapshot that the algorithm starts from, and `task` the example's data,
    for algorithms that need it. A user's own algorithm may block the event loop. Raises
    CreditError.
    """
    members: list[dict[str, Any]] = []
    for index, rollout in enumerate(rollouts):
        if rollout is None:
            message = lost or "the rollout never finished"
            kind = ABANDONED if lost else LOST
            member: dict[str, Any] = {"error": {"type": kind, "message": message}}
        elif rollout["error"] is not None:
            member = {"error": rollout["error"], "reward": rollout["reward"]}
        else:
            member = {
                "error": None,
                "reward": rollout["reward"],
                "turns": rollout["turns"],
                "truncated": rollout["truncated"],
                "responded": rollout["responded"],
                "sampled_tokens": rollout["sampled_tokens"],
                "labels": rollout["labels"],
                "temperature": rollout["temperature"],
                "samples": rollout["samples"],
                "stop": rollout.get("stop"),
                "timing": rollout.get("timing", {}),
                "metrics": rollout.get("metrics", {}),
                "mixed": rollout.get("mixed", False),
            }
        members.append({"rollout": index, **member})
    valid = [member for member in members if member["error"] is None]
    rejected = require_full and work.kind == "train" and len(valid) < len(members)
    observed: dict[str, list[float]] = {}
    if algorithm is not None and not rejected:
        views = [
            algorithms.view(index, rollout, task)
            for index, rollout in enumerate(rollouts)
            if rollout is not None and rollout["error"] is None
        ]
        try:
            await _give_credit(algorithm, valid, views, judge, state)
        except algorithms.CreditError as error:
            raise algorithms.CreditError(
                f"group {work.group} of env {work.env!r}: {error}"
            ) from error
        observed = algorithm.observed(views)
        for member in valid:
            if post_batch is not None and not member["filtered"]:
                member["post_filtered"] = _judged(post_batch, member).removed
    sampled = set().union(*map(_versions_of, valid))
    return {
        "schema": SCHEMA,
        "group": work.group,
        "kind": work.kind,
        "env": work.env,
        "algorithm": algorithm.name if algorithm is not None else None,
        "example": work.example,
        "size": work.size,
        "version_start": min(sampled, default=version),
        "rejected": rejected,
        "observed": observed,
        "rollouts": members,
    }


def _versions_of(member: Mapping[str, Any]) -> set[int]:
    """Policy versions that sampled a rollout's tokens, as far as they are known."""
    return set().union(*(sample["versions"] for sample in member["samples"])) - {-1}


def valid_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group that did not err."""
    return [member for member in document["rollouts"] if member["error"] is None]


def survivors_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group that did not err and that no pre-batch filter removed; none if the
    group was rejected.
    """
    if document.get("rejected", False):
        return []
    return [member for member in valid_of(document) if not _pre_batch(member).removed]


def _pre_batch(member: dict[str, Any]) -> Verdict:
    """The verdict of the pre-batch filters on a rollout; evals and groups of older builds, which
    had no filters, have none.
    """
    return Verdict(tuple(member.get("filters", ())), member.get("filtered", False))


def result(document: dict[str, Any], ref: ArtifactRef) -> GroupResult:
    """A committed group as workflows see it.

    Rewards and weight labels are of all rollouts that did not err: those that filters removed
    contributed to the others' advantages.
    """
    valid, survivors = valid_of(document), survivors_of(document)
    trainable = [member for member in survivors if not member.get("post_filtered", False)]
    samples = [sample for member in trainable for sample in member["samples"]]
    errors = errors_of(document)
    rewards = [member["reward"] for member in valid]
    rejected = document.get("rejected", False)
    # Filters never saw a rejected group, so it must not lower the shares of what they hit.
    tally = tally_of([] if rejected else [_pre_batch(member) for member in valid])
    first, _ = commonest(errors)
    if rejected:
        failed = f"{len(errors)} of {document['size']} rollouts failed"
        first = f"require_full_group: {failed}: {first}"
    if tally.dropped and not survivors:
        hits = ", ".join(f"{name} {count}" for name, count in tally.hits.items())
        removed = f"pre-batch filters removed {tally.dropped} of {tally.rollouts} rollouts ({hits})"
        first = f"{removed}; {first}" if first else removed
    return GroupResult(
        group=document["group"],
        kind=document["kind"],
        env=document["env"],
        ref=ref,
        size=document["size"],
        survivors=len(survivors),
        trainable=len(trainable),
        advantage_range=_advantage_range(survivors),
        observed=document.get("observed", {}),
        errored=len(errors),
        errors=by_type(errors),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        samples=len(samples),
        tokens=sum(len(sample["token_ids"]) for sample in samples),
        version_start=document["version_start"],
        labels=sorted({label for member in valid for label in member["labels"]}),
        error=first,
        filters=tally,
    )


def _advantage_range(members: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Lowest and highest advantage of the sampled tokens of rollouts; None if they have none."""
    streams = [sampled_advantages(member["samples"]) or () for member in members]
    values = [value for stream in streams for value in set(stream)]
    return (min(values), max(values)) if values else None


def judge_survivors(document: dict[str, Any], judge: Judge) -> dict[int, Verdict]:
    """Verdicts on the survivors of a group, by their index in it."""
    return {member["rollout"]: _judged(judge, member) for member in survivors_of(document)}


def batch_samples(
    document: dict[str, Any], post_batch: Mapping[int, Verdict] | None = None
) -> list[Sample]:
    """The training samples of a group, in rollout order, without what `post_batch` removes."""
    removed = {index for index, verdict in (post_batch or {}).items() if verdict.removed}
    return [
        Sample(
            group=document["group"],
            rollout=member["rollout"],
            env=document["env"],
            reward=member["reward"],
            temperature=member["temperature"],
            token_ids=sample["token_ids"],
            loss_mask=sample["loss_mask"],
            logprobs=sample["logprobs"],
            advantages=sample["advantages"],
            versions=sample["versions"],
            rl_weights=sample.get("rl_weights"),
            ce_weights=sample.get("ce_weights"),
            ref_kl_weights=sample.get("ref_kl_weights"),
            ref_logprobs=sample.get("ref_logprobs"),
        )
        for member in survivors_of(document)
        if member["rollout"] not in removed
        for sample in member["samples"]
    ]


def _largest(member: dict[str, Any]) -> float | None:
    """The advantage of a rollout's sampled tokens that is farthest from 0; None without any."""
    streams = [sample.get("advantages") or () for sample in member["samples"]]
    # Each value once, in order, so that of two that are as far the first one counts.
    return max(dict.fromkeys(chain(*streams)), key=abs, default=None)


def _timing(member: dict[str, Any]) -> dict[str, float]:
    """Seconds per phase, from a rollout's clock.

    env is the part of the generation without the model. total is the wall time, and overhead the
    part of it outside of all phases: boot, finalization, waits. For a rollout whose end was not
    recorded, total is the sum of its phases, and there is no overhead.
    """
    timing: dict[str, float] = dict(member.get("timing", {}))
    start, end = timing.pop("start", None), timing.pop("end", None)
    if not timing:
        return {}
    phases = sum(timing.get(phase, 0.0) for phase in ("setup", "generation", "scoring"))
    env = max(0.0, timing.get("generation", 0.0) - timing.get("model", 0.0))
    if start is None or end is None:
        return {"total": phases, "env": env, **timing}
    total = max(phases, end - start)
    return {"total": total, "env": env, "overhead": total - phases, **timing}


def _metrics(member: dict[str, Any]) -> dict[str, float]:
    """Those of the env's own metrics of a rollout that are numbers."""
    found: dict[str, Any] = member.get("metrics", {})
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _versions(member: dict[str, Any]) -> tuple[int, int] | None:
    """Lowest and highest policy version that sampled a rollout's tokens."""
    found = _versions_of(member)
    return (min(found), max(found)) if found else None


def batch_group(
    document: dict[str, Any], post_batch: Mapping[int, Verdict] | None = None
) -> BatchGroup:
    """What batch metrics need of a group; `post_batch`: verdicts on its survivors, by index."""
    valid = valid_of(document)
    verdicts = post_batch or {}
    return BatchGroup(
        env=document["env"],
        size=document["size"],
        errored=document["size"] - len(valid),
        version_start=document["version_start"],
        rollouts=[
            BatchRollout(
                reward=member["reward"],
                seq_len=sum(len(sample["token_ids"]) for sample in member["samples"]),
                decode_len=member["sampled_tokens"],
                turns=member["turns"],
                truncated=member["truncated"],
                samples=len(member["samples"]),
                advantage=_largest(member),
                versions=_versions(member),
                stop=member.get("stop"),
                timing=_timing(member),
                metrics=_metrics(member),
                pre_batch=_pre_batch(member),
                post_batch=verdicts.get(member["rollout"], Verdict()),
            )
            for member in valid
        ],
    )


def errors_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The errors of the rollouts of a group that have no reward."""
    return [member["error"] for member in document["rollouts"] if member["error"] is not None]


def eval_rollouts(document: dict[str, Any]) -> list[EvalRollout]:
    """The part of a group that eval metrics need."""
    return [
        EvalRollout(
            example=document["group"],
            reward=member["reward"],
            sampled_tokens=member["sampled_tokens"],
            turns=member["turns"],
            truncated=member["truncated"],
            responded=member["responded"],
        )
        for member in survivors_of(document)
    ]


def served_versions(document: dict[str, Any]) -> set[int]:
    """Policy versions that sampled the tokens of a group, or may have."""
    members = survivors_of(document)
    labels = [label for member in members for label in member["labels"]]
    return set(map(version_of, labels)).union(*map(_versions_of, members))


def mixed_of(document: dict[str, Any]) -> int:
    """The number of rollouts of a group whose tokens cannot be assigned to weights."""
    return sum(member.get("mixed", False) for member in survivors_of(document))
