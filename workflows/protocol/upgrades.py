"""How the run's state and the inputs of workflows from older builds are read. Pure.

Runs outlive the code that began them: their state crosses builds by continue-as-new and in
checkpoints, and the input of an execution is decoded again whenever a worker replays it. Each has a
number and one table here; the input of hosts and the documents of a checkpoint have theirs in
`activities/contracts/upgrades.py`, the config in `configs/upgrades.py`.

When a field of one of these classes, or of a class in it, is added, renamed, moved or removed, or
changes its meaning (a unit test notices all but the last):

1. Add `<what>_from_<n>_to_<n + 1>` here and enter it in each table whose data holds the field: a
   `Lease` is in the run's state and in the input of Dispatch. It takes and returns the JSON of
   `pydantic_core.to_json`, and does not change its argument. For an added field it sets the value
   that matches former behaviour; defaults are not filled in.
2. Record the new shape (`tests/recorded/README.md`), and leave recorded items alone: each must
   still be read.
3. Signals (`Control`, `DispatchReport`, `HostReport`, `EngineLoad`, `Released`) have no number
   (`activities/contracts/versioned.py`): a replay reads old ones with the current classes. So a
   field that a signal carries keeps its name, and a new one has a default.

A worker that meets a newer number fails the workflow task, which Temporal retries until a worker of
the newer build takes it; the run waits meanwhile and loses nothing.
"""

from ratchet.configs.versions import Document, Versions, unchanged


def run_state_from_0_to_1(state: Document) -> Document:
    """Schema 1 is the first with a number. Earlier builds added `wished_evals`, and `waits` of a
    host, so that the state of a run may lack them: no eval was requested, and no host waited.
    """
    hosts = [{"waits": "", **host} for host in state["hosts"]]
    return {"wished_evals": [], **state, "hosts": hosts}


_PARTS = {
    "lifecycle": "status attempt created_at started_at finished_at end_reason examples origin",
    "requests": "stop pause pause_reason checkpoint=checkpoint_wanted trouble",
    "live": "overrides revision=config_revision pending=config_pending shares",
    "permits": "limits controller=concurrency",
    "servers": "hosts policy_origin weights target_version rejected_labels",
    "dispatch": "control_seq generations next_generation requeued=put_backs "
    "requeued_before=put_backs_before drawn_below deaths=generation_deaths "
    "stale_in_flight=train.stale_in_flight stale_in_queue=train.stale_in_queue "
    "overload=train.overload",
    "train": "ready=train.ready cut=train.cut shipped_rollouts=train.shipped_rollouts "
    "shipped_batches=train.shipped_batches counted_rollouts=train.counted_rollouts "
    "counted_tokens=train.counted_tokens lost=train.lost delivered=train.delivered "
    "empty_groups=train.barren empty_batches=train.empty_batches "
    "empty_filters=train.barren_filters last_error=train.last_error",
    "arrivals": "rollouts ok_rollouts=train.ok_rollouts baselines",
    "evals": "open=evals count=eval_count requested=wished_evals fired last=last_eval "
    "rollouts=eval_rollouts",
    "steps": "step version next_version shipped reward totals alarm",
    "trainer": "epoch=trainer_epoch step=trainer_step losses=trainer_losses checkpoint batches "
    "older",
    "outages": "holds",
}
"""Parts of the run's state in schema 2: their keys, and what schema 1 called them."""


def run_state_from_1_to_2(state: Document) -> Document:
    """Schema 2 has a part for each class that keeps state, where schema 1 was flat; no value
    changes. Keys that schema 1 does not know are left in place, to be refused.
    """
    flat = {key: value for key, value in state.items() if key not in ("train", "curriculum")}
    flat |= {f"train.{key}": value for key, value in state.get("train", {}).items()}
    parts: Document = {part: {} for part in _PARTS}
    for part, keys in _PARTS.items():
        for key, _, before in (name.partition("=") for name in keys.split()):
            if (before or key) in flat:
                parts[part][key] = flat.pop(before or key)
    curriculum = {key: state[key] for key in ("curriculum",) if key in state}
    return {**flat, **parts, **curriculum}


def dispatch_input_from_2_to_3(input: Document) -> Document:
    """Every group was reported at once."""
    return {**input, "control": {**input["control"], "missing": 0, "heard": -1}}


def dispatch_input_from_1_to_2(input: Document) -> Document:
    """Train groups in flight were never cancelled at the last batch."""
    return {**input, "control": {**input["control"], "train_over": False}}


def run_input_from_1_to_2(input: Document) -> Document:
    """The cores that envs have were not known."""
    return {**input, "cores": 0}


def run_state_from_2_to_3(state: Document) -> Document:
    """There were no warnings, and errors were not counted by env and type. Results of evals always
    had a reward, and have nothing more now.
    """
    train = {
        key: [{"errors": {}, **group} for group in value] if key in ("ready", "cut") else value
        for key, value in state["train"].items()
    }
    return {
        **state,
        "lifecycle": {**state["lifecycle"], "warnings": []},
        "train": train,
        "arrivals": {**state["arrivals"], "counts": {}},
        "dispatch": {**state["dispatch"], "cancelled": {}},
    }


def run_state_from_3_to_4(state: Document) -> Document:
    """The best result of an env was not recorded; the last one is the best that is known."""
    best = {
        env: {"step": int(last["step"]), "reward": last["reward"]}
        for env, last in state["evals"].get("last", {}).items()
        if last["reward"] is not None
    }
    return {**state, "evals": {**state["evals"], "best": best, "finalizing": []}}


RUN_STATE = Versions(
    "the run's state",
    {
        0: run_state_from_0_to_1,
        1: run_state_from_1_to_2,
        2: run_state_from_2_to_3,
        3: run_state_from_3_to_4,
    },
)
RUN_INPUT = Versions("the input of TrainingRun", {0: unchanged, 1: run_input_from_1_to_2})
DISPATCH_INPUT = Versions(
    "the input of Dispatch",
    {0: unchanged, 1: dispatch_input_from_1_to_2, 2: dispatch_input_from_2_to_3},
)
HOST_WORKFLOW_INPUT = Versions("the input of Host", {0: unchanged})
