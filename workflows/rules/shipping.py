"""When the next batch is cut. Pure.

Invariant: no batch is cut while weights are being pushed: what was sampled from weights that the
gate may still refuse reaches no trainer.
"""

from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.rules.sinks import TrainSink


class Shipping:
    """Decides for one run. While `on_hold` no batch is cut."""

    def __init__(
        self, config: RunConfig, state: RunState, sink: TrainSink, leases: Leases, pushes: Pushes
    ) -> None:
        self._config = config
        self._state = state
        self._sink = sink
        self._leases = leases
        self._pushes = pushes
        self.on_hold = False

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
        if state.servers.target_version > version or self._pushes.to_serving:
            return False
        if version < step - 1 - self._config.train.max_lag:
            return False
        self._leases.requeue_refused()
        self._leases.requeue_stale(step)
        return self._sink.full
