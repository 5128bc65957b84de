"""What a run leaves in the store: checkpoints, configs, batches."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples

ATTEMPT = "The attempt of a run that it belongs to: a run's id, with '+2' and so on for later ones."


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
            "sound": True,
            "problem": None,
        }
    )
    object: Literal["checkpoint"] = "checkpoint"
    step: int
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None
    size: int = Field(description="Bytes of all its files.")
    sha256: str = Field(description="Hash of its manifest, which has the hash of every file.")
    sound: bool = Field(
        description="Whether its manifest is the one committed and every file has its size; with "
        "`verify=true` also whether every file has its hash."
    )
    problem: str | None = Field(default=None, description="What is wrong with it.")


class ConfigRevision(BaseModel):
    """The config as it held from some moment on."""

    revision: int = Field(description="0: the one that the attempt began with.")
    created_at: datetime | None


class RunConfigView(BaseModel):
    """A run's resolved config, every default written out."""

    object: Literal["config"] = "config"
    run_id: str
    attempt: str = Field(description=ATTEMPT)
    revision: int
    revisions: list[ConfigRevision]
    changes: dict[str, Any] = Field(description="All changes that were made while the run ran.")
    config: dict[str, Any]


class Batch(BaseModel):
    """A batch as the trainer saw it; the file is Parquet, one row per training sample."""

    object: Literal["batch"] = "batch"
    step: int
    attempt: str = Field(description=ATTEMPT)
    created_at: datetime | None
    size: int = Field(description="Bytes of the file.")
    sha256: str
    path: str = Field(description="Where the file lies, relative to the artifact store.")
    problem: str | None = Field(
        default=None, description="What is wrong with its marker; the file itself is not looked at."
    )
