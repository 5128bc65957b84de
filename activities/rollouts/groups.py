"""Finalized groups: scoring, and reading them back as samples, eval rollouts and batch rows.

A group document holds per rollout its reward, error and advantage, what metrics need, and the
scored samples. Pure functions over JSON; `activities.py` does the reading and writing.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from activities.contracts.rollouts import GroupResult, GroupWork
from activities.scoring import algorithms
from activities.scoring.batches import BatchGroup, BatchRollout, tally_of
from activities.scoring.evals import EvalRollout
from activities.scoring.filters import Verdict
from activities.storage.batch import Sample
from activities.storage.refs import ArtifactRef

SCHEMA = 1

Judge = Callable[[Sequence[Mapping[str, Any]]], Verdict]
"""What a slot of filters says of a rollout, given its scored samples."""


def _write_credit(member: dict[str, Any], credit: algorithms.Credit) -> None:
    """Writes a rollout's advantages into its samples; its own `advantage` is their mean over its
    sampled tokens.
    """
    advantage = 0.0 if credit.advantage is None else credit.advantage
    member["advantage"] = advantage if isinstance(advantage, int | float) else fmean(advantage)
    masks = [sample["loss_mask"] for sample in member["samples"]]
    streams = algorithms.broadcast(advantage, masks)
    for sample, stream in zip(member["samples"], streams, strict=True):
        sample["advantages"] = stream


async def _give_credit(
    algorithm: algorithms.Algorithm,
    members: list[dict[str, Any]],
    views: Sequence[algorithms.RolloutView],
    judge: Judge | None,
) -> None:
    """Gives credit to rollouts that did not err [n] and has them judged: `filters` names what hit
    a rollout, `filtered` says whether that removes it. Those left may get other credit then.
    """
    credit = await algorithms.before_filters(algorithm, views)
    for member, given in zip(members, credit, strict=True):
        _write_credit(member, given)
        verdict = judge(member["samples"]) if judge is not None else Verdict()
        member["filters"] = dict.fromkeys(verdict.hits, True)
        member["filtered"] = verdict.removed
    left = [place for place, member in enumerate(members) if not member["filtered"]]
    rest = [views[place] for place in left]
    final = await algorithms.after_filters(algorithm, rest, [credit[place] for place in left])
    for place, given in zip(left, final, strict=True):
        _write_credit(members[place], given)


def score(
    work: GroupWork,
    rollouts: list[dict[str, Any] | None],
    version: int,
    lost: str,
    algorithm: algorithms.Algorithm | None = None,
    judge: Judge | None = None,
) -> dict[str, Any]:
    """The document of a group from its rollout documents [size]; None: never finished.

    In training groups `algorithm` (none: plain group-relative) gives credit to the rollouts that
    did not err, and `judge` (none: no filters) says which of them survive. Blocks, and runs an
    event loop of its own: not for the thread of another. Raises CreditError.
    """
    algorithm = algorithm or algorithms.default()
    members: list[dict[str, Any]] = []
    for index, rollout in enumerate(rollouts):
        if rollout is None:
            message = lost or "the rollout never finished"
            member: dict[str, Any] = {"error": {"type": "Lost", "message": message}}
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
            }
        members.append({"rollout": index, **member})
    valid = [member for member in members if member["error"] is None]
    if work.kind == "train":
        views = [
            algorithms.view(index, rollout)
            for index, rollout in enumerate(rollouts)
            if rollout is not None and rollout["error"] is None
        ]
        asyncio.run(_give_credit(algorithm, valid, views, judge))
    sampled = [
        version
        for member in valid
        for sample in member["samples"]
        for version in sample["versions"]
        if version >= 0
    ]
    return {
        "schema": SCHEMA,
        "group": work.group,
        "kind": work.kind,
        "env": work.env,
        "algorithm": algorithm.name if work.kind == "train" else None,
        "example": work.example,
        "size": work.size,
        "version_start": min(sampled, default=version),
        "rollouts": members,
    }


def valid_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group that did not err."""
    return [member for member in document["rollouts"] if member["error"] is None]


def survivors_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group that did not err and that no pre-batch filter removed."""
    return [member for member in valid_of(document) if not _pre_batch(member).removed]


def _pre_batch(member: dict[str, Any]) -> Verdict:
    """What pre-batch filters said of a rollout; evals and groups of before there were filters
    have no verdict.
    """
    return Verdict(tuple(member.get("filters", ())), member.get("filtered", False))


def result(document: dict[str, Any], ref: ArtifactRef) -> GroupResult:
    """What the workflow is told of a committed group.

    Rewards and weight labels are of all rollouts that did not err: those that filters removed had
    their part in the others' advantages.
    """
    valid, survivors = valid_of(document), survivors_of(document)
    samples = [sample for member in survivors for sample in member["samples"]]
    errors = [member["error"] for member in document["rollouts"] if member["error"]]
    rewards = [member["reward"] for member in valid]
    tally = tally_of([_pre_batch(member) for member in valid])
    first = f"{errors[0]['type']}: {errors[0]['message']}"[:300] if errors else ""
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
        errored=len(errors),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        samples=len(samples),
        tokens=sum(len(sample["token_ids"]) for sample in samples),
        version_start=document["version_start"],
        labels=sorted({label for member in valid for label in member["labels"]}),
        error=first,
        filters=tally,
    )


def judge_survivors(document: dict[str, Any], judge: Judge) -> dict[int, Verdict]:
    """Verdicts on the survivors of a group, by their index in it."""
    return {member["rollout"]: judge(member["samples"]) for member in survivors_of(document)}


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
        )
        for member in survivors_of(document)
        if member["rollout"] not in removed
        for sample in member["samples"]
    ]


def _largest(member: dict[str, Any]) -> float:
    """The advantage of a rollout's sampled tokens that is farthest from 0."""
    values = (value for sample in member["samples"] for value in sample["advantages"])
    return max(values, key=abs, default=0.0)


def _timing(member: dict[str, Any]) -> dict[str, float]:
    """Seconds per phase; env is what of the generation was not the model, total their sum."""
    timing = {phase: s for phase, s in member.get("timing", {}).items() if phase != "start"}
    if not timing:
        return {}
    phases = sum(timing.get(phase, 0.0) for phase in ("setup", "generation", "scoring"))
    env = max(0.0, timing.get("generation", 0.0) - timing.get("model", 0.0))
    return {"total": phases, "env": env, **timing}


def _metrics(member: dict[str, Any]) -> dict[str, float]:
    """The env's own metrics of a rollout, as far as they are numbers."""
    found: dict[str, Any] = member.get("metrics", {})
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _versions(member: dict[str, Any]) -> tuple[int, int] | None:
    """Lowest and highest policy version that sampled a rollout's tokens."""
    found = [v for sample in member["samples"] for v in sample["versions"] if v >= 0]
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


def eval_rollouts(document: dict[str, Any]) -> list[EvalRollout]:
    """What eval metrics need of a group."""
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
    """Policy versions that sampled the tokens of a group."""
    return {
        version
        for member in survivors_of(document)
        for sample in member["samples"]
        for version in sample["versions"]
        if version >= 0
    }
