"""Environments: what rollouts run in, for training and for evaluation."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ratchet.configs.algorithm import AlgorithmConfig
from ratchet.configs.base import Section
from ratchet.configs.curriculum import CurriculumConfig

TRUNCATION = ("top_p", "top_k", "min_p")
RESERVED_NAMES = ("all", "agg", "trainable", "empty")
ADDRESS = r"tcp://[^:/\s]+:\d{1,5}"
"""The form of an env server's address."""
LogLevel = Literal["debug", "info", "warning", "error"]
ALL = -1
"""As a number of examples: all of the set."""
MOST_WORKERS = 64
LOAD_AT_MOST_S = 600.0
"""How long an environment may load in the preflight unless its section says otherwise."""


def _counted(value: int) -> int:
    if value == 0:
        raise ValueError("0 examples make no eval; set -1 for all of the set, or remove the env")
    return value


ExampleCount = Annotated[int, Field(ge=ALL), AfterValidator(_counted)]


class SamplingConfig(Section):
    """How a model is sampled.

    `top_p`, `top_k` and `min_p` keep part of the distribution and rescale it. The trainer computes
    log-probabilities over all of it, so rollouts that train the policy use none of these keys.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=10.0, description="Softmax temperature.")
    max_tokens: int = Field(
        default=1024, ge=1, description="Most tokens sampled in one turn of a rollout."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        max_length=16,
        description="Strings that end a turn, besides the renderer's own end token. The tokens "
        "that spell one are part of the reply and train; such a turn is not truncated.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Samples from the most likely tokens whose probabilities add up to this; evals "
        "and frozen models only.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Samples from that many most likely tokens; evals and frozen models only.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Samples from the tokens with at least this share of the most likely one's "
        "probability; evals and frozen models only.",
    )

    @property
    def truncation(self) -> dict[str, Any]:
        """The keys of TRUNCATION that are set, and their values."""
        return self.model_dump(include=set(TRUNCATION), exclude_defaults=True)

    def request(self) -> dict[str, Any]:
        """Parameters of a request to an engine. Parameters without effect are left out, since only
        some engines know them.
        """
        always = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return always | self.truncation | ({"stop": list(self.stop)} if self.stop else {})


class EnvConfig(Section):
    """One environment, resolved by verifiers from its id."""

    id: str = Field(min_length=1, description="verifiers id of the taskset, e.g. 'reverse-text'.")
    name: str = Field(
        default="", description="Name in metrics and summaries; the id if left empty."
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description='Arguments of the taskset (its own config). `{ env_var = "NAME" }` stands for '
        "an environment variable of the workers that run it, for secrets.",
    )
    path: str | None = Field(
        default=None, description="Folder with the environment's module, if it is not installed."
    )
    address: str | None = Field(
        default=None,
        description="tcp://host:port of an env server that someone else runs; none is started.",
    )
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | Literal["auto"] = Field(
        default="auto",
        description="Servers to start for it, each a process with its own event loop. A rollout "
        "goes to the one that has the fewest; more than one helps environments whose own code "
        "keeps a core busy. 'auto': one for each 256 permits, but all envs together no more than "
        "half of the cores of the machine where a worker checked the config. Where train and eval "
        "share servers, the larger number applies.",
    )
    timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Time limit of a rollout's execution, in seconds. Waiting for a permit, in "
        "its engine's queue or for new weights does not count.",
    )
    start_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="Time limit for loading the environment, in seconds, in the preflight and when "
        "its server starts; more for one that downloads data. None: 600 in the preflight, and for "
        "a server three times as long as the preflight took, but at least 120.",
    )

    log_level: LogLevel = Field(
        default="info",
        description="Lowest level that the environment's own loggers (those named after its "
        "module, and after modules in `path`) write to its server's log; libraries log warnings. "
        "`ratchet runs logs RUN --env NAME` shows it.",
    )

    @property
    def load_limit_s(self) -> float:
        """How long a process that loads the environment may take."""
        return self.start_timeout_s or LOAD_AT_MOST_S

    @model_validator(mode="after")
    def _workers_are_started_here(self) -> "EnvConfig":
        if self.address is not None and self.workers not in (1, "auto"):
            raise ValueError(
                f"workers is {self.workers}, but no server is started for an env that has an "
                "address; remove `workers` or `address`"
            )
        return self

    @field_validator("address")
    @classmethod
    def _address_is_tcp(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(ADDRESS, value):
            raise ValueError("an env server's address must have the form tcp://host:port")
        return value

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("id"), str):
            return {**data, "name": data["id"]}
        return data

    @field_validator("name")
    @classmethod
    def _name_is_a_label(cls, value: str) -> str:
        if value in RESERVED_NAMES:
            raise ValueError(f"{value!r} is reserved in the names of metrics; choose another name")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise ValueError("an env name has 1 to 64 letters, digits, '.', '_' or '-'")
        return value


class TrainEnvConfig(EnvConfig):
    """A training environment; keys that it omits come from [train]."""

    ratio: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Share of the groups, relative to the other training envs.",
    )
    group_size: int | None = Field(default=None, ge=1, description="Rollouts per example.")
    sampling: SamplingConfig | None = Field(
        default=None, description="Overrides [train.sampling] for this env."
    )
    algo: AlgorithmConfig | None = Field(
        default=None, description="Replaces the run's [algo] for this env, as a whole."
    )
    require_full_group: bool = Field(
        default=False,
        description="Drop a whole group if one of its rollouts errs, for rewards or algorithms "
        "that need a complete group.",
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig,
        description="Which of its examples come next, and which of its groups train.",
    )


class EvalEnvConfig(EnvConfig):
    """An evaluation environment; keys that it omits come from [eval]."""

    num_examples: ExampleCount | None = Field(
        default=None,
        description="Examples of one eval, from the start of the eval split; -1: all of them.",
    )
    group_size: int | None = Field(default=None, ge=1, description="Rollouts per example.")
    interval: int | None = Field(default=None, ge=1, description="Steps between evals.")
    sampling: SamplingConfig | None = Field(
        default=None, description="Overrides [eval.sampling] for this env."
    )


def _unique_names(envs: list[Any], where: str) -> None:
    names = [env.name for env in envs]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"{where}: env name {double[0]!r} is used twice; set `name` on one")


DEFAULT_BATCH_SIZE = 128
MOST_AT_ONCE = 1_000_000


class TrainConfig(Section):
    """Training data: environments, and how rollouts become batches."""

    env: list[TrainEnvConfig] = Field(
        description="Training environments; none in an evaluation, which trains nothing."
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_AT_ONCE,
        description="Rollouts in a batch; 128 if token_batch_size is not set either.",
    )
    token_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Tokens in a batch, instead of batch_size: it ships with the group that "
        "reaches them. Only shipped tokens count.",
    )
    backfill: bool = Field(
        default=False,
        description="Replace rollouts that post-batch filters remove before a batch ships, so that "
        "it is full.",
    )
    group_size: int = Field(
        default=8, ge=1, description="Rollouts of one example, compared with each other."
    )
    max_lag: int = Field(
        default=1, ge=0, description="Versions a batch may be ahead of the policy when it ships."
    )
    max_off_policy_steps: int = Field(
        default=8,
        ge=0,
        description="Groups that began more versions than this before the batch that would train "
        "on them are dropped, and their examples rolled out again.",
    )
    max_empty_batches: int = Field(
        default=10,
        ge=-1,
        description="After this many batches in a row with nothing to train on the run pauses, "
        "with a checkpoint if it has trained; it warns at each. -1: it never pauses for that. "
        "Groups with nothing left count as the batches that they would have filled.",
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)

    @model_validator(mode="before")
    @classmethod
    def _batch_size_defaults(cls, data: Any) -> Any:
        sizes = ("batch_size", "token_batch_size")
        if isinstance(data, dict) and all(data.get(size) is None for size in sizes):
            return {**data, "batch_size": DEFAULT_BATCH_SIZE}
        return data

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.batch_size and self.token_batch_size:
            raise ValueError(
                "batch_size and token_batch_size both say when a batch is full; remove one of them"
            )
        for size in sorted({env.group_size or self.group_size for env in self.env}):
            if self.batch_size and self.batch_size % size:
                raise ValueError(
                    f"batch_size ({self.batch_size}) must be a multiple of group_size ({size})"
                )
        if self.max_off_policy_steps < self.max_lag:
            raise ValueError(
                f"max_off_policy_steps ({self.max_off_policy_steps}) must be at least max_lag "
                f"({self.max_lag}): a batch may ship that many versions ahead of the policy"
            )
        if self.max_empty_batches == 0:
            raise ValueError(
                "max_empty_batches is 0, which would pause every run; set 1 to pause at the first "
                "empty batch, or -1 to never pause"
            )
        _unique_names(self.env, "train.env")
        return self

    def size_of(self, env: TrainEnvConfig) -> int:
        """Rollouts in a group of `env`."""
        return env.group_size or self.group_size


class EvalConfig(Section):
    """Evaluation: at step 0, every `interval` steps, at the last step, and on request."""

    env: list[EvalEnvConfig] = Field(default_factory=list, description="Eval environments.")
    interval: int = Field(default=10, ge=1, description="Steps between evals.")
    num_examples: ExampleCount = Field(
        default=32,
        description="Examples of one eval; -1: all of the set. A smaller set is used in full, with "
        "a warning.",
    )
    group_size: int = Field(default=1, ge=1, description="Rollouts per example.")
    skip_first_step: bool = Field(default=False, description="No eval at step 0.")
    at_end: bool = Field(
        default=True, description="Every env is evaluated at the last step, whatever its interval."
    )
    overlap: bool = Field(
        default=True,
        description="Train and eval rollouts share permits; false: no train rollouts start from "
        "the moment an eval is due until it is done.",
    )
    client: Literal["chat", "tokens"] = Field(
        default="chat",
        description="How evals query the policy. 'chat': by chat completions, as a user of the "
        "model would, so that the engine applies the model's own chat template; 'tokens': as train "
        "rollouts do, by model.renderer.",
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)

    @model_validator(mode="after")
    def _check(self) -> "EvalConfig":
        _unique_names(self.env, "eval.env")
        return self
