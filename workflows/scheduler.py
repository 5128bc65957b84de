"""Decides what a dispatch generation starts next. Pure and deterministic: events in, work out.

Invariants:

- One permit pool: executing rollouts never exceed `permits`, train and eval together. A group is
  carried out in parts of `rollouts_per_activity`; a part frees its permits when it ends.
- A group that has begun is finished first, on the engine it began on, for its prefix cache.
- Eval work goes first while there is any to dispatch; nothing in flight is cancelled for it.
- Every example of the lease is admitted at most once, and what was not admitted is handed on.
- One rate limiter for train and eval: a rollout costs a token, the bucket holds a burst's worth.
"""

from dataclasses import dataclass

from activities.contracts.rollouts import EngineTarget, Gauges, GroupWork
from configs.run import RunConfig
from workflows.messages import Control, EnvTarget
from workflows.sources import TrainSource, interleave, train_group
from workflows.state import Lease

BURST_S = 5.0
"""Seconds of the rate limit that may be spent at once."""


@dataclass
class Flight:
    """A group in flight. `begun` rollouts have been handed out, `ended` of them have ended.

    `version` is the policy version at which the group began.
    """

    work: GroupWork
    engine: EngineTarget
    version: int
    begun: int = 0
    ended: int = 0
    stale: bool = False

    @property
    def executing(self) -> int:
        """Rollouts that hold a permit."""
        return self.begun - self.ended


@dataclass(frozen=True)
class Part:
    """Rollouts `first` up to `last` of a group, to be carried out by one activity."""

    work: GroupWork
    engine: EngineTarget
    first: int
    last: int


@dataclass
class RateLimiter:
    """A token bucket: `per_minute` tokens flow in, at most `capacity` are kept."""

    per_minute: int | None
    capacity: float
    tokens: float
    at: float = 0.0

    def refill(self, now: float) -> None:
        """Brings the bucket up to `now` (seconds)."""
        if self.per_minute is not None:
            gained = max(now - self.at, 0.0) * self.per_minute / 60
            self.tokens = min(self.tokens + gained, self.capacity)
        self.at = max(now, self.at)

    def wait_s(self, cost: int) -> float:
        """Seconds until `cost` tokens are there; 0 if they are."""
        if self.per_minute is None or self.tokens >= cost:
            return 0.0
        return (cost - self.tokens) * 60 / self.per_minute

    def take(self, cost: int) -> None:
        """Pays for `cost` rollouts."""
        if self.per_minute is not None:
            self.tokens -= cost


@dataclass
class Blocked:
    """Why nothing was admitted; `retry_s` is set if time alone mends it."""

    reason: str
    retry_s: float = 0.0


