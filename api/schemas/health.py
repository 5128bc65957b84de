"""How a run is, at a glance."""

from typing import Literal

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples

Verdict = Literal["healthy", "attention", "waiting", "paused", "failed", "ended"]


class HealthFinding(BaseModel):
    """Something that is the matter with a run."""

    rule: str = Field(
        description="What tells so.", examples=["no_variance", "flat_reward", "env_failing"]
    )
    level: Literal["warning", "info"] = Field(
        description="'info': worth knowing, and yet the run is healthy."
    )
    title: str = Field(description="The rule in words.")
    message: str = Field(description="What is the matter, with its figures.")
    subject: str = Field(default="", description="The env or the role that it is about.")
    advice: str = Field(description="What to do about it.")
    help: str = Field(description="The section of the documentation that says more.")


class RunHealth(BaseModel):
    """How a run is: a verdict in one sentence, and the figures of its last steps."""

    model_config = examples(
        {
            "object": "health",
            "run_id": "reverse-1a2b3c",
            "verdict": "attention",
            "message": "85 % of the rollouts of the last 10 steps teach nothing; most groups earn "
            "nothing",
            "findings": [
                {
                    "rule": "no_variance",
                    "level": "warning",
                    "title": "Groups without signal",
                    "message": "85 % of the rollouts of the last 10 steps teach nothing; most "
                    "groups earn nothing",
                    "subject": "",
                    "advice": "Make examples easier or harder.",
                    "help": "docs/reading-a-run.md#no-variance",
                }
            ],
            "step": 40,
            "seconds_per_step": 4.2,
            "seconds_left": 1512.0,
            "errors": 0.0,
            "without_signal": 0.85,
            "worst_staleness": 2,
            "waits": "the trainer waits for rollouts 62 % of the time",
        }
    )

    object: Literal["health"] = "health"
    run_id: str = Field(description="The run's id.")
    verdict: Verdict = Field(
        description="'attention': something of level 'warning' is the matter with it; 'waiting': "
        "it has not begun to step, and says for what; 'ended': it did what it was to do, or was "
        "told to stop."
    )
    message: str = Field(description="The same in words.")
    findings: list[HealthFinding] = Field(description="What is the matter, warnings first.")
    step: int = Field(description="The step that it is at.")
    seconds_per_step: float | None = Field(
        default=None, description="Of the last steps, the median from one record to the next."
    )
    seconds_left: float | None = Field(
        default=None,
        description="At that pace; none: it has ended, or goes on until it is stopped.",
    )
    errors: float | None = Field(default=None, description="Share of rollouts that failed.")
    without_signal: float | None = Field(
        default=None, description="Share of rollouts in groups that all earned the same."
    )
    worst_staleness: float | None = Field(
        default=None, description="Most versions between sampling and training."
    )
    waits: str | None = Field(default=None, description="Who waits for whom.")
