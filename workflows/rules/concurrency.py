"""How many rollouts may execute at once, decided from the load of the engines. Pure.

Permits grow slowly while the engines are clear and fall at once when they are not, one poll (5 s)
at a time:

- Clear: every KV cache is used to less than 0.6, nothing waits, nothing was preempted. If permits
  bind (0.9 of them are in use) they grow by 1.25 for each turnover of the pipeline, which is as
  many finished rollouts as there are in flight.
- Trim: above 0.8 of some KV cache, permits fall to `inflight * 0.7 / usage`, what fills the cache
  to 0.7; above 0.9 the youngest groups are cancelled too. Then no trim for 6 polls.
- Cut: a preemption cuts permits to 0.8 of what is in flight, a queue of more than half of what
  runs, over 6 polls, to 0.9. A cut that follows within 6 polls of the last one's end cuts to 0.5.

Decided here, where these rules leave it open:

- Requests that wait, but are too few for a cut, stop growth.
- A poll grows permits by one turnover at most: the effect of more of them on the engines shows only
  at the next poll.
- Growth needs two clear polls in a row, at most 15 s apart: without reports nothing grows.
- Permits also bind if the next activity's rollouts do not fit: with large groups 0.9 is out of
  reach.
- Cuts cancel the youngest groups as hard trims do: an engine that preempts computes twice.
- A cut lasts until no more is in flight than permitted and a poll shows no overload, but at most
  12 polls; until then no cut or trim follows, since the load is still the earlier one.
- A start derived from KV cache (tokens of all engines / longest context) is bounded by how many
  sequences the engines run at once, and follows the engines as they come up, until the first
  growth, trim or cut.
- Permits never fall below what one activity needs, otherwise nothing could start.
- After a silence, the polls it would have had count as passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.activities.contracts.hosting import EngineLoad
from ratchet.configs.run import ConcurrencyConfig
from ratchet.workflows.protocol.state import ConcurrencyState, Signal

POLL_S = 5.0
EARLIEST_POLL = 0.8
"""Share of POLL_S after which a poll counts: several engines report within one."""
GATE_TTL_S = 15.0
GROWTH = 1.25
BINDING = 0.9
KV_CLEAR, KV_SOFT, KV_HARD, KV_TARGET = 0.6, 0.8, 0.9, 0.7
COOLDOWN_POLLS = 6
QUEUE_RATIO, QUEUE_POLLS = 0.5, 6
PREEMPTION_CUT, QUEUE_CUT, ESCALATED_CUT = 0.8, 0.9, 0.5
GRACE_POLLS = 6
DRAIN_POLLS = 12

SIGNALS: tuple[Signal, ...] = ("clear", "full", "overload")
"""By severity. Above KV_HARD counts as overload, since it cancels work as overload does."""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Bounds of the permits. `unit` is the most rollouts that one activity runs, `seats` the
    sequences that all engines run at once (None: unknown).
    """

    min_inflight: int = 1
    max_inflight: int = 1024
    initial: int | None = None
    unit: int = 1
    seats: int | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.floor <= self.max_inflight

    @staticmethod
    def of(config: ConcurrencyConfig, *, unit: int, seats: int) -> "ConcurrencyLimits":
        """The bounds of a config section."""
        return ConcurrencyLimits(
            config.min_inflight, config.max_inflight, config.initial, unit, seats
        )

    @property
    def floor(self) -> int:
        """Fewest permits with which work can continue."""
        return max(self.min_inflight, self.unit)


@dataclass(frozen=True)
class Decision:
    """Permits, and whether the youngest train groups should be cancelled to reach them.

    `reason` says why permits changed at this poll; '' if they did not.
    """

    limit: int
    trim: bool
    reason: str = ""


