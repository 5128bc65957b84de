"""What an algorithm is: a class with hooks that turn rollouts into credit.

Each scoring hook waits for more than the one before: `score_rollout` for one rollout,
`score_group` for all that its group will have, `score_survivors` for the filters. A hook returns
credit, or None to leave what is there; what a later one says replaces it. `docs/extending.md`
says how to add an algorithm.

Invariant: algorithms hold no state. What one must remember between groups comes in as a snapshot
and goes out as `observed` rewards; the run keeps it (`fold` of its config).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

from ratchet.activities.contracts.rollouts import POLICY_AGENT

TOOL_TOKENS = "total_tool_response_tokens"

Advantage = float | Sequence[float]
"""One number for a whole rollout, or one per token that its policy sampled."""


Streams = Sequence[Sequence[float]]
"""One list per sample of a rollout, each with one number per token of the sample."""


class CreditError(ValueError):
    """These rollouts yield no credit with this config; the message is for the user."""


class Reference(Protocol):
    """A model that scores tokens."""

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability in nats of each token given those before it [T]; 0.0 for the first."""
        ...


class Render(Protocol):
    """Turns messages into the prompt that the policy's engines would be given."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Token ids of `messages`, in the wire format of chat completions, up to where the reply
        begins.
        """
        ...


@dataclass(frozen=True)
class TraceView:
    """What one agent did in a rollout: its reward, and how many tokens it sampled."""

    agent: str
    reward: float
    sampled_tokens: int


@dataclass(frozen=True)
class RolloutView:
    """One rollout that did not err, as algorithms see it. Lengths are in tokens.

    `index` is its place in the group. `rewards` and `metrics` are the env's, by name; `reward` is
    what counts. A rollout may have several samples (branches): `sampled_tokens` (L) and
    `input_tokens` (the rest) are over all of them, as are `token_ids` and `logprobs` [L], which
    hold the sampled tokens alone, in sample order. `messages` are the last branch's. `prompts`
    are what the samples begin with, each {'messages', 'tools'}. `task` is the task's data, for
    algorithms whose config says `needs_task`. Where several agents play, `traces` are theirs, in
    sample order.
    """

    index: int
    reward: float
    sampled_tokens: int
    turns: int = 1
    input_tokens: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    prompts: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    traces: Sequence[TraceView] = ()
    task: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def agents(self) -> Sequence[TraceView]:
        """The rollout by agent, at least one; an agent that plays twice comes twice."""
        return self.traces or (TraceView(POLICY_AGENT, self.reward, self.sampled_tokens),)

    @property
    def loss_masks(self) -> list[list[bool]]:
        """Of each sample [T], which tokens the policy sampled."""
        return [sample["loss_mask"] for sample in self.samples]

    @property
    def tool_tokens(self) -> int:
        """Tokens of tool responses, by the metric '…total_tool_response_tokens'; else 0."""
        for name, value in self.metrics.items():
            if name.endswith(TOOL_TOKENS) and math.isfinite(value):
                return int(value)
        return 0

    @property
    def token_ids(self) -> list[int]:
        """Ids of the sampled tokens [L]."""
        return cast("list[int]", self._sampled("token_ids"))

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities (nats) that the engine sampled them with [L]."""
        return cast("list[float]", self._sampled("logprobs"))

    def _sampled(self, stream: str) -> list[Any]:
        return [
            value
            for sample in self.samples
            for value, on in zip(sample[stream], sample["loss_mask"], strict=True)
            if on
        ]


@dataclass(frozen=True)
class Credit:
    """The credit of a rollout; a field that is None leaves the decision to others.

    rl: whether its sampled tokens are members of the rl component; by default they are.
    The streams of the other components have one list [T] per sample; a token is a member where
    its weight is not 0. `ref_logprobs` (nats) hold wherever a token is a member of ref_kl.
    """

    advantage: Advantage | None = None
    rl: bool | None = None
    ce_weights: Streams | None = None
    ref_kl_weights: Streams | None = None
    ref_logprobs: Streams | None = None


class Algorithm:
    """Credit for the rollouts of one env. Hooks do nothing unless overridden.

    Raises CreditError if there can be no credit.
    """

    name: ClassVar[str]

    async def score_rollout(self, rollout: RolloutView) -> Credit | None:
        """Credit that needs nothing but the rollout itself."""
        return None

    async def score_group(
        self, rollouts: Sequence[RolloutView], state: Mapping[str, float]
    ) -> Sequence[Credit] | None:
        """Credit [n] from all n > 0 rollouts of a group that did not err, before filters.

        `state` is a snapshot of what the run keeps for this env, agent to baseline.
        """
        return None

    async def score_survivors(self, rollouts: Sequence[RolloutView]) -> Sequence[Credit] | None:
        """Credit [n] of the n > 0 rollouts of a group that the filters left."""
        return None

    def observed(self, rollouts: Sequence[RolloutView]) -> dict[str, list[float]]:
        """Rewards of a group's rollouts by agent, in order, to be folded into the state."""
        return {}


def credits_of(advantages: Sequence[Advantage]) -> list[Credit]:
    """Credit [n] that consists of advantages [n]."""
    return [Credit(advantage) for advantage in advantages]


def per_agent(rollout: RolloutView, advantages: Sequence[float]) -> Advantage:
    """The advantages of a rollout's agents, in order, as one for the rollout."""
    if len(advantages) == 1:
        return advantages[0]
    return [
        advantage
        for advantage, trace in zip(advantages, rollout.agents, strict=True)
        for _ in range(trace.sampled_tokens)
    ]
