"""What is cut and trained while weights are being pushed."""

from dataclasses import replace
from typing import Any

import pytest

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import ShippedBatch, TrainedBatch
from ratchet.workflows.rules.shipping import MOST_RECORDED
from tests.unit.workflows.rules.test_leases import CONFIG, WEIGHTS, Run


def pushing(config: RunConfig = CONFIG) -> Run:
    """A run at version 0 whose version 1 should be pushed."""
    run = Run(config)
    run.shipping.overlaps = True
    run.fill(labels=["0.1a"])
    run.pushes.offer(1, ArtifactRef("w", "1", 1, "w"))
    return run


def ahead(config: RunConfig = CONFIG) -> Run:
    """A run whose batch 2 waits while version 1 is pushed."""
    run = pushing(config)
    run.state.steps.shipped = [ShippedBatch(n, WEIGHTS, {}, None, 0.0) for n in (1, 2)]
    return run


def relabel(run: Run, place: int, labels: list[str]) -> None:
    """Tokens of the ready group at `place` have `labels`."""
    ready = run.state.train.ready
    ready[place] = replace(ready[place], labels=labels)


def test_while_weights_are_pushed_only_what_the_gate_accepted_is_cut() -> None:
    run = pushing()
    push = run.pushes.start(run.hosts[1])
    assert run.shipping.may_ship(), "the version is yet to rise"
    relabel(run, 2, ["0.1a", push.labels[-1]])
    assert not run.shipping.may_ship() and run.shipping.undecided == set(push.labels)
    run.pushes.on_verified(run.hosts[1], push, [])
    run.pushes.end(push)
    assert run.shipping.may_ship() and not run.shipping.undecided


def test_a_group_whose_label_is_undecided_stays_for_a_later_batch() -> None:
    run = pushing()
    push = run.pushes.start(run.hosts[1])
    relabel(run, 0, ["0.1a", push.labels[0]])
    run.fill(labels=["0.1a"])
    cut = run.sink.cut(run.shipping.undecided)
    assert [group.group for group in cut] == ["train/1", "train/2", "train/3", "train/0"]
    left = run.state.train.ready
    assert left[0].labels[-1] == push.labels[0] and len(left) == 4


def test_a_version_may_be_verified_while_a_label_of_it_is_undecided() -> None:
    run = pushing()
    pushes = [run.pushes.start(host) for host in run.hosts]
    relabel(run, 0, [pushes[1].labels[0]])
    run.pushes.on_verified(run.hosts[0], pushes[0], [])
    run.pushes.end(pushes[0])
    run.hosts[1].up = False
    run.state.steps.step = run.state.steps.version = 1
    assert not run.shipping.may_ship()
    run.pushes.on_failed(run.hosts[1], pushes[1], "gone", refused=False)
    run.pushes.end(pushes[1])
    assert not run.shipping.may_ship() and run.state.dispatch.requeued == ["train/0.1"]


def test_the_batch_after_the_one_that_is_pushed_may_train() -> None:
    run = ahead()
    assert run.shipping.may_train_ahead()
    run.shipping.overlaps = False
    assert not run.shipping.may_train_ahead(), "a run of an older build goes on as it began"
    assert not run.shipping.may_ship() and not run.shipping.undecided


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.state.steps.shipped.pop(),
        lambda run: setattr(run.state.requests, "stop", "enough"),
        lambda run: setattr(run.state.requests, "pause", "drain"),
        lambda run: setattr(run.state.requests, "checkpoint", True),
        lambda run: setattr(run.state.live, "pending", True),
        lambda run: run.state.trainer.batches.extend([TrainedBatch(1, WEIGHTS)] * MOST_RECORDED),
        lambda run: run.state.outages.holds.update(store="full"),
    ],
)
def test_no_batch_trains_ahead_of_what_is_to_be_done_first(change: Any) -> None:
    run = ahead()
    change(run)
    assert not run.shipping.may_train_ahead()


def test_no_batch_trains_ahead_of_a_checkpoint_that_is_due() -> None:
    often = CONFIG.checkpoint.model_copy(update={"interval": 1})
    assert not ahead(CONFIG.model_copy(update={"checkpoint": often})).shipping.may_train_ahead()


def test_no_batch_trains_ahead_where_evals_have_the_run_to_themselves() -> None:
    alone = CONFIG.eval.model_copy(update={"overlap": False})
    assert not ahead(CONFIG.model_copy(update={"eval": alone})).shipping.may_train_ahead()
