"""Rollouts, and what each of their tokens got."""

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
    """A finished rollout, in short."""

    model_config = examples(ROLLOUT_EXAMPLE)
    id: str = Field(description="Its id within the run.")
    object: Literal["rollout"] = "rollout"
    group: str = Field(description="The group that it belongs to.")
    index: int = Field(description="Its place in the group.")
    kind: Literal["train", "eval"] = Field(description="What it was made for.")
    env: str = Field(description="The env's name.")
    example: int = Field(description="The example's index in the env's own task list.")
    step: int | None = Field(
        default=None,
        description="The step whose eval it belongs to, or whose batch its group was cut for, "
        "whatever filters then said of it; null while it waits for a batch, if pre-batch filters, "
        "errors or its age kept its group from any, and in batches that older builds wrote.",
    )
    attempt: str = Field(description=ATTEMPT)
    prompt: str | None = Field(
        default=None, description="How its prompt begins, in a list; null where none is kept."
    )
    reward: float | None = Field(default=None, description="Its reward; none: it has none.")
    advantage: float | None = Field(
        default=None, description="Mean over its sampled tokens; none in evals."
    )
    error: dict[str, Any] | None = Field(default=None, description="What it failed with.")
    sampled_tokens: int = Field(default=0, description="Tokens that the policy sampled.")
    turns: int | None = Field(default=None, description="Replies of the policy.")
    truncated: bool | None = Field(default=None, description="Whether a limit cut it short.")
    stop: str | None = Field(default=None, description="Why it ended, in the env's words.")
    filtered: bool = Field(default=False, description="A filter kept it from training.")
    versions: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest policy version that sampled its tokens."
    )


class RolloutPage(ListOf[RolloutItem]):
    """A page of rollouts; ask again with `next_after` as `after` while `has_more` is true."""

    damaged: list[str] = Field(
        default_factory=list,
        description="Groups of the page that are left out, since their files are damaged.",
    )
    note: str | None = Field(
        default=None, description="Why there are no train rollouts of the step that was asked for."
    )


class TokenStrip(BaseModel):
    """One training sequence of T tokens, and what is known of each; every list has length T."""

    model_config = ConfigDict(extra="allow")
    token_ids: list[int] = Field(description="The tokens.")
    pieces: list[str] | None = Field(
        default=None, description="The tokens as text; none if the tokenizer cannot be read."
    )
    loss_mask: list[bool] = Field(description="Whether the policy sampled the token.")
    logprobs: list[float] = Field(description="The engine's, in nats; 0.0 outside the loss mask.")
    versions: list[int] = Field(description="The policy version that sampled the token.")
    advantages: list[float] | None = Field(
        default=None, description="What the algorithm gave each token; none in evals."
    )
    rl_weights: list[float] | None = Field(
        default=None, description="Weights in the rl component of the loss; none: as the mask."
    )
    ce_weights: list[float] | None = Field(
        default=None, description="Weights in the cross-entropy component; none: it has none."
    )
    ref_kl_weights: list[float] | None = Field(
        default=None, description="Weights in the KL to a reference; none: it has none."
    )
    ref_logprobs: list[float] | None = Field(
        default=None, description="The reference's log-probabilities, in nats."
    )
    trainer_logprobs: list[float | None] | None = Field(
        default=None,
        description="The trainer's, in nats, under the weights that the step of its batch began "
        "with; null where nothing was scored: the first token, and what `trainer.seq_len` cut off. "
        "None if no step has trained it, and once `retention.batches` has let them go.",
    )


class RolloutFull(RolloutItem):
    """A rollout with all that was said and sampled."""

    model_config = examples({**ROLLOUT_EXAMPLE, "messages": [], "samples": [], "members": []})
    rewards: dict[str, Any] = Field(default_factory=dict, description="By name.")
    metrics: dict[str, Any] = Field(default_factory=dict, description="The env's own.")
    timing: dict[str, Any] = Field(default_factory=dict, description="Seconds by phase.")
    labels: list[str] = Field(
        default_factory=list, description="Weights that sampled it: '<version>.<push><try>'."
    )
    temperature: float | None = Field(default=None, description="What it was sampled at.")
    engine: dict[str, Any] | None = Field(
        default=None, description="The engine that it was sampled from."
    )
    messages: list[dict[str, Any]] = Field(
        default_factory=list, description="What was said on the last branch, in order."
    )
    samples: list[TokenStrip] = Field(
        default_factory=list, description="Its training sequences, token by token."
    )
    members: list[RolloutItem] = Field(
        default_factory=list, description="All rollouts of its group, itself included."
    )
