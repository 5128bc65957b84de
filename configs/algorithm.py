"""Algorithms: how the rewards of a group become credit for its sampled tokens.

One class per `type`, whose defaults are its vetted setting. An env's `algo` replaces the run's as
a whole. Constraints within a section are checked here; those that involve other sections (group
sizes) are checked by `RunConfig`. All algorithms but 'sft' train on what the policy itself sampled,
which their losses rely on: only 'sft' has a `source`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ratchet.configs.base import FunctionSection, Section, choose_by_type, refusal
from ratchet.configs.reference import HIDDEN, FrozenModelConfig, ModelReference


def _not_all_zero(weights: dict[str, float]) -> None:
    if not any(weights.values()):
        named = " and ".join(weights)
        raise ValueError(f"{named} are all 0, which penalizes nothing; leave length_penalty out")


def _with_frozen(data: Any, key: str, message: str) -> Any:
    """Refuses a section whose `key` is missing or is the policy."""
    if isinstance(data, dict) and data.get(key, "policy") == "policy":
        raise refusal("algorithm", key, message, data.get(key))
    return data


class TokensPenaltyConfig(Section):
    """Efficiency shaping by tokens: of the best rollouts, the cheaper ones earn up to double."""

    type: Literal["tokens"] = "tokens"
    output_weight: float = Field(default=1.0, ge=0, description="Cost of one sampled token.")
    tool_weight: float = Field(
        default=1.0,
        ge=0,
        description="Cost of one token of a tool's response, as counted by the env's metric "
        "whose name ends with 'total_tool_response_tokens'.",
    )

    @model_validator(mode="after")
    def _check(self) -> "TokensPenaltyConfig":
        _not_all_zero({"output_weight": self.output_weight, "tool_weight": self.tool_weight})
        return self


class TurnsPenaltyConfig(Section):
    """Efficiency shaping by turns: of the best rollouts, the shorter ones earn up to double."""

    type: Literal["turns"] = "turns"


class LinearPenaltyConfig(Section):
    """A penalty that grows with the sampled tokens and with how well the group did."""

    type: Literal["linear"] = "linear"
    coef: float = Field(
        default=0.25,
        gt=0,
        le=100,
        description="Penalty of a rollout as long as trainer.seq_len in a group of mean reward 1.",
    )
    gate_by_correctness: bool = Field(
        default=False,
        description="A rollout's penalty is multiplied by its reward: none at reward 0, half of it "
        "at reward 0.5. A penalty for rollouts of reward 1 alone, as other implementations read "
        "the gate, is the same only if rewards are 0 and 1.",
    )


class GroupMaxPenaltyConfig(Section):
    """Sampled tokens, input tokens and turns, each relative to the group's largest."""

    type: Literal["group_max"] = "group_max"
    output_weight: float = Field(default=0.25, ge=0, description="Weight of sampled tokens.")
    input_weight: float = Field(default=0.1, ge=0, description="Weight of tokens not sampled.")
    turns_weight: float = Field(default=0.1, ge=0, description="Weight of turns.")

    @model_validator(mode="after")
    def _check(self) -> "GroupMaxPenaltyConfig":
        names = ("output_weight", "input_weight", "turns_weight")
        _not_all_zero({name: getattr(self, name) for name in names})
        return self


LengthPenaltyConfig = Annotated[
    TokensPenaltyConfig | TurnsPenaltyConfig | LinearPenaltyConfig | GroupMaxPenaltyConfig,
    Field(discriminator="type"),
    BeforeValidator(
        choose_by_type(
            "length penalty",
            TokensPenaltyConfig,
            TurnsPenaltyConfig,
            LinearPenaltyConfig,
            GroupMaxPenaltyConfig,
        )
    ),
]


class AlgorithmSection(Section):
    """The properties of an algorithm; everything that depends on an algorithm reads them here.

    An algorithm with a field `teacher` needs that model's log-probabilities, of samples that may be
    longer by its `demo_tokens`, if it has that field. One with a field `source` lets that model
    sample its rollouts. If `needs_task` is true it gets the data of a group's task. If it is a
    FunctionSection, the workers' check imports its function.
    """

    needs_render: ClassVar[bool] = False
    """Whether it turns messages into the policy's prompts."""
    needs_attribution: ClassVar[bool] = False
    """Whether the renderer must distinguish what a message says from the template around it."""

    def fold(
        self, state: Mapping[str, float], observed: Mapping[str, Sequence[float]]
    ) -> dict[str, float] | None:
        """The state that the run keeps for an env, by agent, after the rewards of a group, in the
        order in which groups are delivered; None: it keeps none. Pure.
        """
        return None


