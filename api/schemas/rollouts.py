"""Rollouts, and what is recorded for each of their tokens."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ratchet.api.schemas.artifacts import ATTEMPT
from ratchet.api.schemas.common import ListOf, examples

ROLLOUT_EXAMPLE: dict[str, Any] = {
    "id": "train:12:3",
    "object": "rollout",
    "group": "train/12",
    "index": 3,
    "kind": "train",
    "env": "reverse-text",
    "example": 1099,
    "step": 2,
    "attempt": "reverse-1a2b3c",
    "prompt": "reverse the pawl wheel",
    "reward": 0.57,
    "advantage": 0.12,
    "error": None,
    "sampled_tokens": 8,
    "turns": 1,
    "truncated": False,
    "stop": "agent_completed",
    "filtered": False,
    "versions": [1, 1],
}


class RolloutItem(BaseModel):
    """A finished rollout, in brief."""

    model_config = examples(ROLLOUT_EXAMPLE)
    id: str = Field(description="Its id within the run.")
    object: Literal["rollout"] = "rollout"
    group: str = Field(description="The group it belongs to.")
    index: int = Field(description="Its index in the group.")
    kind: Literal["train", "eval"] = Field(description="Its purpose.")
    env: str = Field(description="The env's name.")
    example: int = Field(description="Index of its example in the env's own task list.")
    step: int | None = Field(
        default=None,
        description="The step of its eval, or of the batch its group was assigned to, even if "
        "filters then dropped it; of a group whose rollouts all failed, or that filters emptied, "
        "the step that was being collected then. Null while the group waits for a batch, if age or "
        "its curriculum kept it out of every batch, if the run was resumed from before it, and for "
        "batches written by older builds.",
    )
    attempt: str = Field(description=ATTEMPT)
    prompt: str | None = Field(
        default=None, description="How its prompt begins, in lists; null if no prompt is kept."
    )
    reward: float | None = Field(default=None, description="Its reward; null: it has none.")
    advantage: float | None = Field(
        default=None, description="Mean over its sampled tokens; null in evals."
    )
    error: dict[str, Any] | None = Field(default=None, description="Why it failed.")
    sampled_tokens: int = Field(default=0, description="Tokens that the policy sampled.")
    turns: int | None = Field(default=None, description="Replies of the policy.")
    truncated: bool | None = Field(default=None, description="Whether a limit cut it off.")
    stop: str | None = Field(default=None, description="Why it ended, as the env reports it.")
    filtered: bool = Field(default=False, description="A filter kept it from training.")
    versions: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest policy version that sampled its tokens."
    )


class RolloutPage(ListOf[RolloutItem]):
    """A page of rollouts. While `has_more` is true, pass `next_after` as `after`."""

    damaged: list[str] = Field(
        default_factory=list,
        description="Groups left out of the page because their files are damaged.",
    )
    note: str | None = Field(
        default=None, description="Why the requested step has no train rollouts of a batch."
    )


class TokenStrip(BaseModel):
    """One training sequence of T tokens, with data per token; every list has length T."""

    model_config = ConfigDict(extra="allow")
    token_ids: list[int] = Field(description="The tokens.")
    pieces: list[str] | None = Field(
        default=None, description="The tokens as text; null if the tokenizer cannot be read."
    )
    loss_mask: list[bool] = Field(description="Whether the policy sampled the token.")
    logprobs: list[float] = Field(description="The engine's, in nats; 0.0 outside the loss mask.")
    versions: list[int] = Field(description="The policy version that sampled the token.")
    advantages: list[float] | None = Field(
        default=None, description="The advantage of each token; null in evals."
    )
    rl_weights: list[float] | None = Field(
        default=None, description="Weights in the rl component of the loss; null: the loss mask."
    )
    ce_weights: list[float] | None = Field(
        default=None, description="Weights in the cross-entropy component; null: no such weights."
    )
    ref_kl_weights: list[float] | None = Field(
        default=None, description="Weights in the KL to a reference; null: no such weights."
    )
    ref_logprobs: list[float] | None = Field(
        default=None, description="The reference's log-probabilities, in nats."
    )
    trainer_logprobs: list[float | None] | None = Field(
        default=None,
        description="The trainer's, in nats, under the weights at the start of the step that "
        "trained on it; null for tokens that were not scored: the first one, and those that "
        "`trainer.seq_len` cut off. The whole list is null if no step trained on it, or once "
        "`retention.batches` has removed the scores.",
    )


class RolloutFull(RolloutItem):
    """A rollout with all messages and sampled tokens."""

    model_config = examples({**ROLLOUT_EXAMPLE, "messages": [], "samples": [], "members": []})
    rewards: dict[str, Any] = Field(default_factory=dict, description="By name.")
    metrics: dict[str, Any] = Field(default_factory=dict, description="The env's own.")
    timing: dict[str, Any] = Field(default_factory=dict, description="Seconds by phase.")
    labels: list[str] = Field(
        default_factory=list, description="Weights that sampled it: '<version>.<push><try>'."
    )
    temperature: float | None = Field(default=None, description="Its sampling temperature.")
    engine: dict[str, Any] | None = Field(default=None, description="The engine that sampled it.")
    messages: list[dict[str, Any]] = Field(
        default_factory=list, description="Messages of the last branch, in order."
    )
    samples: list[TokenStrip] = Field(
        default_factory=list, description="Its training sequences, token by token."
    )
    members: list[RolloutItem] = Field(
        default_factory=list, description="All rollouts of its group, itself included."
    )
