"""Two evals of the same examples, one against the other."""

from typing import Any

from pydantic import BaseModel, Field

from ratchet.api.schemas.common import examples

ESTIMATE: dict[str, Any] = {"mean": 0.61, "low": 0.52, "high": 0.7}
COMPARED: dict[str, Any] = {
    "run_id": "reverse-1a2b3c",
    "model": "run:reverse-9f8e7d@40",
    "step": 0,
    "epoch": "0-0/reverse-text",
    "rollouts_per_example": 4,
    "examples": 200,
    "score": ESTIMATE,
}
DIFFERING: dict[str, Any] = {
    "example": 17,
    "score": 1.0,
    "other_score": 0.25,
    "rollouts": ["eval:0-0:reverse-text:17:0"],
    "other_rollouts": ["eval:0-0:reverse-text:17:0"],
}


class Estimate(BaseModel):
    """A mean over examples with its 95 % confidence interval, of standard errors clustered by
    example.
    """

    model_config = examples(ESTIMATE)
    mean: float = Field(description="The mean.")
    low: float | None = Field(
        default=None,
        description="Lower bound. Null, as is the upper one, if the spread is unknown: with fewer "
        "than five examples, or if all are alike.",
    )
    high: float | None = Field(default=None, description="Upper bound.")


class ComparedEval(BaseModel):
    """One of the two evals."""

    model_config = examples(COMPARED)
    run_id: str = Field(description="The run.")
    model: str | None = Field(description="The model that it began with, as its config names it.")
    step: int = Field(description="The step that was evaluated.")
    epoch: str = Field(description="The eval's id, '<step>-<count>/<env>'.")
    rollouts_per_example: int = Field(description="Rollouts of each example, failed ones too.")
    examples: int = Field(description="Examples that count: those with enough rewards.")
    score: Estimate | None = Field(description="Over all of its examples; null: none counts.")


class DifferingExample(BaseModel):
    """An example on which the two differ."""

    model_config = examples(DIFFERING)
    example: int = Field(description="Its index in the env's tasks.")
    score: float = Field(description="This run's score.")
    other_score: float = Field(description="The other's.")
    rollouts: list[str] = Field(description="Ids of this run's rollouts of it.")
    other_rollouts: list[str] = Field(description="Ids of the other's.")


class EvalComparison(BaseModel):
    """Two evals of one env, pairwise: on the examples that count in both."""

    model_config = examples(
        {
            "env": "reverse-text",
            "metric": "avg@4",
            "this": COMPARED,
            "other": COMPARED,
            "problem": None,
            "examples": 200,
            "difference": {"mean": 0.08, "low": 0.02, "high": 0.14},
            "wins": 41,
            "losses": 25,
            "ties": 134,
            "differ": [DIFFERING],
        }
    )
    env: str = Field(description="The env.")
    metric: str = Field(
        description="'avg@n', the mean reward of n rollouts an example, or 'pass@k'."
    )
    this: ComparedEval | None = Field(default=None, description="This run's eval.")
    other: ComparedEval | None = Field(default=None, description="The other's.")
    problem: str | None = Field(
        default=None,
        description="Why they cannot be compared, and what would help; null: they are.",
    )
    examples: int = Field(default=0, description="Examples that count in both.")
    difference: Estimate | None = Field(
        default=None, description="This less the other, on average over those examples, paired."
    )
    wins: int = Field(default=0, description="Examples on which this one is better.")
    losses: int = Field(default=0, description="Examples on which the other is better.")
    ties: int = Field(default=0, description="Examples on which they are alike.")
    differ: list[DifferingExample] = Field(
        default_factory=list,
        description="Examples on which they differ, the largest difference first; at most 100.",
    )