class _GroupMeanSection(AlgorithmSection):
    """The common part of algorithms whose advantages are rewards minus the group's mean."""

    group_relative: ClassVar[bool] = True

    length_penalty: LengthPenaltyConfig | None = Field(
        default=None, description="Penalizes long rollouts; none: length does not matter."
    )
    length_weighted_baseline: bool = Field(
        default=False, description="The group's mean weighs each rollout by its sampled tokens."
    )

    @model_validator(mode="after")
    def _check(self) -> "_GroupMeanSection":
        penalty = self.length_penalty
        replaces = penalty is not None and not isinstance(penalty, LinearPenaltyConfig)
        if self.length_weighted_baseline and replaces:
            assert penalty is not None
            raise ValueError(
                f"length_penalty {penalty.type!r} has its own baseline, so that "
                "length_weighted_baseline would have no effect; remove one of them, or use "
                "length_penalty 'linear'"
            )
        return self


class GrpoConfig(_GroupMeanSection):
    """Reward minus the group's mean (arXiv:2402.03300, without the division by the deviation)."""

    type: Literal["grpo"] = "grpo"


class HierarchicalGrpoConfig(AlgorithmSection):
    """Rewards of agents compared among equals: within an episode, or within the group."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Agents that play several times in one episode, and whose rewards are "
        "compared there; others are compared with the same agent in the group's other episodes.",
    )

    @property
    def group_relative(self) -> bool:
        """Whether rollouts of a group are compared; uncertain if agents play within an episode."""
        return not self.episode_agents


class MaxRlConfig(AlgorithmSection):
    """Reward minus the group's mean, divided by that mean (arXiv:2602.02710)."""

    group_relative: ClassVar[bool] = True

    type: Literal["max_rl"] = "max_rl"


class RewardConfig(AlgorithmSection):
    """The reward as it is; rollouts are not compared with each other."""

    group_relative: ClassVar[bool] = False

    type: Literal["reward"] = "reward"


START = 0.0
"""The average of an agent that has no rewards yet."""


class RaeConfig(AlgorithmSection):
    """Reward minus a moving average of the agent's past rewards in this env."""

    group_relative: ClassVar[bool] = False

    type: Literal["rae"] = "rae"
    decay: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="How much of the average is kept when a reward arrives; the rest is the "
        "reward. The average begins at 0.",
    )

    def advance(self, average: float, rewards: Sequence[float]) -> tuple[list[float], float]:
        """Advantages [n] of rewards [n] in order, each relative to the average before it, and the
        final average.
        """
        advantages = []
        for reward in rewards:
            advantages.append(reward - average)
            average = self.decay * average + (1.0 - self.decay) * reward
        return advantages, average

    def fold(
        self, state: Mapping[str, float], observed: Mapping[str, Sequence[float]]
    ) -> dict[str, float]:
        """The averages, each updated with its agent's rewards."""
        moved = {
            agent: self.advance(state.get(agent, START), rewards)[1]
            for agent, rewards in observed.items()
        }
        return {**state, **moved}


ObservedRole = Literal["system", "user", "tool"]


class EchoRoleConfig(Section):
    """Cross-entropy on an env's messages of one role."""

    alpha: float = Field(gt=0, le=100, description="Weight of the cross-entropy of a token.")


def _tools_only() -> dict[ObservedRole, EchoRoleConfig]:
    return {"tool": EchoRoleConfig(alpha=0.1)}


class EchoConfig(_GroupMeanSection):
    """grpo, plus cross-entropy on the env's replies to the policy."""

    needs_attribution: ClassVar[bool] = True

    type: Literal["echo"] = "echo"
    roles: dict[ObservedRole, EchoRoleConfig] = Field(
        default_factory=_tools_only,
        min_length=1,
        description="Roles whose messages after the first prompt are learned, each with its "
        "alpha. Setting any replaces them all. Needs a renderer that distinguishes messages from "
        "the template around them, which 'default' does not.",
    )


class OpdConfig(AlgorithmSection):
    """On-policy distillation: the policy's own tokens are pulled towards a frozen teacher's."""

    group_relative: ClassVar[bool] = False

    type: Literal["opd"] = "opd"
    teacher: FrozenModelConfig = Field(
        description="The model that scores the policy's tokens; it needs the same vocabulary."
    )

    @model_validator(mode="before")
    @classmethod
    def _teacher_is_frozen(cls, data: Any) -> Any:
        message = (
            "'opd' needs a frozen teacher: a table with its name and base_url. The policy has "
            "nothing to learn from its own log-probabilities; algo.type 'opsd' shows it a "
            "demonstration first"
        )
        return _with_frozen(data, "teacher", message)


