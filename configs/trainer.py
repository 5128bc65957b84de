"""How the trainer turns batches into weights."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ratchet.configs.base import FunctionSection, Section, choose_by_type


def _by_default(name: str) -> Callable[[Any], Any]:
    """A validator that lets a table without a `type` have type `name`."""

    def fill(data: Any) -> Any:
        return {"type": name, **data} if isinstance(data, dict) else data

    return fill


class AdamWConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), one step per batch."""

    type: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-6, gt=0, lt=1, description="Learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Moment decay rates.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    max_norm: float | None = Field(
        default=1.0, gt=0, description="Gradients are clipped to this norm; none: no clipping."
    )


class SgdConfig(Section):
    """Stochastic gradient descent with momentum, one step per batch."""

    type: Literal["sgd"] = "sgd"
    lr: float = Field(default=1e-2, gt=0, description="Learning rate.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum; 0: none.")
    nesterov: bool = Field(default=False, description="Look ahead by one step of momentum.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty added to gradients.")
    max_norm: float | None = Field(
        default=1.0, gt=0, description="Gradients are clipped to this norm; none: no clipping."
    )

    @model_validator(mode="after")
    def _check(self) -> "SgdConfig":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov looks ahead along the momentum; set momentum above 0")
        return self


class MuonConfig(Section):
    """Muon for the matrices of the layers, AdamW for embeddings, output head and vectors.

    Muon's step is scaled to the root mean square that AdamW's has (arXiv:2502.16982), so that one
    learning rate and one weight decay serve both.
    """

    type: Literal["muon"] = "muon"
    lr: float = Field(default=5e-4, gt=0, lt=1, description="Learning rate.")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum of Muon.")
    nesterov: bool = Field(default=True, description="Look ahead by one step of momentum.")
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="Newton-Schulz iterations that orthogonalise a step."
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Moment decay rates of AdamW."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_norm: float | None = Field(
        default=1.0, gt=0, description="Gradients are clipped to this norm; none: no clipping."
    )


class SignSgdConfig(Section):
    """The sign of the gradient: p <- p (1 - lr weight_decay) - lr sign(g). Keeps no state."""

    type: Literal["signsgd"] = "signsgd"
    lr: float = Field(default=1e-4, gt=0, lt=1, description="Learning rate.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_norm: float | None = Field(
        default=None, gt=0, description="Gradients are clipped to this norm, which changes no sign."
    )


OptimizerConfig = Annotated[
    AdamWConfig | SgdConfig | MuonConfig | SignSgdConfig,
    Field(discriminator="type"),
    BeforeValidator(choose_by_type("optimizer", AdamWConfig, SgdConfig, MuonConfig, SignSgdConfig)),
    BeforeValidator(_by_default("adamw")),
]


class ConstantScheduleConfig(Section):
    """The optimizer's learning rate, at every step."""

    type: Literal["constant"] = "constant"


class LinearScheduleConfig(Section):
    """Linear warmup, constant, then linear decay at the end of the run (warmup, stable, decay)."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = Field(default=10, ge=0, description="Steps before the full rate.")
    decay_steps: int = Field(default=10, ge=0, description="Steps of the decay at the end.")
    min_lr: float = Field(
        default=0.0, ge=0, description="Rate at both ends; 0: 1e-8 of the optimizer's."
    )


class CosineScheduleConfig(Section):
    """Linear warmup, then a half cosine down to the end of the run (arXiv:1608.03983)."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0, description="Steps before the full rate.")
    min_lr: float = Field(default=0.0, ge=0, description="Rate at the end of the cosine.")


SchedulerConfig = Annotated[
    ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig,
    Field(discriminator="type"),
    BeforeValidator(
        choose_by_type(
            "scheduler", ConstantScheduleConfig, LinearScheduleConfig, CosineScheduleConfig
        )
    ),
]


