"""Where what a report carries goes."""

from dataclasses import replace
from typing import Any

from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.messages import DispatchReport, LostServer
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.run.deliveries import Deliveries
from tests.unit.workflows.rules.test_leases import Run
from tests.unit.workflows.support import delivered


class Arrived:
    """Notes the groups that arrive."""

    def __init__(self) -> None:
        self.groups: list[str] = []

    def on_group(self, group: GroupResult) -> None:
        """A group arrives."""
        self.groups.append(group.group)


def test_each_group_goes_where_it_belongs() -> None:
    run, evals, trained = Run(), Arrived(), Arrived()
    lost: list[Any] = []
    failures: list[RunFailed] = []
    there: Any = (Fleet(run.hosts), run.leases, trained, evals)
    deliveries = Deliveries(*there, lose=lambda *server: lost.append(server), fail=failures.append)
    groups = [
        delivered("train/0"),
        replace(delivered("eval/0-0/a/1"), kind="eval"),
        replace(delivered("train/1"), cancelled="stale"),
        replace(delivered("train/2"), cancelled="pause"),
        replace(delivered("train/3"), cancelled="stop"),
        replace(delivered("train/4"), user_error=True, error="score() gave a text"),
    ]
    server = LostServer("engine", 1, 7, "gone")
    deliveries.take(DispatchReport(0, 0, "open", groups, lost=[server]))
    assert (trained.groups, evals.groups) == (["train/0"], ["eval/0-0/a/1"])
    assert run.state.dispatch.requeued == ["train/1.1", "train/2"]
    assert run.leases.given_up == ["train/3", "train/4"], "the last checkpoint requeues them"
    assert lost == [("engine", 1, 7, "gone")]
    assert [(f.code, str(f)) for f in failures] == [("bad_input", "score() gave a text")]
