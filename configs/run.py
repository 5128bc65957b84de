"""The schema of a run: all that a user can configure, validated as a whole before any effect."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ratchet.configs.algorithm import (
    AlgorithmConfig,
    GrpoConfig,
    demo_tokens_of,
    source_of,
    teacher_of,
)
from ratchet.configs.base import Section, refusal
from ratchet.configs.env import (
    MOST_AT_ONCE,
    EnvConfig,
    EvalConfig,
    SamplingConfig,
    TrainConfig,
)
from ratchet.configs.filters import FiltersConfig
from ratchet.configs.model import ModelConfig
from ratchet.configs.monitor import MonitorConfig
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.trainer import (
    CheckpointConfig,
    InferenceConfig,
    RetentionConfig,
    TrainerConfig,
)

UNATTRIBUTED = "default"
"""The renderer that follows a model's own template, and cannot distinguish message text in it."""


Count = Annotated[int, Field(ge=1, le=MOST_AT_ONCE)]
MOST_EXTRA_SERVERS = 256
"""Env servers of a run beside the first of each section: every one is in the run's state."""


class ConcurrencyConfig(Section):
    """Bounds of the permits if they follow the engines' load."""

    initial: int | None = Field(
        default=None,
        ge=1,
        description="Initial permits; none: as many rollouts of the longest context as the "
        "engines' KV cache holds, but no more than they run at once.",
    )
    min_inflight: int = Field(
        default=1, ge=1, description="Fewest permits; one activity's worth is always granted."
    )
    max_inflight: int = Field(default=1024, ge=1, le=1_000_000, description="Most permits.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "ConcurrencyConfig":
        if self.min_inflight > self.max_inflight:
            raise ValueError(
                f"min_inflight ({self.min_inflight}) must not be above max_inflight "
                f"({self.max_inflight})"
            )
        if self.initial and not self.min_inflight <= self.initial <= self.max_inflight:
            raise ValueError(
                f"initial ({self.initial}) must lie between min_inflight ({self.min_inflight}) "
                f"and max_inflight ({self.max_inflight})"
            )
        return self


class DispatchConfig(Section):
    """Permits, shared by train and eval."""

    max_inflight_rollouts: Count | Literal["auto"] | None = Field(
        default=None,
        description="Rollouts executing at once, train and eval together; none: batch_size; "
        "'auto': follows the load that the engines report, within [dispatch.concurrency].",
    )
    rollouts_per_activity: int | None = Field(
        default=None,
        ge=1,
        description="Rollouts of a group that one activity runs; none: the whole group. 1 suits "
        "long agentic rollouts: each frees its permit when it ends.",
    )
    tasks_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=MOST_AT_ONCE,
        description="Rollouts started per minute, train and eval together.",
    )
    burst: Count | Literal["auto"] | None = Field(
        default=None,
        description="Largest growth of executing rollouts within 5 seconds; 'auto': a tenth of the "
        "permits, but at least one group, and 8; none: a cap with 'auto' permits only. Rollouts "
        "that end are always replaced at once.",
    )
    concurrency: ConcurrencyConfig = Field(
        default_factory=ConcurrencyConfig,
        description="Bounds of the permits if max_inflight_rollouts is 'auto'.",
    )
    generation_events: int = Field(
        default=3000,
        ge=100,
        le=20000,
        description="History events after which a dispatch generation hands over.",
    )


class LogConfig(Section):
    """The orchestrator's log of the run: logs/<run>/orchestrator.log below RATCHET_HOME."""

    interval: float = Field(
        default=10.0,
        ge=1.0,
        description="Seconds between two lines about the pipeline: batch, rollouts in flight, "
        "evals, versions, event-loop lag.",
    )