class OpsdConfig(AlgorithmSection):
    """On-policy self-distillation: the teacher is the policy after seeing a demonstration."""

    group_relative: ClassVar[bool] = False
    needs_task: ClassVar[bool] = True
    needs_render: ClassVar[bool] = True

    type: Literal["opsd"] = "opsd"
    teacher: ModelReference = Field(
        default="policy",
        description="'policy', or a table with name and base_url of a frozen model; of the same "
        "vocabulary.",
    )
    demo_key: str = Field(
        default="demonstration",
        min_length=1,
        description="Key under which a task holds its demonstration, a text: in its `info`, or "
        "else in the task itself. The teacher sees it as a system message in front of the prompt.",
    )
    demo_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Longest demonstration, in tokens of its message. The policy's engines serve "
        "sequences longer than trainer.seq_len by this much; a frozen teacher must, too.",
    )
    max_concurrent: int = Field(
        default=32, ge=1, le=4096, description="Samples of a group that are scored at once."
    )


class SftConfig(AlgorithmSection):
    """Supervised fine-tuning on what another model samples in the env."""

    group_relative: ClassVar[bool] = False

    type: Literal["sft"] = "sft"
    source: FrozenModelConfig = Field(
        description="The model that samples the rollouts in place of the policy."
    )

    @model_validator(mode="before")
    @classmethod
    def _source_is_frozen(cls, data: Any) -> Any:
        message = (
            "'sft' needs a frozen source: a table with the name and base_url of the model to "
            "learn from. For rollouts of the policy itself set algo.type to 'grpo'"
        )
        return _with_frozen(data, "source", message)


class CustomConfig(AlgorithmSection, FunctionSection):
    """A function of yours that gets a group's rollouts and returns their advantages."""

    group_relative: ClassVar[bool] = False

    type: Literal["custom"] = "custom"
    function: str = Field(
        description="'module:function'; it takes a list of rollout views, and `kwargs`, and "
        "returns for each rollout one number or a list with one number per sampled token."
    )
    needs_task: bool = Field(
        default=False,
        description="Each rollout view has the data of the group's task, as `task`; else it is "
        "empty.",
    )


AnyAlgorithm = (
    GrpoConfig
    | MaxRlConfig
    | HierarchicalGrpoConfig
    | RewardConfig
    | RaeConfig
    | EchoConfig
    | OpdConfig
    | OpsdConfig
    | SftConfig
    | CustomConfig
)


def _models_in_place(data: Any) -> Any:
    """Refuses another model where the algorithm has no use for it."""
    if not isinstance(data, dict):
        return data
    kind = data.get("type")
    fields = {cls.model_fields["type"].default: cls.model_fields for cls in get_args(AnyAlgorithm)}
    if not isinstance(kind, str) or kind not in fields:
        return data
    if "source" in data and "source" not in fields[kind]:
        message = (
            f"algorithm {kind!r} trains on what the policy itself sampled; leave source out, or "
            "set algo.type to 'sft'"
        )
        raise refusal("algorithm", "source", message, HIDDEN)
    if "teacher" in data and "teacher" not in fields[kind]:
        taught = " or ".join(repr(name) for name in fields if "teacher" in fields[name])
        message = f"algorithm {kind!r} uses no teacher; remove it, or set algo.type to {taught}"
        raise refusal("algorithm", "teacher", message, HIDDEN)
    return data


AlgorithmConfig = Annotated[
    AnyAlgorithm,
    Field(discriminator="type"),
    BeforeValidator(choose_by_type("algorithm", *get_args(AnyAlgorithm))),
    BeforeValidator(_models_in_place),
]


def teacher_of(algo: AlgorithmConfig) -> ModelReference | None:
    """The model whose log-probabilities an algorithm needs, if it needs any."""
    teacher: ModelReference | None = getattr(algo, "teacher", None)
    return teacher


def source_of(algo: AlgorithmConfig) -> ModelReference:
    """The model that samples an algorithm's rollouts."""
    source: ModelReference = getattr(algo, "source", "policy")
    return source


def needs_task(algo: AlgorithmConfig) -> bool:
    """Whether an algorithm reads the data of a group's task."""
    needed: bool = getattr(algo, "needs_task", False)
    return needed


def demo_tokens_of(algo: AlgorithmConfig) -> int:
    """How many tokens more than a sample a teacher may have to read."""
    tokens: int = getattr(algo, "demo_tokens", 0)
    return tokens


def scores_at_once(algo: AlgorithmConfig) -> bool:
    """Whether a group's rollouts are all that an algorithm needs, and scoring them takes no time.

    Not if it asks a model, if its function is a user's, which may block for long, or if it reads
    the task, or state that the run keeps.
    """
    stateless = type(algo).fold is AlgorithmSection.fold
    foreign = isinstance(algo, FunctionSection) or teacher_of(algo) is not None
    return stateless and not foreign and not needs_task(algo)
