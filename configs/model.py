"""Which policy a run trains."""

from typing import Literal

from pydantic import Field

from ratchet.configs.base import Section

DEFAULT_POLICY = "ratchet/tiny"


class ModelConfig(Section):
    """The policy: the one Ratchet makes itself, a Hugging Face folder, or a hub name."""

    name: str = Field(
        default=DEFAULT_POLICY,
        min_length=1,
        description="'ratchet/tiny' (made and warm-started on first use), a folder in Hugging "
        "Face layout, or a hub name.",
    )
    warm_start_env: str = Field(
        default="reverse-text",
        min_length=1,
        description="The environment whose warm split 'ratchet/tiny' is warm-started on.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Weights' dtype in trainer and engines."
    )
    renderer: str = Field(
        default="ratchet-chatml",
        min_length=1,
        description="'ratchet-chatml' (exact multi-turn bridge for ChatML tokenizers) or the name "
        "of a renderer that the renderers package ships.",
    )
