"""When the next batch is cut, and when it trains. Pure.

Invariant: a group enters a batch only once the gate has accepted each label of its tokens: what was
sampled from weights that it may still refuse reaches no trainer. Labels decide, not versions.
"""

from ratchet.activities.contracts.rollouts import FilterTally, GroupResult
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.rules.sinks import TrainSink

MOST_RECORDED = 150
"""Batches after which there is a checkpoint whatever its interval, to keep the state small."""


class Shipping:
    """Decides for one run. While `on_hold` no batch is cut. With `overlaps` batches are cut and
    trained while weights are being pushed; runs of older builds wait for the end of each push.
    """

    def __init__(
        self, config: RunConfig, state: RunState, sink: TrainSink, leases: Leases, pushes: Pushes
    ) -> None:
        self._config = config
        self._state = state
        self._sink = sink
        self._leases = leases
        self._pushes = pushes
        self.on_hold = False
        self.overlaps = False

    @property
    def next_batch(self) -> int:
        """The step that the next batch is for."""
        return self._state.steps.step + len(self._state.steps.shipped) + 1

    @property
    def all_shipped(self) -> bool:
        """Whether no batch is left to cut."""
        return self.next_batch > self._config.last_step

    def may_ship(self) -> bool:
        """Whether the next batch is due and full, after unfit groups were removed."""
        state, step, version = self._state, self.next_batch, self._state.steps.version
        asked = state.requests.stop or state.requests.pause
        if self.on_hold or asked or version < 0 or self.all_shipped:
            return False
        if state.outages.holds or state.lifecycle.status != "running":
            return False
        pushing = state.servers.target_version > version or self._pushes.to_serving
        if pushing and not self.overlaps:
            return False
        if version < step - 1 - self._config.train.max_lag:
            return False
        self._leases.requeue_refused()
        self._leases.requeue_stale(step)
        return self._sink.full(self.undecided)

    def on_damaged(self, damaged: list[GroupResult], filters: FilterTally) -> None:
        """The batch that was cut, which has taken `filters`, cannot be written: these groups cannot
        be read any more, and are rolled out again.
        """
        self._sink.uncut(filters)
        for group in self._sink.take_out(damaged):
            self._leases.requeue(group.group)

    @property
    def undecided(self) -> frozenset[str]:
        """Labels that no group of a batch may have yet."""
        return self._pushes.undecided if self.overlaps else frozenset()

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether the state of `step` is saved before the next step."""
        scheduled = step % self._config.checkpoint.interval == 0 and step < self._config.last_step
        return scheduled or len(self._state.trainer.batches) >= MOST_RECORDED

    def may_train_ahead(self) -> bool:
        """Whether the batch after the one whose weights are being pushed is there, and nothing has
        to be done between the two steps.
        """
        state, requests = self._state, self._state.requests
        asked = requests.stop or requests.pause or requests.checkpoint or state.live.pending
        return (
            self.overlaps
            and len(state.steps.shipped) > 1
            and not asked
            and not self.is_checkpoint_due(state.steps.step + 1)
            and self._config.eval.overlap
            and not state.outages.holds
        )
