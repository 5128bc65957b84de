"""Takes what generations deliver to where it belongs.

Invariant: a group is delivered once, since `Leases` has accepted the report that carries it.
"""

from collections.abc import Callable

from ratchet.activities.contracts.roles import ServerRole
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.messages import DispatchReport
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.sinks import Arrivals
from ratchet.workflows.run.evals import Evals

Lose = Callable[[ServerRole, int, int, str], None]


class Deliveries:
    """What a report does to a run. `lose` takes a server out of use, of a role, an index and an
    epoch, for a reason; `fail` has the run fail.
    """

    def __init__(
        self,
        fleet: Fleet,
        leases: Leases,
        arrivals: Arrivals,
        evals: Evals,
        *,
        lose: Lose,
        fail: Callable[[RunFailed], None],
    ) -> None:
        self._fleet = fleet
        self._leases = leases
        self._arrivals = arrivals
        self._evals = evals
        self._lose = lose
        self._fail = fail

    def take(self, report: DispatchReport) -> None:
        """Counts an accepted report's groups, and the servers that its generation lost."""
        for lost in report.lost:
            self._lose(lost.role, lost.index, lost.epoch, lost.reason)
        for group in report.groups:
            self._fleet.on_group(group.env)
            if group.user_error:
                self._leases.given_up.append(group.group)
                self._fail(RunFailed("scoring", group.error, code="bad_input", user=True))
            elif group.cancelled:
                # Neither a success nor an error: the example is rolled out again, or the run ends.
                self._leases.on_cancelled(group)
            elif group.kind == "eval":
                self._evals.on_group(group)
            else:
                self._arrivals.on_group(group)
        self._leases.requeue_refused()
