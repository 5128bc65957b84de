"""Decides what a dispatch generation starts next. Pure and deterministic: events in, work out.

Invariants:

- One permit pool: executing rollouts never exceed `permits`, train and eval together. A group
  runs in parts of `rollouts_per_activity`; a rollout frees its permit when it ends.
- A group that has begun is finished first, on the engine it began on, for its prefix cache.
- Eval work goes first while there is any to dispatch; nothing in flight is cancelled for it.
- Every example of the lease is admitted at most once, and what was not admitted is handed on.
- One rate limiter and one burst cap for train and eval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratchet.activities.contracts.rollouts import PERMIT, EngineTarget, Gauges, GroupWork
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import Control
from ratchet.workflows.protocol.state import Lease, Shares
from ratchet.workflows.rules.flights import Flight, Flights
from ratchet.workflows.rules.placement import Places
from ratchet.workflows.rules.rate_limits import BurstCap, RateLimiter, burst_of
from ratchet.workflows.rules.requeued import Requeued
from ratchet.workflows.rules.sources import (
    TrainSource,
    eval_group,
    eval_work,
    interleave,
    train_counter,
    train_group,
)


@dataclass(frozen=True)
class Part:
    """Rollouts `first` up to `last` of a group, which one activity runs."""

    work: GroupWork
    engine: EngineTarget
    first: int
    last: int


@dataclass
class Blocked:
    """Why nothing was admitted; `retry_s` is set if waiting helps."""

    reason: str
    retry_s: float = 0.0


def _mean(counts: Mapping[int, int]) -> float:
    """The mean of numbers, by how often each occurs."""
    total = sum(counts.values())
    return (
        round(sum(number * count for number, count in counts.items()) / total, 3) if total else 0.0
    )


class Scheduler:
    """Permits, modes and cursors of one dispatch generation."""

    def __init__(
        self,
        config: RunConfig,
        examples: dict[str, int],
        lease: Lease,
        shares: Sequence[Shares] = (),
    ) -> None:
        self._source = TrainSource(config, examples, shares)
        self._config = config
        self._part_size = config.dispatch.rollouts_per_activity
        frozen = (env.name for env in config.train.env if config.is_frozen(env.name))
        self.flights = Flights(frozenset(frozen))
        self.next_train = lease.next_train
        self.requeued = Requeued(lease, self._line_of)
        self.places = Places()
        self.eval_cursors = dict(lease.evals)
        self.limiter = RateLimiter(None, config.largest_part, lease.tokens, lease.tokens_at)
        self.burst_cap = BurstCap(lease.burst_base, lease.burst_at)
        self.control = Control(seq=-1)
        self.blocked = Blocked("")
        self.admitting = True

    # -- events -----------------------------------------------------------------------------

    def on_control(self, control: Control) -> bool:
        """Takes a newer control; older ones are ignored."""
        if control.seq <= self.control.seq:
            return False
        self.control = control
        self.places.relist(control)
        self.requeued.on_control(control)
        self.limiter.per_minute = control.tasks_per_minute
        # A finished epoch never returns: without this the cursor would grow with every eval.
        self.eval_cursors = {e.epoch: self.eval_cursors.get(e.epoch, 0) for e in control.evals}
        return True

    def on_released(self, ended: dict[str, int]) -> bool:
        """Rollouts ended inside parts ('<group>/<first>') that still run; True if that freed
        permits. What is unknown, older or repeated changes nothing.
        """
        freed = False
        for name, count in ended.items():
            group, _, first = name.rpartition("/")
            flight = self.flights.get(group)
            part = flight.parts.get(int(first)) if flight and first.isdecimal() else None
            if flight and part and not part.done and part.ended < count <= part.size:
                self.flights.release(flight, int(first), count)
                freed = True
        return freed

    def on_ended(self, group: str, first: int) -> bool:
        """A part ended and freed its permits; True if its whole group has ended."""
        flight = self.flights[group]
        self.flights.end(flight, first)
        return flight.begun == flight.work.size and not flight.busy

    def stale(self) -> list[str]:
        """Train groups in flight that are too old for the batch after `next_version`."""
        freshest = self.control.next_version - self._config.train.max_off_policy_steps
        if (oldest := self.oldest) is None or oldest >= freshest:
            return []
        flights = self.flights
        return [g for g, f in flights.items() if flights.ages(f) and f.version < freshest]

    def surplus(self) -> list[str]:
        """Train groups in flight that no batch is left for."""
        if not self.control.train_over:
            return []
        return [group for group, flight in self.flights.items() if flight.work.kind == "train"]

    def overload(self) -> list[str]:
        """Train groups, the youngest first, to give up so that no more than `permits` execute.

        Evals count, but are never given up; nor is a group that would free nothing.
        """
        if not self.control.trim:
            return []
        # Those whose cancellation is under way are left out, else others would go in their place.
        known = [flight for flight in reversed([*self.flights.values()]) if not flight.cancelled]
        surplus = sum(flight.executing for flight in known) - self.control.permits
        chosen = []
        for flight in known:
            if surplus > 0 and flight.work.kind == "train" and flight.executing:
                chosen.append(flight.work.group)
                surplus -= flight.executing
        return chosen

    def close(self) -> None:
        """Ends admission of groups; `cursor` is then what the next generation goes on with.

        What is left of begun groups is paid for here, since the bucket is the next generation's.
        """
        self.admitting = False
        self.limiter.take(self.flights.to_begin())

    def cursor(self) -> Lease:
        """What has not been admitted."""
        return Lease(
            next_train=self.next_train,
            put_backs=self.requeued.below,
            ahead=sorted(self.requeued.ahead),
            tokens=self.limiter.tokens,
            tokens_at=self.limiter.at,
            burst_base=self.burst_cap.base,
            burst_at=self.burst_cap.at,
            evals=dict(self.eval_cursors),
        )

    # -- what is under way ------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The version at which the oldest train group in flight began."""
        return min(self.flights.versions(), default=None)

    @property
    def reserved(self) -> int:
        """Permits that begun groups need: executing rollouts, and those still to be handed out."""
        return self.flights.executing() + self.flights.to_begin()

    @property
    def queued_eval(self) -> int:
        """Rollouts of evals that were not handed out yet."""
        waiting = sum(
            (epoch.num_examples - self.eval_cursors.get(epoch.epoch, 0)) * epoch.group_size
            for epoch in self.control.evals
        )
        return waiting + self.flights.to_begin("eval")

    def gauges(self) -> Gauges:
        """What rides in activity inputs."""
        now, flights = self.control.version, self.flights
        ages = {max(now - version, 0): count for version, count in flights.versions().items()}
        queued = self.queued_eval
        return Gauges(
            inflight_train=flights.executing("train"),
            inflight_eval=flights.executing("eval"),
            permits=self.control.permits,
            version=self.control.version,
            inflight=flights.inflight(),
            mode="eval" if queued else "train",
            queued_eval=queued,
            groups=len(flights),
            off_policy_max=max(ages, default=0),
            off_policy_mean=_mean(ages),
            waiting_for=self.blocked.reason,
        )

    # -- decisions --------------------------------------------------------------------------

    def engine(self) -> EngineTarget | None:
        """The least loaded engine that may take work."""
        return self.places.engine(self.flights.load)

    def address(self, work: GroupWork) -> str:
        """Address of the least loaded env server that may take a group; '' if there is none."""
        return self.places.address(work, self.flights.served)

    def next_eval(self) -> GroupWork | None:
        """The next eval group whose env is up; None if there is no such work."""
        up = [e for e in self.control.evals if self.places.address(eval_work(e, 0))]
        return next(interleave(up, self.eval_cursors), None)

    def next_requeued(self, kind: str) -> GroupWork | None:
        """The requeued group of `kind` that waits longest; None if there is none, or if it is a
        train group and those stand back for evals.
        """
        if kind == "train" and self.control.train_limit == 0:
            return None
        dropped = self.control.put_backs_before - self.requeued.below
        assert dropped <= 0, "a requeued group was dropped before it was admitted"
        while True:
            for group in self.requeued.heads(kind):
                if (work := self._requeued_work(group)) is None:
                    self.requeued.take(group)
                    break
                if self.places.address(work):
                    return work
            else:
                return None

    def _line_of(self, group: str) -> str:
        """What requeued groups wait for together: an env, or an eval of one."""
        if group.startswith("eval/"):
            return eval_group(group)[0]
        return self._source.env_of(train_counter(group)[0])

    def _requeued_work(self, group: str) -> GroupWork | None:
        """The work of a requeued group; None if its eval is over."""
        if not group.startswith("eval/"):
            return self._source.work(group, self.control.draws)
        name, example = eval_group(group)
        epoch = next((e for e in self.control.evals if e.epoch == name), None)
        return eval_work(epoch, example) if epoch is not None else None

    def next_train_group(self) -> GroupWork | None:
        """The next train group that the limit allows; None if there is none."""
        if self.next_train >= self.control.train_limit:
            return None
        return self._source.work(train_group(self.next_train), self.control.draws)

    def _next(self) -> Flight | GroupWork | None:
        """What goes first: evals before train, a group that has begun before a fresh one."""
        if (flight := self.flights.half_dispatched("eval")) is not None:
            return flight
        if self.admitting and (work := self.next_requeued("eval") or self.next_eval()) is not None:
            return work
        if (flight := self.flights.half_dispatched("train")) is not None:
            return flight
        return (self.next_requeued("train") or self.next_train_group()) if self.admitting else None

    def admit(self, now: float) -> Part | Blocked:
        """Takes the next part that may start at `now` (seconds), or says why there is none."""
        decision = self._admit(now)
        self.blocked = decision if isinstance(decision, Blocked) else Blocked("")
        return decision

    def _admit(self, now: float) -> Part | Blocked:
        if self.control.stop or self.control.pause == "cancel":
            return Blocked("the run is stopping" if self.control.stop else "the run is paused")
        result = self._next()
        if result is None and self.control.pause:
            return Blocked("the run is paused")
        if result is None:
            return Blocked(f"policy v{self.control.version + 1}")
        if isinstance(result, GroupWork):
            engine = self.engine()
            if engine is None:
                return Blocked("an engine at a verified version")
            if not self.places.address(result):
                return Blocked(f"the env server of {result.env}")
            result = Flight(result, engine, self.control.version)
        size = result.work.size
        count = min(self._part_size or size, size - result.begun)
        if waits := self._held_back(now, count):
            return waits
        if self.admitting:
            self.limiter.take(count)
        if result.begun == 0:
            self._enter(result)
        first = self.flights.hand_out(result, count)
        return Part(result.work, result.engine, first, result.begun)

    def _held_back(self, now: float, count: int) -> Blocked | None:
        """Why `count` rollouts may not start at `now`, if so."""
        executing, control = self.flights.executing(), self.control
        if executing + count > control.permits:
            return Blocked(PERMIT)
        total, everyone = control.permits + control.older, executing + control.older
        setting = self._config.dispatch.burst or ("auto" if control.auto else None)
        burst = burst_of(setting, total, self._config.largest_group)
        if wait_s := self.burst_cap.wait_s(now, everyone, count, burst):
            return Blocked("the burst cap", wait_s)
        if not self.admitting:
            return None
        self.limiter.refill(now)
        if wait_s := self.limiter.wait_s(count):
            return Blocked("the rate limit (tasks_per_minute)", wait_s)
        return None

    def _enter(self, flight: Flight) -> None:
        group = flight.work.group
        if not self.requeued.take(group):
            if flight.work.kind == "eval":
                self.eval_cursors[eval_group(group)[0]] = flight.work.example + 1
            else:
                self.next_train += 1
        self.flights.enter(flight)
