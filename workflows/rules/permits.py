"""How many rollouts may execute at once: as configured, or as the engines' load allows. Pure."""

from ratchet.activities.contracts.hosting import EngineLoad
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.concurrency import Concurrency, ConcurrencyLimits
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.live_config import limits_of


class Permits:
    """The limits of a run; moves their permits if they are 'auto'.

    The last load of each engine is not durable: engines report it again every few seconds.
    """

    def __init__(self, config: RunConfig, state: RunState, fleet: Fleet) -> None:
        self._config = config
        self._state = state
        self._part = state.permits
        self._fleet = fleet
        self._loads: dict[int, EngineLoad] = {}

    def _controller(self) -> Concurrency:
        config = self._config
        seats = config.inference.engines * config.inference.max_num_seqs
        bounds = ConcurrencyLimits.of(
            config.dispatch.concurrency, unit=config.largest_part, seats=seats
        )
        return Concurrency(bounds, self._part.controller)

    def change(self, config: RunConfig) -> None:
        """Applies the limits of a changed config."""
        self._part.limits = limits_of(config, self._part.limits)

    def on_load(self, now: float, load: EngineLoad) -> str:
        """Processes an engine's load at `now` (seconds); says why permits changed, or '' if they
        did not. Loads of an engine's earlier epochs are ignored.
        """
        limits, host = self._part.limits, self._fleet.host("engine", load.index)
        if not limits.auto or not host.up or load.epoch != host.epoch:
            return ""
        self._loads[load.index] = load
        up = {host.index: host.epoch for host in self._fleet.of("engine") if host.up}
        loads = [known for known in self._loads.values() if up.get(known.index) == known.epoch]
        if len(loads) < len(up):
            return ""
        inflight = sum(
            g.inflight_train + g.inflight_eval
            for g in self._state.dispatch.generations
            if g.state != "closed"
        )
        ended = self._state.arrivals.ok_rollouts + self._state.evals.rollouts
        decision = self._controller().observe(now, loads, inflight, ended)
        moved = (decision.limit, decision.trim) != (limits.permits, limits.trim)
        limits.permits, limits.trim = decision.limit, decision.trim
        return f"{decision.limit} permits: {decision.reason or 'load'}" if moved else ""

    def metrics(self) -> dict[str, float]:
        """Permits, and what the controller saw, for the record of a step."""
        limits = self._part.limits
        if not limits.auto:
            return {"concurrency/max_inflight": float(limits.permits)}
        return self._controller().gauges()
