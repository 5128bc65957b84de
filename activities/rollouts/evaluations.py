"""Sums up an eval epoch from its finalized groups.

Invariant: the first record that is committed is the one that every later attempt reports.
"""

from typing import Any

from ratchet.activities.contracts.rollouts import LOST, EvalResult, FinalizeEvalInput
from ratchet.activities.envs import failures
from ratchet.activities.rollouts import groups, shipping
from ratchet.activities.scoring import evals
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.store import ArtifactStore


def finalize(store: ArtifactStore, input: FinalizeEvalInput, *, attempt: str) -> EvalResult:
    """The result of an eval epoch, whose record this or an earlier attempt commits."""
    key = keys.eval_record(input.run_id, input.epoch)
    ref = store.committed(key)
    if ref is None:
        missing = set(input.missing)
        names_of = [
            f"eval/{input.epoch}/{example}"
            for example in range(input.num_examples)
            if example not in missing
        ]
        evaluated = [
            documents.read(store, shipping.delivered(store, input.run_id, group))
            for group in names_of
        ]
        valid = [rollout for doc in evaluated for rollout in groups.eval_rollouts(doc)]
        errors = [error for doc in evaluated for error in groups.errors_of(doc)]
        total = input.num_examples * input.group_size
        lost = sum(error["type"] == LOST for error in errors)
        cancelled = lost + len(missing) * input.group_size
        errored = total - len(valid) - cancelled
        error, frames = failures.commonest(errors)
        served = set().union(*(groups.served_versions(doc) for doc in evaluated))
        rewards = [rollout.reward for rollout in valid]
        of_example = evals.by_example(valid)
        record: dict[str, Any] = {
            "epoch": input.epoch,
            "env": input.env,
            "step": input.step,
            "examples": input.num_examples,
            "group_size": input.group_size,
            "rollouts": total,
            "errored": errored,
            "cancelled": cancelled,
            "valid_rate": len(valid) / total,
            "errors": failures.by_type(errors),
            "error": error or None,
            "frames": frames,
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "mixed": sum(groups.mixed_of(doc) for doc in evaluated),
            "versions": [min(served, default=input.step), max(served, default=input.step)],
            "groups": names_of,
            "rewards": [
                of_example.get(f"eval/{input.epoch}/{example}", [])
                for example in range(input.num_examples)
            ],
            "metrics": evals.summarize(valid, errored, cancelled, input.group_size),
        }
        ref = store.put_json(key, record, attempt=attempt)
    # What was just written need not be read.
    if ref.attempt != attempt:
        record = store.get_json(ref)
    low, high = record["versions"]
    return EvalResult(
        epoch=record["epoch"],
        env=record["env"],
        step=record["step"],
        reward_mean=record["reward_mean"],
        rollouts=record["rollouts"],
        errored=record["errored"],
        versions=(low, high),
        cancelled=record.get("cancelled", 0),
        error=record.get("error") or "",
        alike=record["rollouts"] == record["errored"] and len(record.get("errors", ())) == 1,
    )
