"""What a run of a config would do, in numbers."""

from pydantic import BaseModel, Field


class PlannedEval(BaseModel):
    """The evals of one env."""

    env: str
    interval: int = Field(description="Steps from one to the next; the last step has one, too.")
    count: int = Field(description="Evals over the whole run.")
    rollouts: int = Field(description="Rollouts of each.")


class Plan(BaseModel):
    """What would be started and done."""

    steps: int
    rollouts_per_step: int | None = Field(description="None: batches are counted in tokens.")
    groups_per_step: dict[str, float] | None = Field(
        description="By train env, on average, from their ratios and group sizes."
    )
    train_rollouts: int | None = Field(description="Over the whole run, at least.")
    permits: int | None = Field(description="Rollouts at once; none: what the engines can bear.")
    algorithms: dict[str, str] = Field(description="By train env.")
    evals: list[PlannedEval]
    checkpoints: int
    servers: dict[str, list[str]] = Field(description="Servers that would be started, by role.")
