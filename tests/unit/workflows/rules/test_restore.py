"""What a run begins with that goes on from a checkpoint: nothing collected is lost or doubled."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.activities.contracts.training import CheckpointResult, RestoreInput, RestoreResult
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE
from ratchet.activities.contracts.wire import decoded
from ratchet.configs.load import validate
from ratchet.workflows.protocol.state import (
    ArrivalsState,
    DispatchState,
    EvalEpoch,
    EvalProgress,
    EvalsState,
    GenerationState,
    HostState,
    Lease,
    Lifecycle,
    LiveConfig,
    Origin,
    Requests,
    RunState,
    ServersState,
    TrainerState,
    TrainProgress,
)
from ratchet.workflows.rules.restore import kept, restored
from ratchet.workflows.rules.sinks import TrainSink
from ratchet.workflows.rules.sources import train_counter
from tests.unit.workflows.support import config

CONFIG = config()
REF = ArtifactRef("k", "0" * 64, 1, "k")


def group(name: str) -> GroupResult:
    """A finalized group of two rollouts."""
    return GroupResult(name, "train", "a", REF, 2, 2, 0, 0.5, 2, 8, 3)


def round_trip(
    state: RunState, changes: dict[str, Any] | None = None, source: str = "run", to: str = "run+2"
) -> RunState:
    """The state that a run begins with, by way of the JSON of a checkpoint."""
    plain = CONFIG.model_dump(mode="json")
    text = json.loads(kept(state, CONFIG))
    assert text["schema"] == CHECKPOINT_STATE.current
    arg = RestoreInput(to, source)
    result = RestoreResult(CheckpointResult(7, REF), REF, text)
    after = validate({**plain, **(changes or {})})
    return restored(arg, result, decoded(RunState, text["state"]), after)


@given(
    waiting=st.integers(0, 6),
    ahead=st.sets(st.integers(0, 5), max_size=3),
    outstanding=st.lists(st.integers(30, 60), max_size=6, unique=True),
    cut=st.integers(0, 4),
    ready=st.integers(0, 3),
)
def test_every_counter_admitted_before_is_ready_or_leased_anew(
    waiting: int, ahead: set[int], outstanding: list[int], cut: int, ready: int
) -> None:
    requeued = [f"train/{n}.1" for n in range(10, 10 + waiting)]
    ahead = {n for n in ahead if n < waiting}
    flying = [f"train/{n}" for n in outstanding] + [f"train/{10 + n}.1" for n in ahead]
    lease = Lease(next_train=61, put_backs=20, ahead=sorted(20 + n for n in ahead))
    live = GenerationState(4, lease, started=True, outstanding=[*flying, "eval/5-1/a/0"])
    groups = [group(f"train/{n}") for n in range(100, 100 + cut + ready)]
    progress = TrainProgress(
        ready=groups[cut:], cut=groups[:cut], shipped_rollouts=40 + 2 * cut, shipped_batches=6
    )
    dispatch = DispatchState(1, [live], 5, requeued, requeued_before=20)
    state = RunState(Lifecycle("running"), dispatch=dispatch, train=progress)
    state.steps.step = state.steps.version = 7
    after = round_trip(state)
    dispatch = after.dispatch
    again = [train_counter(g)[0] for g in dispatch.requeued]
    assert sorted(again) == sorted([*range(10, 10 + waiting), *outstanding])
    lease = dispatch.generations[-1].lease
    assert dispatch.requeued_before == 0 == lease.put_backs
    assert lease.next_train == 61 and not lease.ahead
    assert [g.group for g in after.train.ready] == [g.group for g in groups]
    assert not after.train.cut
    assert after.train.shipped_rollouts == 40 and after.train.shipped_batches == 6 - bool(cut)
    assert TrainSink(CONFIG, after.train).collected == 2 * len(groups)
    assert dispatch.next_generation > 5
    assert not any(g.state != "closed" for g in dispatch.generations)


def test_evals_that_had_not_ended_start_over() -> None:
    epoch = EvalEpoch("4-1/a", "a", 4, 8, 1)
    state = RunState(evals=EvalsState([EvalProgress(epoch, [1, 2], [2])], count=2, fired=4))
    state.dispatch.generations = [GenerationState(0, Lease(evals={"4-1/a": 3}), state="open")]
    after = round_trip(state)
    assert after.evals.open == [EvalProgress(epoch)]
    assert not after.dispatch.generations[-1].lease.evals
    assert (after.evals.count, after.evals.fired) == (2, 4)


def test_servers_are_its_own_and_pushes_are_numbered_on() -> None:
    hosts = [
        HostState("engine", 0, "engine-0", epoch=5, up=True, verified=7, pushes=8, opened=1),
        HostState("engine", 1, "engine-1", pushes=9),
    ]
    requests = Requests(stop="enough", trouble="gate")
    after = round_trip(RunState(Lifecycle("failed"), requests, servers=ServersState(hosts)))
    (engine,) = (h for h in after.servers.hosts if h.role == "engine")
    assert (engine.epoch, engine.up, engine.verified, engine.pushes) == (0, False, -1, 9)
    assert (after.lifecycle.status, after.requests, after.steps.step) == ("paused", Requests(), 7)
    assert after.trainer == TrainerState(checkpoint=CheckpointResult(7, REF))


def test_resume_keeps_its_changes_and_a_fork_has_none() -> None:
    life = Lifecycle(created_at="t0", examples={"train/a": 9, "eval/a": 4})
    state = RunState(life, live=LiveConfig({"max_steps": 20}))
    resumed = round_trip(state, {"max_steps": 20})
    assert resumed.live.overrides == {"max_steps": 20} and resumed.lifecycle.created_at == "t0"
    assert resumed.lifecycle.origin == Origin("run", 7, "resume")
    forked = round_trip(state, {"max_steps": 20}, to="other")
    life = forked.lifecycle
    assert forked.live.overrides == {} and life.created_at == ""
    # Its draws go on over the examples that they began with; evals are counted anew.
    assert life.examples == {"train/a": 9} and resumed.lifecycle.examples["eval/a"] == 4
    assert life.origin == Origin("run", 7, "fork")


def test_a_fork_that_is_resumed_stays_one_and_a_resumed_run_names_its_last_attempt() -> None:
    fork = round_trip(RunState(), to="other")
    again = round_trip(fork, source="other", to="other+2")
    assert again.lifecycle.origin == fork.lifecycle.origin == Origin("run", 7, "fork")
    twice = round_trip(round_trip(RunState()), source="run+2", to="run+3")
    assert twice.lifecycle.origin == Origin("run+2", 7, "resume")
    assert round_trip(fork, source="other", to="third").lifecycle.origin == Origin(
        "other", 7, "fork"
    )


def test_fork_on_other_data_begins_it_anew_and_keeps_the_policy() -> None:
    progress = TrainProgress(ready=[group("train/1")], shipped_batches=7)
    generation = GenerationState(0, Lease(next_train=40))
    dispatch = DispatchState(1, [generation], 1, ["train/2.1"], drawn_below=40, overload=2)
    arrivals = ArrivalsState(90, 80, {"a": {"policy": 0.5}})
    state = RunState(train=progress, dispatch=dispatch, arrivals=arrivals)
    same = round_trip(state, {"max_steps": 99, "trainer": {"optim": {"lr": 0.5}}}, to="other")
    assert same.train.ready and same.dispatch.generations[-1].lease.next_train == 40
    other = round_trip(state, {"seed": 5}, to="other")
    begun = other.dispatch
    assert not other.train.ready and other.arrivals == ArrivalsState(90)
    assert (begun.requeued, begun.drawn_below, begun.overload) == ([], 0, 0)
    assert begun.generations[-1].lease.next_train == 0 and other.steps.version == 7
    wanted = TrainSink(CONFIG, other.train).rollouts_wanted(7)
    ahead = CONFIG.train.max_lag + 1
    assert CONFIG.train.batch_size and wanted <= CONFIG.train.batch_size * ahead, "no head start"


def test_other_ratios_hold_from_where_the_data_stood() -> None:
    generation = GenerationState(0, Lease(next_train=36))
    state = RunState(dispatch=DispatchState(1, [generation], 1, drawn_below=40))
    plain = CONFIG.model_dump(mode="json")
    envs = [{**env, "ratio": env["ratio"] + 2} for env in plain["train"]["env"][:1]]
    changed = {"train": {**plain["train"], "env": [*envs, *plain["train"]["env"][1:]]}}
    after = round_trip(state, changed)
    assert [share.start for share in after.live.shares] == [0, 40]
    assert round_trip(state).live.shares == []