class DefaultLossConfig(Section):
    """Default RL loss: binary-TV trust region with a KL term (arXiv:2602.04879, 2602.02276)."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(default=0.2, ge=0, description="Masks larger probability drops.")
    dppo_mask_high: float = Field(default=0.2, ge=0, description="Masks larger probability rises.")
    adv_tau: float = Field(default=1.0, ge=0, description="Scale of the advantage.")
    kl_tau: float = Field(default=1e-3, ge=0, description="Weight of the squared log-ratio.")


class IpoLossConfig(Section):
    """The default loss with one trust region, whatever the sign of the advantage."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(
        default=0.1, ge=0, description="Larger probability changes, up or down, are masked."
    )
    adv_tau: float = Field(default=1.0, ge=0, description="Scale of the advantage.")
    kl_tau: float = Field(default=1e-3, ge=0, description="Weight of the squared log-ratio.")


class CustomLossConfig(FunctionSection):
    """A function of yours in place of the RL loss; the components ce and ref_kl stay."""

    type: Literal["custom"] = "custom"
    function: str = Field(
        description="'module:function'; called for each sequence as `function(inputs, **kwargs)`, "
        "it returns the loss of every token [T], or their sum."
    )


AnyLoss = DefaultLossConfig | IpoLossConfig | CustomLossConfig

LossConfig = Annotated[
    AnyLoss,
    Field(discriminator="type"),
    BeforeValidator(choose_by_type("loss", *get_args(AnyLoss))),
    BeforeValidator(_by_default("default")),
]


Dtype = Literal["float32", "bfloat16"]

ALL_LINEAR: Literal["all-linear"] = "all-linear"

MOST_SERVED_RANK = 512
"""The largest rank of an adapter that vLLM serves."""


class LoraConfig(Section):
    """A LoRA adapter in place of all weights (Hu et al., arXiv:2106.09685), as peft makes it.

    Engines get merged weights, or the adapter alone (`inference.transfer`); checkpoints hold the
    adapter alone.
    """

    rank: int = Field(default=16, ge=1, le=1024, description="Rank of the update of a layer.")
    alpha: float = Field(default=32.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the adapter's inputs dropped in training passes. Engines drop "
        "nothing: above 0 the trainer's log-probabilities differ from theirs.",
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default=ALL_LINEAR,
        description="Linear layers that are adapted, by the ends of their names ('q_proj'); "
        "'all-linear': all but the output head.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules trained in full besides the adapter, by the ends of their names "
        "('embed_tokens', 'lm_head').",
    )

    @model_validator(mode="after")
    def _names_are_apart(self) -> "LoraConfig":
        names = [] if self.targets == ALL_LINEAR else list(self.targets)
        if self.targets == []:
            raise ValueError(f"targets names no layer; leave it out for {ALL_LINEAR!r}")
        if "" in [*names, *self.modules_to_save]:
            raise ValueError("targets and modules_to_save name modules; '' is not a name")
        if both := sorted(set(names) & set(self.modules_to_save)):
            raise ValueError(
                f"targets and modules_to_save both name {', '.join(both)}: a module is either "
                "adapted or trained in full"
            )
        return self


