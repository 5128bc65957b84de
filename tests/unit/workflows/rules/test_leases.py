"""What the run takes of its generations' reports, and when it cuts a batch."""

from dataclasses import replace
from typing import Any

import pytest

from docs.step_metrics import undescribed
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import PolicyResult
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import DispatchReport
from ratchet.workflows.protocol.state import (
    EvalProgress,
    HostState,
    Lease,
    Lifecycle,
    PermitsState,
    RunState,
    ServersState,
    ShippedBatch,
)
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.rules.shipping import Shipping
from ratchet.workflows.rules.sinks import TrainSink
from tests.unit.workflows.support import EPOCH, EXAMPLES, config, delivered

CONFIG = config()
POOL, RANGE = "difficulty_pool", "advantage_range"
WEIGHTS = ArtifactRef("w", "0", 1, "w")


class Run:
    """A run at version 0 with two verified engines."""

    def __init__(self, config: RunConfig = CONFIG) -> None:
        self.hosts = [
            HostState("engine", k, f"engine-{k}", epoch=1, up=True, verified=0) for k in range(2)
        ]
        self.state = state = RunState(
            Lifecycle("running", examples=EXAMPLES),
            permits=PermitsState(limits_of(config)),
            servers=ServersState(self.hosts),
        )
        state.steps.version = 0
        self.woken = 0
        fleet, sink = Fleet(self.hosts), TrainSink(config, state.train)
        curriculum = Curriculum(config, EXAMPLES, state.curriculum)
        self.leases = Leases(config, state, fleet, sink, curriculum, self.wake)
        self.pushes = Pushes(state.servers, fleet, self.wake)
        self.pushes.begin(PolicyResult(WEIGHTS, 1, "origin"))
        self.shipping = Shipping(config, state, sink, self.leases, self.pushes)
        self.sink = sink

    def wake(self) -> None:
        self.woken += 1

    def fill(self, **changes: Any) -> None:
        for n in range(4):
            self.sink.add(delivered(f"train/{n}", **changes))


def report(seq: int, **changes: Any) -> DispatchReport:
    """A report of generation 0."""
    return DispatchReport(0, seq, changes.pop("state", "open"), **changes)


def test_a_report_counts_once_and_an_old_one_changes_nothing() -> None:
    run = Run()
    generation = run.leases.open("t0")
    assert run.leases.on_report(report(0, outstanding=["train/0"]), "t1")
    assert run.leases.on_report(report(1, outstanding=["train/1"], lease=Lease(3)), "t2")
    for again in (report(1, outstanding=[]), report(0, outstanding=[])):
        assert not run.leases.on_report(again, "t3")
    assert generation.outstanding == ["train/1"] and generation.heard_at == "t2"
    assert run.leases.on_report(report(2, state="closed"), "t4")
    assert not run.leases.on_report(report(3), "t5"), "it is over"
    assert not run.leases.on_report(DispatchReport(7, 0, "open"), "t6"), "none of this run"


def test_what_a_dead_generation_had_in_flight_is_rolled_out_under_the_same_ids() -> None:
    run = Run()
    generation = run.leases.open("t0")
    run.leases.on_report(report(0, outstanding=["train/0", "eval/0-0/a/1"], lease=Lease(5)), "t1")
    run.woken = 0
    assert run.leases.on_death(generation) == ["train/0", "eval/0-0/a/1"] and run.woken
    assert run.state.dispatch.deaths == 1 and not run.leases.live
    requeued = list(run.state.dispatch.requeued)
    assert run.leases.on_death(generation) is None, "two who look at it may find it gone at once"
    assert run.state.dispatch.deaths == 1 and run.state.dispatch.requeued == requeued
    following = run.leases.open("t2")
    assert following.lease == Lease(5) and following.number == 1
    assert run.leases.control(1).put_backs == ["train/0", "eval/0-0/a/1"]
    run.leases.on_report(DispatchReport(1, 0, "open", lease=Lease(5, put_backs=1)), "t3")
    assert run.state.dispatch.requeued == ["eval/0-0/a/1"]
    assert run.leases.control(1).put_backs_before == 1


