"""The evidence of a small run in which nothing went wrong, for tests to spoil."""

from typing import Any

from ratchet.activities.contracts import names
from tests.chaos.history import Activity, Evidence, Signal

RUN = "chaos-1"
EPOCH = 4
"""Train examples of the env."""
STEPS = 2
GROUPS_PER_STEP = 2


def ref(key: str) -> dict[str, Any]:
    """A reference whose sha256 is made of its key."""
    return {"key": key, "sha256": f"sha-{key}", "size": 1, "path": f"{key}@x", "attempt": "a"}


def activity(name: str, given: dict[str, Any], result: Any = None, **fields: Any) -> Activity:
    """A completed activity of the run."""
    made = Activity(RUN, name, "ratchet-queue", given, 0.0, outcome="completed", result=result)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def rollouts(group: str, example: int, version: int = 0) -> Activity:
    """A group that was sent out."""
    work = {"group": group, "kind": "train", "env": "e", "example": example, "size": 2}
    given = {"work": work, "engine": {"version": version, "index": 0, "epoch": 1}}
    return activity(names.RUN_ROLLOUTS, given, workflow=f"{RUN}/dispatch/0")


def result(group: str, **fields: Any) -> dict[str, Any]:
    """A delivered group."""
    good = {"group": group, "cancelled": "", "errored": 0, "size": 2, "survivors": 2, "error": ""}
    return {**good, **fields}


def report(seq: int, *groups: dict[str, Any]) -> Signal:
    """A report of generation 0."""
    return Signal(
        RUN, "dispatch_report", {"generation": 0, "seq": seq, "groups": list(groups)}, 0.0
    )


def push(version: int, number: int, **fields: Any) -> Activity:
    """A verified push to engine 0, epoch 1."""
    given = {"version": version, "push": number, "engine_index": 0, "engine_epoch": 1}
    return activity(
        names.SYNC_WEIGHTS, given, {"label": f"{version}.{number}a", "rejected": []}, **fields
    )


def good_run() -> Evidence:
    """Two steps of two groups each, from an epoch of four examples."""
    found = Evidence(RUN)
    found.activities.append(push(0, 1))
    found.activities.append(activity(names.LOAD_TRAINER, {}, {"step": 0}))
    counter = 0
    for step in range(1, STEPS + 1):
        groups = [f"train/{counter + k}" for k in range(GROUPS_PER_STEP)]
        for k, group in enumerate(groups):
            found.activities.append(rollouts(group, (counter + k) % EPOCH, version=step - 1))
        found.signals.append(report(step, *(result(group) for group in groups)))
        batch = ref(f"batch-{step}")
        given = {"step": step, "groups": groups}
        found.activities.append(activity(names.SHIP_BATCH, given, {"ref": batch}))
        trained = {"step": step, "batch": batch}
        found.activities.append(activity(names.TRAIN_STEP, trained, {"step": step}))
        found.activities.append(push(step, step + 1))
        found.memos.append((float(step), {"policy_version": step, "step": step}))
        counter += GROUPS_PER_STEP
    return found
