"""Finalized groups: scoring, and reading them back as samples, eval rollouts and batch rows.

A group document holds per rollout its reward, error and advantage, what metrics need, and the
scored samples. Pure functions over JSON; `activities.py` does the reading and writing.
"""

from typing import Any

from activities.contracts.rollouts import GroupResult, GroupWork
from activities.scoring import grpo
from activities.scoring.batches import BatchGroup, BatchRollout
from activities.scoring.evals import EvalRollout
from activities.storage.batch import Sample
from activities.storage.refs import ArtifactRef

SCHEMA = 1


def score(
    work: GroupWork, rollouts: list[dict[str, Any] | None], version: int, lost: str
) -> dict[str, Any]:
    """The document of a group from its rollout documents [size]; None: never finished.

    Survivors are rollouts that did not err and have samples; in training groups they get their
    reward minus the survivors' mean as advantage on every sampled token.
    """
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
            }
        members.append({"rollout": index, **member})
    survivors = [member for member in members if member["error"] is None]
    if work.kind == "train":
        credit = grpo.advantages([member["reward"] for member in survivors])
        for member, advantage in zip(survivors, credit, strict=True):
            member["advantage"] = advantage
            for sample in member["samples"]:
                sample["advantages"] = grpo.broadcast(advantage, sample["loss_mask"])
    sampled = [
        version
        for member in survivors
        for sample in member["samples"]
        for version in sample["versions"]
        if version >= 0
    ]
    return {
        "schema": SCHEMA,
        "group": work.group,
        "kind": work.kind,
        "env": work.env,
        "example": work.example,
        "size": work.size,
        "version_start": min(sampled, default=version),
        "rollouts": members,
    }


def survivors_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group that did not err."""
    return [member for member in document["rollouts"] if member["error"] is None]


def result(document: dict[str, Any], ref: ArtifactRef) -> GroupResult:
    """What the workflow is told of a committed group."""
    survivors = survivors_of(document)
    samples = [sample for member in survivors for sample in member["samples"]]
    errors = [member["error"] for member in document["rollouts"] if member["error"]]
    rewards = [member["reward"] for member in survivors]
    first = f"{errors[0]['type']}: {errors[0]['message']}"[:300] if errors else ""
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
        labels=sorted({label for member in survivors for label in member["labels"]}),
        error=first,
    )


def batch_samples(document: dict[str, Any]) -> list[Sample]:
    """The training samples of a group, in rollout order."""
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
        for sample in member["samples"]
    ]


def batch_group(document: dict[str, Any]) -> BatchGroup:
    """What batch metrics need of a group."""
    survivors = survivors_of(document)
    return BatchGroup(
        env=document["env"],
        size=document["size"],
        errored=document["size"] - len(survivors),
        version_start=document["version_start"],
        rollouts=[
            BatchRollout(
                reward=member["reward"],
                seq_len=sum(len(sample["token_ids"]) for sample in member["samples"]),
                decode_len=member["sampled_tokens"],
                turns=member["turns"],
                truncated=member["truncated"],
                samples=len(member["samples"]),
                advantage=member["advantage"],
            )
            for member in survivors
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