@pytest.mark.parametrize(
    ("cause", "requeued"),
    [("stop", []), ("pause", ["train/3"]), ("stale", ["train/3.1"]), ("overload", ["train/3.1"])],
)
def test_a_group_that_was_given_up_goes_on_by_its_cause(cause: Any, requeued: list[str]) -> None:
    run, group = Run(), delivered("train/3")
    run.leases.on_cancelled(type(group)(**{**group.__dict__, "cancelled": cause}))
    assert run.state.dispatch.requeued == requeued
    counts = run.leases.metrics()
    assert not undescribed(counts)
    assert counts["off_policy/dropped/in_flight"] == (cause == "stale")
    assert counts["dispatcher/cancelled/overload"] == (cause == "overload")
    by_env = {name: n for name, n in counts.items() if name.startswith("cancelled/")}
    assert by_env == ({} if cause == "stop" else {f"cancelled/a/{cause}": 1})
    assert not any(run.leases.metrics().values())


def test_older_generations_keep_the_permits_that_they_use() -> None:
    run = Run()
    whole = run.state.permits.limits.permits
    run.leases.open("t0")
    run.leases.on_report(report(0, state="tail", reserved=3), "t1")
    run.leases.open("t2")
    assert (run.leases.control(0).permits, run.leases.control(1).permits) == (whole, whole - 3)
    run.leases.on_report(report(1, state="closed", reserved=0), "t3")
    assert run.leases.control(1).permits == whole


def test_train_groups_stand_back_for_evals_only_without_overlap() -> None:
    for overlap in (True, False):
        run = Run(config(eval={"env": [{"id": "a"}], "overlap": overlap}))
        run.leases.open("t0")
        assert run.leases.control(0).train_limit > 0
        run.state.evals.open.append(EvalProgress(EPOCH))
        assert (run.leases.control(0).train_limit > 0) == overlap


@pytest.mark.parametrize("ends_train", [True, False])
def test_train_is_over_once_the_last_batch_is_shipped(ends_train: bool) -> None:
    run, batch = Run(), ShippedBatch(CONFIG.max_steps, WEIGHTS, {}, None, 0.0)
    run.leases.ends_train = ends_train
    run.state.steps.step = CONFIG.max_steps - 1
    run.state.train.lost = 100
    assert not run.shipping.all_shipped
    control = run.leases.control(0)
    assert not control.train_over and control.train_limit > 0
    run.state.steps.shipped = [batch]
    assert run.shipping.all_shipped
    control = run.leases.control(0)
    assert control.train_over == ends_train
    assert (control.train_limit == 0) == ends_train, "a run of an older build goes on as it began"
    run.leases.on_cancelled(replace(delivered("train/3"), cancelled="pause"))
    assert run.state.dispatch.requeued == ["train/3"], "it goes on if the run is made longer"
    counted = "cancelled/a/surplus" if ends_train else "cancelled/a/pause"
    assert run.leases.metrics()[counted] == 1


def test_a_generation_learns_what_the_next_batch_lacks() -> None:
    run = Run()
    run.leases.open("t0")
    assert (run.leases.control(0).missing, run.leases.control(0).heard) == (8, -1)
    run.leases.on_report(report(4), "t1")
    run.sink.add(delivered("train/0"))
    run.sink.add(delivered("train/1", survivors=1))
    assert (run.leases.control(0).missing, run.leases.control(0).heard) == (5, 4)
    for n in range(2, 6):
        run.sink.add(delivered(f"train/{n}"))
    assert run.leases.control(0).missing == 5, "a batch is full, and the next one lacks five"
    run.leases.open("t2")
    assert run.leases.control(1).heard == -1, "another generation counts its own reports"


