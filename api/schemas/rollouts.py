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
    id: str
    object: Literal["rollout"] = "rollout"
    group: str
    index: int = Field(description="Its place in the group.")
    kind: Literal["train", "eval"]
    env: str
    example: int = Field(description="The example's index in the env's own task list.")
    step: int | None = Field(
        default=None, description="The step whose batch or eval it belongs to, where it was asked."
    )
    attempt: str = Field(description=ATTEMPT)
    prompt: str | None = Field(
        default=None, description="How its prompt begins, in a list; null where none is kept."
    )
    reward: float | None = None
    advantage: float | None = Field(
        default=None, description="Mean over its sampled tokens; none in evals."
    )
    error: dict[str, Any] | None = None
    sampled_tokens: int = 0
    turns: int | None = None
    truncated: bool | None = None
    stop: str | None = None
    filtered: bool = Field(default=False, description="A filter kept it from training.")
    versions: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest policy version that sampled its tokens."
    )


class RolloutPage(ListOf[RolloutItem]):
    """A page of rollouts; ask again with `next_after` as `after` while `has_more` is true."""

    next_after: str | None = None
    damaged: list[str] = Field(
        default_factory=list,
        description="Groups of the page that are left out, since their files are damaged.",
    )


class TokenStrip(BaseModel):
    """One training sequence of T tokens, and what is known of each; every list has length T."""

    model_config = ConfigDict(extra="allow")
    token_ids: list[int]
    pieces: list[str] | None = Field(
        default=None, description="The tokens as text; none if the tokenizer cannot be read."
    )
    loss_mask: list[bool]
    logprobs: list[float] = Field(description="The engine's, in nats; 0.0 outside the loss mask.")
    versions: list[int]
    advantages: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    ref_logprobs: list[float] | None = None
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
    temperature: float | None = None
    engine: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = Field(
        default_factory=list, description="What was said on the last branch, in order."
    )
    samples: list[TokenStrip] = Field(default_factory=list)
    members: list[RolloutItem] = Field(
        default_factory=list, description="All rollouts of its group, itself included."
    )
