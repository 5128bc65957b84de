"""Evals of the same examples against each other, from their records. Everything blocks."""

from dataclasses import asdict, dataclass
from typing import Any

from ratchet.activities.contracts.eval_stats import (
    Rewards,
    compare,
    estimate,
    scores,
    solved_or_not,
)
from ratchet.activities.contracts.names import workflow_of
from ratchet.api.schemas.evals import ComparedEval, DifferingExample, Estimate, EvalComparison
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import rollout_id

MOST_DIFFERING = 100
SAME_EXAMPLES = ("id", "args", "path")
"""Keys of an env that decide what its examples are."""


@dataclass(frozen=True)
class Side:
    """A run and the step whose evals are meant; None: the last one."""

    run_id: str
    step: int | None = None


def eval_envs(records: Records, run_id: str) -> list[str]:
    """Names of a run's eval envs."""
    config = records.config(run_id)
    return [env.name for env in config.eval.env] if config else []


def compared(
    records: Records, this: Side, other: Side, env: str, k: int | None = None
) -> EvalComparison:
    """The evals of an env at two sides: their mean rewards, or with a `k` pass@k."""
    (my_attempt, mine), (their_attempt, theirs) = (
        _last(records, side, env) for side in (this, other)
    )
    # What a damaged or very old record lacks, `problem` names.
    sizes = sorted({it["group_size"] for it in (mine, theirs) if it and "rewards" in it})
    metric = f"pass@{k}" if k is not None else f"avg@{' and '.join(map(str, sizes)) or 'n'}"
    problem = (
        _other_examples(records, (this, my_attempt), (other, their_attempt), env)
        or _unusable(this, mine, k)
        or _unusable(other, theirs, k)
    )
    if mine is None or theirs is None or problem:
        return EvalComparison(env=env, metric=metric, problem=problem)
    shown = EvalComparison(
        env=env,
        metric=metric,
        this=_side(records, this, mine, k),
        other=_side(records, other, theirs, k),
    )
    if (this.run_id, mine["epoch"]) == (other.run_id, theirs["epoch"]):
        text = f"{this.run_id} has one result of this eval; name another run, or another step"
        return shown.model_copy(update={"problem": text})
    pair = compare(_rewards(theirs), _rewards(mine), k)
    if pair is None:
        return shown.model_copy(update={"problem": "no example counts in both"})
    return shown.model_copy(
        update={
            "examples": pair.wins + pair.losses + pair.ties,
            "difference": Estimate(**asdict(pair.difference)),
            "wins": pair.wins,
            "losses": pair.losses,
            "ties": pair.ties,
            "differ": [
                DifferingExample(
                    example=example,
                    score=score,
                    other_score=other_score,
                    rollouts=_rollouts(mine, example),
                    other_rollouts=_rollouts(theirs, example),
                )
                for example, other_score, score in pair.differ[:MOST_DIFFERING]
            ],
        }
    )


def _last(records: Records, side: Side, env: str) -> tuple[str | None, dict[str, Any] | None]:
    """The last sound record of an env at a side's step, or at any, and which attempt holds it."""
    found = [
        (attempt, record)
        for attempt, record in records.held_evals(side.run_id)
        if record.get("env") == env
        and not record.get("problem")
        and side.step in (None, record.get("step"))
    ]
    newest = max(found, key=lambda held: (held[1]["step"], _count(held[1])), default=None)
    return newest or (None, None)


def _count(record: dict[str, Any]) -> int:
    """Which eval of its run it is, of '<step>-<count>/<env>'."""
    count = str(record["epoch"]).partition("/")[0].partition("-")[2]
    return int(count) if count.isdecimal() else 0


def _rewards(record: dict[str, Any]) -> Rewards:
    return dict(enumerate(record["rewards"]))


def _side(records: Records, side: Side, record: dict[str, Any], k: int | None) -> ComparedEval:
    config, counted = records.config(side.run_id), scores(_rewards(record), k)
    return ComparedEval(
        run_id=side.run_id,
        model=config.model.name if config else None,
        step=record["step"],
        epoch=record["epoch"],
        rollouts_per_example=record["group_size"],
        examples=len(counted),
        score=Estimate(**asdict(estimate([*counted.values()]))) if counted else None,
    )


def _other_examples(
    records: Records, this: tuple[Side, str | None], other: tuple[Side, str | None], env: str
) -> str | None:
    """Why example n of one side may not be example n of the other; None if it is. An attempt is
    the one that holds a side's record: a fork may have changed an env that it has evals of.
    """
    sections, names = [], []
    for side, attempt in (this, other):
        config = records.config_of(attempt) if attempt else records.config(side.run_id)
        if config is None or env not in [section.name for section in config.eval.env]:
            return f"{side.run_id} has no eval env {env!r}"
        sections.append(config.env(env, "eval"))
        names.append(workflow_of(attempt) if attempt else side.run_id)
    one, another = sections
    differing = [key for key in SAME_EXAMPLES if getattr(one, key) != getattr(another, key)]
    if not differing:
        return None
    keys = " and ".join(differing)
    return (
        f"{keys} of eval env {env!r} differ between {names[0]} and {names[1]}, so that "
        "their examples may differ, too; evaluate both models by one config, with `ratchet eval`"
    )


def _unusable(side: Side, record: dict[str, Any] | None, k: int | None) -> str | None:
    """Why a record cannot be compared; None if it can."""
    if record is None:
        if side.step is None:
            return f"{side.run_id} has no result of this eval yet"
        steps = f"`ratchet runs evals {side.run_id}` lists its evals"
        return f"{side.run_id} has no result of this eval at step {side.step}; {steps}"
    if record.get("rewards") is None:
        return (
            f"the eval {record['epoch']} of {side.run_id} was recorded by an older build, which "
            "kept no rewards by example; evaluate that version again, with `ratchet eval`"
        )
    if k is not None and k > record["group_size"]:
        return (
            f"pass@{k} needs {k} rollouts of each example, but the eval of {side.run_id} has "
            f"{record['group_size']}; use a smaller k, or evaluate with eval.group_size={k}"
        )
    if k is not None and not solved_or_not(_rewards(record)):
        return (
            f"pass@{k} needs rewards of 0 or 1, but the eval of {side.run_id} has others; "
            "compare the mean rewards, without k"
        )
    return None


def _rollouts(record: dict[str, Any], example: int) -> list[str]:
    group = f"eval/{record['epoch']}/{example}"
    return [rollout_id(group, index) for index in range(record["group_size"])]