class TrainerConfig(Section):
    """The trainer process. Weights, the optimizer's state and gradients are float32 throughout."""

    backend: Literal["torch"] = Field(
        default="torch",
        description="The trainer's backend. 'torch': one process, or `ranks` of them.",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that make one trainer: weights, gradients and moments are sharded "
        "over them (FSDP2), each has a GPU to itself, or its share of the cores, and trains its "
        "part of every batch. A run's bits depend on this number; its checkpoints load with any.",
    )
    compute_dtype: Dtype = Field(
        default="float32",
        description="Dtype of the forward and backward passes.",
    )
    matmul_precision: Literal["highest", "high"] = Field(
        default="highest",
        description="Precision of products of float32 matrices; 'high' lets a GPU use TF32.",
    )
    optim: OptimizerConfig = Field(default_factory=AdamWConfig)
    scheduler: SchedulerConfig = Field(
        default_factory=ConstantScheduleConfig, description="The learning rate over the steps."
    )
    loss: LossConfig = Field(default_factory=DefaultLossConfig)
    lora: LoraConfig | None = Field(
        default=None, description="Train a LoRA adapter; none: all weights."
    )
    seq_len: int = Field(
        default=2048,
        ge=8,
        description="Longest sample in tokens. Engines serve the same length, or more if an "
        "algorithm needs it; the trainer cuts off the rest.",
    )
    micro_batch_tokens: int = Field(
        default=8192, ge=8, description="Most tokens, padding included, in one forward pass."
    )
    packing: bool | None = Field(
        default=None,
        description="Packs sequences end to end in a forward pass, without attention between them; "
        "false: pads each to the longest. None: packs if the model supports it.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep only the inputs of each layer and recompute the rest in the backward "
        "pass: much less memory for activations, about a third more time, the same bits.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="On a GPU, keep the optimizer's moments in the machine's memory, and move "
        "those of one parameter at a time to the GPU for its step: with AdamW 8 instead of 16 "
        "bytes a parameter on the GPU, the same bits, slower steps. Refused without a GPU, where "
        "the moments are in the machine's memory anyway.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads, of each rank where there are several; none: torch's own "
        "choice, or, with several ranks, an equal share of the cores.",
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU use only kernels that always give the same bits, so that a run can "
        "be replayed: slower, attention memory grows with the square of a sequence's length, and "
        "an operation without such a kernel fails the run. It changes nothing on a CPU, where bits "
        "are always the same.",
    )

    @model_validator(mode="after")
    def _there_is_something_to_offload(self) -> "TrainerConfig":
        if self.offload_optimizer and not self.keeps_moments:
            raise ValueError(
                f"offload_optimizer moves the optimizer's moments, but {self.optim.type!r} keeps "
                "none with these settings; set it to false"
            )
        return self

    @property
    def keeps_moments(self) -> bool:
        """Whether the optimizer has a state of the parameters' size."""
        optim = self.optim
        return optim.type != "signsgd" and not (optim.type == "sgd" and optim.momentum == 0)

    @model_validator(mode="after")
    def _min_lr_is_below_lr(self) -> "TrainerConfig":
        low = 0.0 if self.scheduler.type == "constant" else self.scheduler.min_lr
        if low > self.optim.lr:
            raise ValueError(
                f"scheduler.min_lr ({low}) is more than optim.lr ({self.optim.lr}), where the "
                "schedule starts to fall"
            )
        return self

    @property
    def merged_only(self) -> str | None:
        """Why engines cannot get an adapter alone, but only all weights; None if they can."""
        lora = self.lora
        if lora is None:
            return "trainer.lora is not set, so that all weights train"
        if lora.modules_to_save:
            return "vLLM serves no adapter with trainer.lora.modules_to_save"
        named = [] if lora.targets == ALL_LINEAR else lora.targets
        if "lm_head" in (target.rpartition(".")[2] for target in named):
            return (
                "the output head is among trainer.lora.targets, and engines serve no adapter of it"
            )
        if lora.rank > MOST_SERVED_RANK:
            return (
                f"vLLM serves ranks up to {MOST_SERVED_RANK}, and trainer.lora.rank is {lora.rank}"
            )
        if self.ranks > 1:
            return f"trainer.ranks is {self.ranks}, and several ranks export merged weights only"
        return None

    def schedule_problem(self, max_steps: int | None) -> str | None:
        """Why the schedule does not fit into a run of `max_steps`; None if it fits."""
        schedule = self.scheduler
        if max_steps is None:
            if schedule.type == "constant" or (
                schedule.type == "linear" and not schedule.decay_steps
            ):
                return None
            return (
                f"trainer.scheduler.type {schedule.type!r} falls towards the last step, but with "
                "max_steps none there is no last step; set max_steps, or trainer.scheduler.type "
                "'constant', or 'linear' with decay_steps 0"
            )
        if schedule.type == "linear" and schedule.warmup_steps + schedule.decay_steps > max_steps:
            return (
                f"warmup_steps ({schedule.warmup_steps}) and decay_steps ({schedule.decay_steps}) "
                f"do not fit into max_steps ({max_steps}); lower them"
            )
        if schedule.type == "cosine" and schedule.warmup_steps >= max_steps:
            return (
                f"warmup_steps ({schedule.warmup_steps}) leaves none of max_steps "
                f"({max_steps}) for the cosine; lower it"
            )
        return None