class Concurrency:
    """The controller. Changes `state` in place; starts a state that never ran."""

    def __init__(self, limits: ConcurrencyLimits, state: ConcurrencyState) -> None:
        self.limits = limits
        self.state = state
        if state.cap == 0:
            state.cap = self._clamp(limits.initial or limits.floor)
            state.settled = limits.initial is not None

    @property
    def limit(self) -> int:
        """Permits, train and eval together."""
        return int(self._clamp(self.state.cap))

    def observe(
        self, now_s: float, loads: Sequence[EngineLoad], inflight: int, completed: int
    ) -> Decision:
        """Takes the last known load of every engine that is up, and decides.

        `now_s` is the time in seconds, `inflight` the rollouts that execute, `completed` those of
        the whole run that ended with samples (failed ones cost the engines nothing, so nothing may
        grow because of them). May be called as often as reports arrive: what is too early for the
        next poll changes nothing and is not lost.
        """
        state, before = self.state, self.limit
        since = None if state.polled_at is None else now_s - state.polled_at
        if not loads or (since is not None and since < EARLIEST_POLL * POLL_S):
            return Decision(before, state.trim)
        polls = max(1, round(since / POLL_S)) if since else 1
        state.polled_at = now_s
        turnover = self._turned_over(inflight, completed)
        preempted = self._preempted(loads)
        usage = max(load.kv_usage for load in loads)
        waiting = sum(load.waiting for load in loads)
        state.capacity = sum(load.kv_tokens for load in loads)
        queued = self._queued(sum(load.running for load in loads), waiting, since)
        clear = usage < KV_CLEAR and not (waiting or preempted or queued)
        overload = preempted or queued or usage > KV_HARD
        state.signal = "clear" if clear else "overload" if overload else "full"
        state.trim = state.trim and inflight > before
        state.cooldown = max(0, state.cooldown - polls)
        escalated = self._pass_drain(polls, inflight <= before and not (preempted or queued))
        if not state.settled:
            self._start(loads)
        reason = ""
        if state.drain == 0 and inflight > 0:
            if preempted or queued:
                share = PREEMPTION_CUT if preempted else QUEUE_CUT
                self._cut(inflight * (ESCALATED_CUT if escalated else share))
                reason = "preemptions" if preempted else f"{waiting} requests waiting"
            elif usage > KV_SOFT and state.cooldown == 0:
                self._lower(inflight * KV_TARGET / usage, trim=usage > KV_HARD)
                state.cooldown = COOLDOWN_POLLS
                reason = f"KV cache used to {usage:.2f}"
            elif clear and now_s <= state.open_until and self._binds(inflight):
                self._grow(min(turnover, 1.0))
                reason = f"{state.turnover:.1f} turnovers"
        state.open_until = now_s + GATE_TTL_S if clear and state.drain == 0 else 0.0
        return Decision(self.limit, state.trim, reason if self.limit != before else "")

    def gauges(self) -> dict[str, float]:
        """Metrics: permits, turnovers so far, KV tokens of all engines, severity 0 to 2."""
        return {
            "concurrency/max_inflight": float(self.limit),
            "concurrency/turnover": self.state.turnover,
            "concurrency/capacity": float(self.state.capacity),
            "concurrency/signal": float(SIGNALS.index(self.state.signal)),
        }

    # -- observations -------------------------------------------------------------------------

    def _turned_over(self, inflight: int, completed: int) -> float:
        """Turnovers since the last poll: finished rollouts over the larger pool of both ends."""
        state = self.state
        turnover = max(completed - state.completed, 0) / max(inflight, state.inflight, 1)
        state.inflight, state.completed = inflight, completed
        state.turnover += turnover
        return turnover

    def _preempted(self, loads: Sequence[EngineLoad]) -> bool:
        """Whether an engine preempted since it was last seen in this epoch."""
        totals = {f"{load.index}.{load.epoch}": load.preemptions for load in loads}
        seen, self.state.preemptions = self.state.preemptions, totals
        return any(total > seen.get(engine, total) for engine, total in totals.items())

    def _queued(self, running: int, waiting: int, since: float | None) -> bool:
        state = self.state
        if running == 0 or waiting <= QUEUE_RATIO * running:
            state.queue_polls = 0
        elif since is None or since > GATE_TTL_S:
            state.queue_polls = 1
        else:
            state.queue_polls += 1
        return state.queue_polls >= QUEUE_POLLS

    def _pass_drain(self, polls: int, settled: bool) -> bool:
        """Whether a cut at this poll would be escalated."""
        state = self.state
        if state.drain:
            state.drain = 0 if settled else max(0, state.drain - polls)
            if state.drain == 0:
                state.grace = GRACE_POLLS
            return True
        escalated = state.grace >= polls
        state.grace = max(0, state.grace - polls)
        return escalated

    def _binds(self, inflight: int) -> bool:
        return inflight >= BINDING * self.limit or inflight + self.limits.unit > self.limit

    # -- reactions ----------------------------------------------------------------------------

    def _start(self, loads: Sequence[EngineLoad]) -> None:
        longest = max(load.max_model_len for load in loads)
        seats = self.limits.seats or self.limits.max_inflight
        self.state.cap = self._clamp(min(self.state.capacity // longest, seats))

    def _grow(self, turnover: float) -> None:
        self.state.settled = True
        self.state.cap = self._clamp(self.state.cap * GROWTH**turnover)

    def _cut(self, target: float) -> None:
        self._lower(target, trim=True)
        self.state.drain, self.state.grace, self.state.queue_polls = DRAIN_POLLS, 0, 0

    def _lower(self, target: float, *, trim: bool) -> None:
        self.state.settled = True
        self.state.cap = min(self.state.cap, self._clamp(int(target)))
        self.state.trim = trim

    def _clamp(self, cap: float) -> float:
        return min(max(cap, float(self.limits.floor)), float(self.limits.max_inflight))