class Scheduler:
    """Permits, modes and cursors of one dispatch generation."""

    def __init__(self, config: RunConfig, examples: dict[str, int], lease: Lease) -> None:
        self._source = TrainSource(config, examples)
        self._part_size = config.dispatch.rollouts_per_activity
        self._max_off_policy_steps = config.train.max_off_policy_steps
        self.next_train = lease.next_train
        self.put_backs = lease.put_backs
        self.eval_cursors = dict(lease.evals)
        per_minute = config.dispatch.tasks_per_minute
        largest = max(
            [config.train.size_of(env) for env in config.train.env]
            + [config.eval_group_size(env.name) for env in config.eval.env]
        )
        capacity = max((per_minute or 0) * BURST_S / 60, min(self._part_size or largest, largest))
        self.limiter = RateLimiter(per_minute, capacity, lease.tokens, lease.tokens_at)
        self.control = Control(seq=-1)
        self.flights: dict[str, Flight] = {}
        self.admitting = True
        self._bad_engines: set[tuple[int, int]] = set()
        self._bad_envs: set[str] = set()

    # -- events -----------------------------------------------------------------------------

    def on_control(self, control: Control) -> bool:
        """Takes a newer control; older ones are ignored."""
        if control.seq <= self.control.seq:
            return False
        self.control = control
        # A finished epoch never returns: without this the cursor would grow with every eval.
        self.eval_cursors = {e.epoch: self.eval_cursors.get(e.epoch, 0) for e in control.evals}
        return True

    def on_ended(self, group: str, count: int) -> bool:
        """`count` rollouts of a group ended and freed their permits; True if all of it has."""
        flight = self.flights[group]
        flight.ended += count
        assert flight.ended <= flight.begun <= flight.work.size
        return flight.ended == flight.work.size

    def on_finished(self, group: str) -> None:
        """The group has left the engines for good."""
        del self.flights[group]

    def stale(self) -> list[str]:
        """Train groups in flight that are too old for the batch after `next_version`."""
        freshest = self.control.next_version - self._max_off_policy_steps
        groups = []
        for group, flight in self.flights.items():
            if flight.work.kind == "train" and flight.version < freshest:
                flight.stale = True
                groups.append(group)
        return groups

    def avoid_engine(self, engine: EngineTarget) -> None:
        """An activity found this engine gone: no work for now."""
        self._bad_engines.add((engine.index, engine.epoch))

    def forgive_engine(self, engine: EngineTarget) -> None:
        """The engine may be tried again, if the run still names it."""
        self._bad_engines.discard((engine.index, engine.epoch))

    def avoid_env(self, address: str) -> None:
        """An activity found this env server gone: no work for now."""
        self._bad_envs.add(address)

    def forgive_env(self, address: str) -> None:
        """The env server may be tried again, if the run still names it."""
        self._bad_envs.discard(address)

    def close(self) -> None:
        """Ends admission of groups; `cursor` is then what the next generation goes on with."""
        self.admitting = False

    def cursor(self) -> Lease:
        """What has not been admitted."""
        return Lease(
            next_train=self.next_train,
            put_backs=self.put_backs,
            tokens=self.limiter.tokens,
            tokens_at=self.limiter.at,
            evals=dict(self.eval_cursors),
        )

    # -- what is under way ------------------------------------------------------------------

    def _executing(self, kind: str) -> int:
        return sum(f.executing for f in self.flights.values() if f.work.kind == kind)

    @property
    def inflight_train(self) -> int:
        """Train rollouts executing."""
        return self._executing("train")

    @property
    def inflight_eval(self) -> int:
        """Eval rollouts executing."""
        return self._executing("eval")

    @property
    def oldest(self) -> int | None:
        """The version at which the oldest train group in flight began."""
        versions = [f.version for f in self.flights.values() if f.work.kind == "train"]
        return min(versions, default=None)

    def gauges(self) -> Gauges:
        """What rides in activity inputs."""
        return Gauges(
            self.inflight_train, self.inflight_eval, self.control.permits, self.control.version
        )

    # -- places -----------------------------------------------------------------------------

    def engine(self) -> EngineTarget | None:
        """The least loaded engine that may take work."""
        usable = [e for e in self.control.engines if (e.index, e.epoch) not in self._bad_engines]
        if not usable:
            return None
        load = {e.index: 0 for e in usable}
        for flight in self.flights.values():
            if flight.engine.index in load:
                load[flight.engine.index] += flight.work.size - flight.ended
        return min(usable, key=lambda e: (load[e.index], e.index))

    def env_address(self, env: str) -> str | None:
        """Address of the env's server, if it may take work."""
        target = self.control.envs.get(env)
        return None if target is None or target.address in self._bad_envs else target.address

    def env(self, env: str) -> EnvTarget | None:
        """The env's server as the run last named it."""
        return self.control.envs.get(env)

    # -- decisions --------------------------------------------------------------------------

    def next_eval(self) -> GroupWork | None:
        """The next eval group whose env is up; None if there is no such work."""
        for work in interleave(self.control.evals, self.eval_cursors):
            if self.env_address(work.env) is not None:
                return work
        return None

    def next_train_group(self) -> GroupWork | None:
        """The next train group that the limit allows; None if there is none."""
        if self.put_backs < len(self.control.put_backs):
            return self._source.work(self.control.put_backs[self.put_backs])
        if self.next_train < self.control.train_limit:
            return self._source.work(train_group(self.next_train))
        return None

    def _half_dispatched(self, kind: str) -> Flight | None:
        """The group of `kind` that began first and has rollouts left to hand out."""
        begun = (f for f in self.flights.values() if f.begun < f.work.size and not f.stale)
        return next((f for f in begun if f.work.kind == kind), None)

    def _next(self) -> Flight | GroupWork | None:
        """What goes first: evals before train, a group that has begun before a fresh one."""
        if (flight := self._half_dispatched("eval")) is not None:
            return flight
        if self.admitting and (work := self.next_eval()) is not None:
            return work
        if (flight := self._half_dispatched("train")) is not None:
            return flight
        return self.next_train_group() if self.admitting else None

    def admit(self, now: float) -> Part | Blocked:
        """Takes the next part that may start at `now` (seconds), or says why there is none."""
        if self.control.stop:
            return Blocked("the run is stopping")
        found = self._next()
        if found is None:
            return Blocked(f"a policy version above v{self.control.version}")
        if isinstance(found, GroupWork):
            engine = self.engine()
            if engine is None:
                return Blocked("an engine at a verified version")
            if self.env_address(found.env) is None:
                return Blocked(f"the env server of {found.env}")
            found = Flight(found, engine, self.control.version)
        size = found.work.size
        count = min(self._part_size or size, size - found.begun)
        if self.inflight_train + self.inflight_eval + count > self.control.permits:
            return Blocked("a free permit")
        self.limiter.refill(now)
        if wait_s := self.limiter.wait_s(count):
            return Blocked("the rate limit (tasks_per_minute)", wait_s)
        self.limiter.take(count)
        if found.begun == 0:
            self._enter(found)
        found.begun += count
        return Part(found.work, found.engine, found.begun - count, found.begun)

    def _enter(self, flight: Flight) -> None:
        work = flight.work
        if work.kind == "eval":
            epoch = work.group.removeprefix("eval/").rpartition("/")[0]
            self.eval_cursors[epoch] = work.example + 1
        elif self.put_backs < len(self.control.put_backs):
            self.put_backs += 1
        else:
            self.next_train += 1
        self.flights[work.group] = flight
