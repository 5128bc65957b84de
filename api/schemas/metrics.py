"""What a run measured, by step and by eval."""

from pydantic import BaseModel, ConfigDict, Field

from ratchet.api.schemas.common import examples


class MetricsRow(BaseModel):
    """Metrics of one trainer step."""

    model_config = examples(
        {"step": 3, "time": 1767268800.0, "metrics": {"reward/all/mean": 0.41, "loss": -0.02}}
    )
    step: int
    time: float | None = Field(description="When it was recorded (Unix time).")
    metrics: dict[str, float | None]


class EvalRecord(BaseModel):
    """One eval of one env; further fields are metrics of that eval."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [{"epoch": "10-1/reverse-text", "env": "reverse-text", "step": 10}]
        },
    )
    epoch: str
    env: str | None = None
    step: int | None = None
    problem: str | None = Field(
        default=None, description="Its record is damaged in this way, and nothing else is known."
    )