class RunConfig(Section):
    """A run: it trains, or with max_steps = 0 and no train env it evaluates its model and ends."""

    name: str = Field(
        default="run",
        description="Start of the run id: lower-case letters, digits and '-', at most 40.",
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seeds data order and warm start.")
    max_steps: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        description="Trainer steps; the run ends there. None: it runs until it is stopped. 0: "
        "an evaluation, of a config without train envs, as `ratchet eval` makes one."
    )
    after: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Start after this run has ended, with any status. For a machine that has room "
        "for the servers of one run at a time.",
    )
    when_all_fail: Literal["pause", "end", "continue"] = Field(
        default="pause",
        description="If every rollout of the first eval, or of the first eight train groups, fails "
        "with errors of one type, the run pauses with that error, fails, or continues.",
    )
    metadata: dict[str, str] = Field(
        default_factory=dict, description="At most 16 pairs, keys to 64, values to 512 characters."
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    algo: AlgorithmConfig = Field(
        default_factory=GrpoConfig, description="How rewards become credit, for every train env."
    )
    train: TrainConfig
    eval: EvalConfig = Field(default_factory=EvalConfig)
    filters: FiltersConfig = Field(default_factory=FiltersConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    dispatch: DispatchConfig = Field(default_factory=DispatchConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)

    @field_validator("name")
    @classmethod
    def _name_is_a_slug(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", value):
            raise ValueError("a run name has 1 to 40 lower-case letters, digits or '-'")
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata_is_small(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > 16:
            raise ValueError(f"at most 16 pairs are allowed, got {len(value)}")
        for key, text in value.items():
            if len(key) > 64 or len(text) > 512:
                raise ValueError(f"{key[:64]!r}: keys have at most 64, values 512 characters")
        return value

    @model_validator(mode="after")
    def _trains_or_evaluates(self) -> "RunConfig":
        if not self.trains and self.max_steps != 0:
            text = (
                "a run that trains has at least 1 item here; one that only evaluates has "
                "max_steps = 0, as `ratchet eval` sets it"
            )
            raise refusal("run", ("train", "env"), text, [])
        if self.trains and self.max_steps == 0:
            text = (
                "must be greater than or equal to 1, got 0: this config has train envs; to "
                "evaluate alone, run `ratchet eval` with it"
            )
            raise refusal("run", ("max_steps",), text, 0)
        if not self.trains and not self.eval.env:
            text = "an evaluation needs at least one [[eval.env]]"
            raise refusal("run", ("eval", "env"), text, [])
        return self

    @model_validator(mode="after")
    def _check_across_sections(self) -> "RunConfig":
        if self.permits is not None and self.permits < self.largest_part:
            raise ValueError(
                f"dispatch.max_inflight_rollouts ({self.permits}) must hold the largest group "
                f"or activity ({self.largest_part})"
            )
        most = self.dispatch.concurrency.max_inflight
        if self.permits is None and most < self.largest_part:
            raise ValueError(
                f"dispatch.concurrency.max_inflight ({most}) must hold the largest group or "
                f"activity ({self.largest_part})"
            )
        if self.train.token_batch_size and self.dispatch.max_inflight_rollouts is None:
            raise ValueError(
                "train.token_batch_size does not say how many rollouts to run at once; set "
                "dispatch.max_inflight_rollouts to a number or 'auto'"
            )
        longest = max(
            [self.sampling(env.name, "train").max_tokens for env in self.train.env]
            + [self.sampling(env.name, "eval").max_tokens for env in self.eval.env]
        )
        if longest >= self.trainer.seq_len:
            raise ValueError(
                f"sampling.max_tokens ({longest}) must leave room for a prompt in "
                f"trainer.seq_len ({self.trainer.seq_len})"
            )
        for trained in self.train.env:
            algo = self.algorithm(trained.name)
            if algo.group_relative and self.train.size_of(trained) < 2:
                raise ValueError(
                    f"algorithm {algo.type!r} compares the rollouts of a group, and groups of env "
                    f"{trained.name!r} have size 1; set group_size to 2 or more, or algo.type to "
                    "'reward'"
                )
            if algo.needs_attribution and self.model.renderer == UNATTRIBUTED:
                raise ValueError(
                    f"algorithm {algo.type!r} of env {trained.name!r} learns from message text, "
                    f"which renderer {UNATTRIBUTED!r} does not distinguish from the template "
                    "around it; set model.renderer to one made for the model"
                )
            if problem := self._sampling_problem(trained.name):
                raise ValueError(f"train sampling of {trained.name!r} has {problem}")
        if self.trains and (problem := self.trainer.schedule_problem(self.max_steps)):
            raise ValueError(problem)
        if self.inference.transfer == "adapter" and (why := self.trainer.merged_only):
            raise ValueError(
                f"inference.transfer is 'adapter', but {why}; set it to 'auto' or 'store', which "
                "push all weights"
            )
        if self.trainer.micro_batch_tokens < self.trainer.seq_len:
            raise ValueError(
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) must hold one "
                f"sample of trainer.seq_len ({self.trainer.seq_len})"
            )
        counts = [env.workers for env in [*self.train.env, *self.eval.env]]
        extra = sum(count - 1 for count in counts if count != "auto")
        if extra > MOST_EXTRA_SERVERS:
            raise ValueError(
                f"`workers` of all envs ask for {extra} servers besides the first of each, but a "
                f"run may have {MOST_EXTRA_SERVERS}; lower some of them"
            )
        for env in self.eval.env:
            twin = next((e for e in self.train.env if e.name == env.name), None)
            if twin is not None and (twin.id, twin.address) != (env.id, env.address):
                raise ValueError(
                    f"env name {env.name!r} means {twin.id!r} in train and {env.id!r} in eval; "
                    "set `name` on one of them"
                )
        return self

    def _sampling_problem(self, name: str) -> str | None:
        """Why rollouts with this sampling cannot train the policy in env `name`; None if fine."""
        sampling: SamplingConfig = self.sampling(name, "train")
        if self.is_frozen(name):
            if sampling.stop:
                return (
                    "stop strings, but a frozen model generates its rollouts: replies come without "
                    "the string that ended them, so the policy would learn to stop before it; set "
                    "`sampling` without `stop` on that env"
                )
            return None
        if sampling.temperature == 0:
            return (
                "temperature 0: greedy rollouts of one example are all alike and carry no signal; "
                "set it above 0"
            )
        if cut := sampling.truncation:
            values = ", ".join(f"{key} = {value}" for key, value in cut.items())
            return (
                f"{values}: engines would sample from part of the distribution, while the trainer "
                "compares with all of it, so that every importance ratio would be off by the share "
                "that is kept; drop it there (evals may have it, in [eval.sampling]) or lower the "
                "temperature"
            )
        return None

    @property
    def trains(self) -> bool:
        """Whether the run trains; one that does not is an evaluation of its model."""
        return bool(self.train.env)

    @property
    def envs(self) -> list[str]:
        """Names of the envs that the run is about: those it trains on, or else evaluates."""
        return [env.name for env in self.train.env or self.eval.env]

    @property
    def last_step(self) -> float:
        """The step that the run ends with; infinite if it runs until it is stopped."""
        return math.inf if self.max_steps is None else self.max_steps

    @property
    def permits(self) -> int | None:
        """Rollouts that may execute at once; None: as many as the engines sustain."""
        input = self.dispatch.max_inflight_rollouts
        return None if input == "auto" else input or self.train.batch_size

    @property
    def largest_group(self) -> int:
        """Rollouts of the largest group, train or eval."""
        sizes = [self.train.size_of(env) for env in self.train.env]
        return max(sizes + [self.eval_group_size(env.name) for env in self.eval.env])

    @property
    def largest_part(self) -> int:
        """Most rollouts that one activity runs."""
        chunk = self.dispatch.rollouts_per_activity
        return min(self.largest_group, chunk or self.largest_group)

    def env(self, name: str, kind: str) -> Any:
        """The section of env `name` for `kind` ('train' or 'eval')."""
        envs: Sequence[EnvConfig] = self.train.env if kind == "train" else self.eval.env
        return next(env for env in envs if env.name == name)

    def eval_group_size(self, name: str) -> int:
        """Rollouts per example in evals of `name`."""
        return self.env(name, "eval").group_size or self.eval.group_size

    def eval_num_examples(self, name: str) -> int:
        """Examples requested for one eval of `name`; ALL: the whole set."""
        return self.env(name, "eval").num_examples or self.eval.num_examples

    def eval_interval(self, name: str) -> int:
        """Steps between evals of `name`."""
        return self.env(name, "eval").interval or self.eval.interval

    def sampling(self, name: str, kind: str) -> Any:
        """The SamplingConfig of env `name` for `kind` ('train' or 'eval')."""
        section = self.train if kind == "train" else self.eval
        return self.env(name, kind).sampling or section.sampling

    def algorithm(self, name: str) -> AlgorithmConfig:
        """The algorithm of train env `name`: its own, else the run's."""
        algo: AlgorithmConfig | None = self.env(name, "train").algo
        return algo or self.algo

    def algorithm_sections(self) -> dict[str, AlgorithmConfig]:
        """Every `algo` section by its dotted key."""
        own = {f"train.env.{i}.algo": e.algo for i, e in enumerate(self.train.env) if e.algo}
        return {"algo": self.algo, **own}

    def sampler(self, name: str, kind: str) -> FrozenModelConfig | None:
        """The frozen model that samples the rollouts of env `name` for `kind`; None: the policy.

        Groups of a frozen model carry no version and never age. Evals are always the policy's.
        """
        source = source_of(self.algorithm(name)) if kind == "train" else "policy"
        return None if source == "policy" else source

    def asks_by_chat(self, kind: str) -> bool:
        """Whether rollouts of `kind` by the policy use chat completions."""
        return kind == "eval" and self.eval.client == "chat"

    def is_frozen(self, name: str) -> bool:
        """Whether a frozen model samples the train rollouts of env `name`."""
        return self.sampler(name, "train") is not None

    @property
    def context(self) -> int:
        """Longest sequence that the policy's engines serve, in tokens: a sample, preceded by the
        longest demonstration that the policy sees as its own teacher.
        """
        algos = [self.algorithm(env.name) for env in self.train.env]
        shown = [demo_tokens_of(algo) for algo in algos if teacher_of(algo) == "policy"]
        return self.trainer.seq_len + max(shown, default=0)

    @property
    def transfer(self) -> str:
        """How new weights get to engines: 'auto' is decided."""
        named = self.inference.transfer
        if named != "auto":
            return named
        return "adapter" if self.trains and self.trainer.merged_only is None else "store"

    @property
    def gate_tolerance(self) -> float:
        """Largest canary difference (nats) at which an engine counts as verified."""
        if self.inference.gate_tolerance is not None:
            return self.inference.gate_tolerance
        exact = self.trainer.compute_dtype == self.inference.dtype == "float32"
        return 1e-4 if exact else 0.1


def _credit_of(algo: dict[str, Any]) -> dict[str, Any]:
    """An algorithm without the keys that only say how its frozen models are reached."""
    reached = ("timeout_s", "connect_timeout_s", "max_retries", "more_urls", "headers_from_env")
    return {
        key: {name: part for name, part in value.items() if name not in reached}
        if key in ("teacher", "source") and isinstance(value, dict)
        else value
        for key, value in algo.items()
    }


def data_of(config: RunConfig) -> dict[str, Any]:
    """The parts of a config that decide which examples are drawn and what a group holds."""
    data = config.model_dump(mode="json", include={"seed", "train", "algo", "filters", "eval"})
    served = {"ratio": 0, "start_timeout_s": None, "log_level": "info", "workers": 1}
    envs = [
        {**env, **served, "algo": env["algo"] and _credit_of(env["algo"])}
        for env in data["train"]["env"]
    ]
    return {
        **data,
        "algo": _credit_of(data["algo"]),
        "train": {**data["train"], "max_empty_batches": 0, "env": envs},
        "eval": [env["name"] for env in data["eval"]["env"]],
    }
