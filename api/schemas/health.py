"""The health of a run, at a glance."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples

Verdict = Literal["healthy", "attention", "waiting", "paused", "failed", "ended"]


class HealthFinding(BaseModel):
    """A problem with a run, or something worth knowing about it."""

    rule: str = Field(
        description="Its rule.", examples=["no_variance", "flat_reward", "env_failing"]
    )
    level: Literal["warning", "info"] = Field(
        description="'info': worth knowing, but the run is healthy."
    )
    title: str = Field(description="The name of the rule, for people.")
    message: str = Field(description="The problem, with its figures.")
    subject: str = Field(default="", description="The env or the role concerned.")
    advice: str = Field(description="What to do about it.")
    help: str = Field(description="The section of the documentation that explains it.")
    since_step: int | None = Field(
        default=None, description="The step at which it began; null: not known."
    )
    since: datetime | None = Field(default=None, description="When it began; null: not known.")
    since_earlier: bool = Field(
        default=False,
        description="Whether it may have begun before that: the last 50 steps are looked at.",
    )


class RunHealth(BaseModel):
    """A run's health: a verdict in one sentence, and the figures of its last steps."""

    model_config = examples(
        {
            "object": "health",
            "run_id": "reverse-1a2b3c",
            "verdict": "attention",
            "message": "85 % of the rollouts of the last 10 steps carry no signal; most groups "
            "earn no reward",
            "findings": [
                {
                    "rule": "no_variance",
                    "level": "warning",
                    "title": "Groups without signal",
                    "message": "85 % of the rollouts of the last 10 steps carry no signal; "
                    "most groups earn no reward",
                    "subject": "",
                    "advice": "Make examples easier or harder.",
                    "help": "docs/reading-a-run.md#no-variance",
                    "since_step": 37,
                    "since": "2026-01-01T12:01:00Z",
                    "since_earlier": False,
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
        description="'attention': there is a finding of level 'warning'; 'waiting': it has not "
        "begun to train, and the message says what it waits for; 'ended': it finished, or was "
        "stopped."
    )
    message: str = Field(description="The verdict in a sentence.")
    findings: list[HealthFinding] = Field(description="All findings, warnings first.")
    step: int = Field(description="Trainer steps done.")
    seconds_per_step: float | None = Field(
        default=None, description="Median time between records of the last steps."
    )
    seconds_left: float | None = Field(
        default=None,
        description="At that pace; null: it has ended, or runs until it is stopped.",
    )
    errors: float | None = Field(default=None, description="Share of rollouts that failed.")
    without_signal: float | None = Field(
        default=None,
        description="Share of rollouts with advantage 0, also of those that the filter "
        "zero_advantage removed before the batch.",
    )
    worst_staleness: float | None = Field(
        default=None, description="Most policy versions between sampling and training."
    )
    waits: str | None = Field(default=None, description="Who waits for whom.")
