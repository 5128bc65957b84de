"""How many rollouts may execute at once: as configured, or as the engines' load allows. Pure."""

from ratchet.activities.contracts.hosting import EngineLoad
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.concurrency import Concurrency, ConcurrencyLimits
from ratchet.workflows.rules.fleet import Fleet


class Permits:
    """Moves the permits of a run's limits, where they are 'auto'.

    The last load of each engine is not durable: engines tell it anew every few seconds.
    """

    def __init__(self, config: RunConfig, state: RunState, fleet: Fleet) -> None:
        self._config = config
        self._state = state
        self._fleet = fleet
        self._loads: dict[int, EngineLoad] = {}

    def _controller(self) -> Concurrency:
        config = self._config
        seats = config.inference.engines * config.inference.max_num_seqs
        bounds = ConcurrencyLimits.of(
            config.dispatch.concurrency, unit=config.largest_part, seats=seats
        )
        return Concurrency(bounds, self._state.concurrency)

    def on_load(self, now: float, load: EngineLoad) -> str:
        """Takes an engine's load at `now` (seconds); says why permits moved, or '' if they did
        not. Loads of an engine's earlier epochs are ignored.
        """
        limits, train = self._state.limits, self._state.train
        host = self._fleet.host("engine", load.index)
        assert limits is not None
        if not limits.auto or not host.up or load.epoch != host.epoch:
            return ""
        self._loads[load.index] = load
        up = {host.index: host.epoch for host in self._fleet.of("engine") if host.up}
        loads = [known for known in self._loads.values() if up.get(known.index) == known.epoch]
        if len(loads) < len(up):
            return ""
        inflight = sum(
            g.inflight_train + g.inflight_eval
            for g in self._state.generations
            if g.state != "closed"
        )
        ended = train.ok_rollouts + self._state.eval_rollouts
        decision = self._controller().observe(now, loads, inflight, ended)
        moved = (decision.limit, decision.trim) != (limits.permits, limits.trim)
        limits.permits, limits.trim = decision.limit, decision.trim
        return f"{decision.limit} permits: {decision.reason or 'load'}" if moved else ""

    def metrics(self) -> dict[str, float]:
        """Permits, and what the controller saw, for the record of a step."""
        limits = self._state.limits
        assert limits is not None
        if not limits.auto:
            return {"concurrency/max_inflight": float(limits.permits)}
        return self._controller().gauges()
