"""How the trainer turns batches into weights."""

from typing import Any, Literal

from pydantic import Field, field_validator

from configs.base import Section


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), one step per batch."""

    type: Literal["adamw"] = "adamw"
    lr: float = Field(default=5e-4, gt=0, lt=1, description="Learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Moment decay rates.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_norm: float | None = Field(
        default=1.0, gt=0, description="Gradient norm is clipped here; none: no clipping."
    )


class LossConfig(Section):
    """Default RL loss: binary-TV trust region with a KL term (arXiv:2602.04879, 2602.02276)."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(default=0.2, ge=0, description="Probability drop masked beyond.")
    dppo_mask_high: float = Field(default=0.2, ge=0, description="Probability rise masked beyond.")
    adv_tau: float = Field(default=1.0, ge=0, description="Scale of the advantage.")
    kl_tau: float = Field(default=1e-3, ge=0, description="Weight of the squared log-ratio.")


class TrainerConfig(Section):
    """The trainer process."""

    optim: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    seq_len: int = Field(
        default=256, ge=8, description="Longest sample in tokens; engines serve the same length."
    )
    micro_batch_tokens: int = Field(
        default=8192, ge=8, description="Most padded tokens in one forward pass."
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads; none: what torch chooses."
    )


class CheckpointConfig(Section):
    """When a run can be picked up again from disk."""

    interval: int = Field(default=10, ge=1, le=1000, description="Steps between checkpoints.")
    keep_last: int = Field(default=2, ge=2, description="Checkpoints kept, at least 2.")


class RetentionConfig(Section):
    """What the store keeps besides checkpoints."""

    weights: int | Literal["all"] = Field(
        default=4, description="Versions of exported weights kept, at least 2 ('all': every one)."
    )

    @field_validator("weights", mode="before")
    @classmethod
    def _weights_are_enough(cls, value: Any) -> Any:
        if value != "all" and not (isinstance(value, int) and value >= 2):
            raise ValueError(f"must be 'all' or a whole number of at least 2, got {value!r}")
        return value


class InferenceConfig(Section):
    """vLLM engines the run starts for itself."""

    engines: int = Field(default=1, ge=1, le=64, description="Engines, one process group each.")
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences an engine runs at once.")
    kv_cache_gib: float = Field(
        default=0.5, gt=0, description="KV cache of one engine on a CPU, in GiB."
    )
    gpu_memory_utilization: float = Field(
        default=0.6, gt=0, le=1, description="Share of a GPU's memory that one engine takes."
    )
    extra_args: list[str] = Field(
        default_factory=list, description="Further vLLM flags, passed as they are."
    )
    gate_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference in canary log-probability between engine and trainer; "
        "none: 1e-4 for float32, 0.1 for bfloat16.",
    )