class CheckpointConfig(Section):
    """When the run saves its state to disk, to be resumed from there."""

    interval: int = Field(default=10, ge=1, le=1000, description="Steps between checkpoints.")
    keep_last: int = Field(default=2, ge=2, description="Newest checkpoints kept, at least 2.")
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints of steps that are multiples of this are kept forever.",
    )


class RetentionConfig(Section):
    """What the store keeps besides checkpoints."""

    weights: int | Literal["all"] = Field(
        default=4, description="Versions of exported weights kept, at least 2 ('all': all of them)."
    )
    batches: Literal["checkpoint", "all"] = Field(
        default="checkpoint",
        description="Batches kept for replay: those since the oldest checkpoint that is kept, or "
        "'all', so that every step can be replayed.",
    )
    rollouts: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=1000,
        description="How many of the newest steps keep their rollouts and groups, and the evals of "
        "their time; each checkpoint deletes older ones, except what a checkpoint that is kept may "
        "need. 'all': every step.",
    )

    @field_validator("weights", mode="before")
    @classmethod
    def _weights_are_enough(cls, value: Any) -> Any:
        if value != "all" and not (isinstance(value, int) and value >= 2):
            raise ValueError(f"must be 'all' or a whole number of at least 2, got {value!r}")
        return value


class InferenceConfig(Section):
    """vLLM engines that the run starts itself."""

    dtype: Dtype = Field(
        default="float32",
        description="Dtype of the engines' weights, in which the trainer exports them.",
    )
    engines: int = Field(default=1, ge=1, le=64, description="Engines, one process group each.")
    transfer: Literal["store", "adapter", "auto"] = Field(
        default="store",
        description="How new weights get to engines. 'store': all of them (merged with the "
        "adapter, if one is trained), as files by the artifact store. 'adapter': the adapter "
        "alone, each version under a name of its own, beside the one before; rollouts in flight "
        "go on under the one that they began with. 'auto': 'adapter' where it is possible, else "
        "'store'.",
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences an engine runs at once.")
    kv_cache_gib: float = Field(
        default=0.5, gt=0, description="KV cache of one engine on a CPU, in GiB."
    )
    gpu_memory_utilization: float = Field(
        default=0.6, gt=0, le=1, description="Share of a GPU's memory that one engine takes."
    )
    extra_args: list[str] = Field(
        default_factory=list, description="Additional vLLM flags, passed unchanged."
    )
    gate_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference in canary log-probability (nats) between engine and "
        "trainer; none: from the noise of the model's kernels, as measured on version 0 (20 times "
        "the largest in float32; in bfloat16 differences may be 3 times the noise on average), and "
        "at least 1e-4. In a run whose version 0 has no such measurement: 1e-4 if both compute in "
        "float32, else 0.1.",
    )
    stalled_after_s: float = Field(
        default=12.0,
        ge=5,
        le=3600,
        description="Seconds for which an engine may not answer before it is restarted; more for "
        "a model whose weights take longer to load.",
    )
    drift_alarm: float | None = Field(
        default=0.5,
        gt=0,
        description="Mean mismatch KL of a training step (nats) above which the run raises an "
        "alarm: trainer and engines drift apart, or batches are too off-policy; none: never.",
    )