@pytest.mark.parametrize(
    "train",
    [
        {"token_batch_size": 40},
        {"batch_size": 8, "env": [{"id": "a", "curriculum": {"sampler": {"type": POOL}}}]},
        {"batch_size": 8, "env": [{"id": "a", "curriculum": {"gates": [{"type": RANGE}]}}]},
    ],
)
def test_a_run_whose_arrivals_steer_it_needs_each_group(train: dict[str, Any]) -> None:
    known = {"env": [{"id": "a"}], "group_size": 2}
    made = config(train={**known, **train}, dispatch={"max_inflight_rollouts": 8})
    assert Run(made).leases.control(0).missing == 0


# -- when a batch is cut --------------------------------------------------------------------


def test_a_full_batch_is_cut() -> None:
    run = Run()
    assert not run.shipping.may_ship()
    run.fill()
    assert run.shipping.may_ship() and run.shipping.next_batch == 1
    run.state.steps.step, run.state.steps.shipped = 2, [ShippedBatch(3, WEIGHTS, {}, None, 0.0)]
    assert run.shipping.next_batch == 4, "after those that were cut and wait to be trained"


def test_no_batch_is_cut_while_an_engine_that_served_is_pushed_to() -> None:
    run = Run()
    run.fill()
    # The version has risen without this engine, whose push is still under way.
    run.hosts[1].verified, run.state.servers.weights = 0, ArtifactRef("w", "1", 1, "w")
    run.state.servers.target_version = 1
    push = run.pushes.start(run.hosts[1])
    run.state.steps.step = run.state.steps.version = 1
    assert not run.shipping.may_ship()
    run.pushes.on_verified(run.hosts[1], push, [])
    assert not run.shipping.may_ship()
    run.pushes.end(push)
    assert run.shipping.may_ship()


@pytest.mark.parametrize(
    "change",
    [
        lambda run: setattr(run.shipping, "on_hold", True),
        lambda run: setattr(run.state.requests, "stop", "enough"),
        lambda run: setattr(run.state.requests, "pause", "drain"),
        lambda run: run.state.outages.holds.update(store="full"),
        lambda run: setattr(run.state.lifecycle, "status", "pausing"),
        lambda run: setattr(run.state.servers, "target_version", 1),
        lambda run: setattr(run.state.steps, "version", -1),
        lambda run: setattr(run.state.steps, "step", CONFIG.max_steps),
        lambda run: run.state.servers.rejected_labels.append("0.1a"),
    ],
)
def test_a_full_batch_waits(change: Any) -> None:
    run = Run()
    run.fill()
    change(run)
    assert not run.shipping.may_ship()


@pytest.mark.parametrize("why", ["refused", "stale"])
def test_unfit_groups_are_rolled_out_anew_before_a_batch_is_cut(why: str) -> None:
    run = Run()
    run.fill(labels=["0.4a"])
    if why == "refused":
        run.state.servers.rejected_labels = ["0.4a"]
    else:
        steps = run.state.steps
        steps.step = steps.version = CONFIG.train.max_off_policy_steps + 1
    assert not run.shipping.may_ship()
    assert run.state.dispatch.requeued == [f"train/{n}.1" for n in range(4)]
    assert not run.sink.collected


def test_what_is_in_flight_is_stale_once_it_is_older_than_the_bound() -> None:
    run = Run(config(train={**CONFIG.model_dump()["train"], "max_off_policy_steps": 2}))
    run.leases.open("t0")
    assert not run.leases.stale_in_flight(100), "nothing is in flight"
    run.leases.on_report(report(0, oldest=3), "t1")
    assert [version for version in range(3, 8) if run.leases.stale_in_flight(version)] == [6, 7]
    run.leases.on_report(report(1, state="closed", oldest=3), "t2")
    assert not run.leases.stale_in_flight(100), "it is over"
