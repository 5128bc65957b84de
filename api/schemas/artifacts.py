"""What a run leaves in the store: checkpoints, configs, batches."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples

COMMITTED = "When it was committed to the store."
ATTEMPT = "The attempt it belongs to: the run's id, with '+2' and so on for later attempts."


class Checkpoint(BaseModel):
    """A committed checkpoint: weights, optimizer, and the run's durable state."""

    model_config = examples(
        {
            "object": "checkpoint",
            "step": 10,
            "attempt": "reverse-1a2b3c",
            "created_at": "2026-01-01T12:01:00Z",
            "size": 5542243,
            "sha256": "74fd748bbc94d9638713a81678cde4cdfcbe8dfc4794f77c3d8fa2ea152e6c49",
            "path": "runs/reverse-1a2b3c/checkpoints/step-00000010@4f21",
            "sound": True,
            "problem": None,
        }
    )
    object: Literal["checkpoint"] = "checkpoint"
    step: int = Field(description="Trainer steps done when it was written.")
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None = Field(description=COMMITTED)
    size: int = Field(description="Total size of its files in bytes.")
    sha256: str = Field(description="Hash of its manifest, which lists the hash of every file.")
    path: str = Field(
        default="",
        description="The folder of its files, relative to the artifact store. `GET "
        "/v1/runs/RUN/model?step=…` returns the files that make up a model.",
    )
    sound: bool = Field(
        description="Whether its manifest is the committed one and every file has its recorded "
        "size; with `verify=true` also whether every file has its recorded hash."
    )
    problem: str | None = Field(default=None, description="Why it is not sound; null if it is.")


class ConfigRevision(BaseModel):
    """The config as it was from some moment on."""

    model_config = examples({"revision": 0, "created_at": "2026-01-01T12:00:00Z"})
    revision: int = Field(description="0: the config that the attempt began with.")
    created_at: datetime | None = Field(description=COMMITTED)


class RunConfigView(BaseModel):
    """A run's resolved config, with all defaults filled in."""

    model_config = examples(
        {
            "object": "config",
            "run_id": "reverse-1a2b3c",
            "attempt": "reverse-1a2b3c",
            "revision": 0,
            "revisions": [{"revision": 0, "created_at": "2026-01-01T12:00:00Z"}],
            "changes": {"dispatch": {"max_inflight_rollouts": 128}},
            "config": {"name": "reverse", "max_steps": 40, "seed": 0},
        }
    )
    object: Literal["config"] = "config"
    run_id: str = Field(description="The run.")
    attempt: str = Field(description=ATTEMPT)
    revision: int = Field(description="The revision shown.")
    revisions: list[ConfigRevision] = Field(description="All revisions.")
    changes: dict[str, Any] = Field(description="All changes made while the run was running.")
    config: dict[str, Any] = Field(description="The config, in the form `POST /v1/runs` accepts.")


class Batch(BaseModel):
    """A batch as the trainer saw it; the file is Parquet, one row per training sample."""

    model_config = examples(
        {
            "object": "batch",
            "step": 3,
            "attempt": "reverse-1a2b3c",
            "created_at": "2026-01-01T12:01:00Z",
            "size": 18432,
            "sha256": "74fd748bbc94d9638713a81678cde4cdfcbe8dfc4794f77c3d8fa2ea152e6c49",
            "path": "runs/reverse-1a2b3c/batches/step-00000003.parquet@4f21",
            "problem": None,
        }
    )
    object: Literal["batch"] = "batch"
    step: int = Field(description="The step that trains on it.")
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None = Field(description=COMMITTED)
    size: int = Field(description="Size of the file in bytes.")
    sha256: str = Field(description="Hash of the file.")
    path: str = Field(description="Path of the file, relative to the artifact store.")
    problem: str | None = Field(
        default=None, description="Why its marker is damaged; the file itself is not checked."
    )


class ModelFile(BaseModel):
    """A file of a model."""

    name: str = Field(description="Path within the model's folder.")
    size: int = Field(description="Bytes.")
    sha256: str = Field(description="Hash of the file.")


class Model(BaseModel):
    """A version of a run's policy, as a folder in Hugging Face layout."""

    model_config = examples(
        {
            "object": "model",
            "run_id": "reverse-1a2b3c",
            "step": 30,
            "chosen": "best",
            "best_of": "reverse-text",
            "evals": {"reverse-text": 0.61},
            "attempt": "reverse-1a2b3c",
            "kept_as": "weights",
            "kind": "model",
            "path": "runs/reverse-1a2b3c/weights/v00000030@7c1e",
            "size": 1843712,
            "files": [
                {
                    "name": "model.safetensors",
                    "size": 1843712,
                    "sha256": "74fd748bbc94d9638713a81678cde4cdfcbe8dfc4794f77c3d8fa2ea152e6c49",
                }
            ],
            "steps": [0, 20, 29, 30],
            "card": "---\nlibrary_name: transformers\n---\n\n# reverse-1a2b3c, step 30\n",
        }
    )
    object: Literal["model"] = "model"
    run_id: str = Field(description="The run.")
    step: int = Field(description="Trainer steps behind it, which is also its policy version.")
    chosen: Literal["step", "best", "checkpoint", "newest"] = Field(
        description="Why this version: it was requested by step, or as the best of an eval; "
        "otherwise it is the last checkpoint or, if the run has none, the newest version."
    )
    best_of: str | None = Field(default=None, description="With 'best': the eval.")
    evals: dict[str, float] = Field(description="Its mean reward in each eval that it had.")
    attempt: str = Field(description=ATTEMPT)
    kept_as: Literal["weights", "checkpoint"] = Field(
        description="'weights': as exported for the engines, in their dtype; 'checkpoint': the "
        "trainer's own weights, in float32."
    )
    kind: Literal["model", "adapter"] = Field(
        default="model",
        description="'model': all weights; 'adapter': a LoRA adapter that peft loads on the base.",
    )
    merged_card: str | None = Field(
        default=None,
        description="Of an adapter: the model card of the whole model that it makes once it is "
        "merged into version 0.",
    )
    path: str = Field(description="The folder with its files, relative to the artifact store.")
    size: int = Field(description="Total size of its files in bytes.")
    files: list[ModelFile] = Field(description="The files that make up the model, by name.")
    steps: list[int] = Field(description="All versions of the run that are still kept.")
    card: str = Field(
        description="Model card (Markdown): base model and its licence, lineage, curves, evals and "
        "config."
    )
