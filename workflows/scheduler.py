"""Decides what a dispatch generation starts next. Pure and deterministic: events in, work out.

Invariants:

- One permit pool: executing rollouts never exceed `permits`, train and eval together.
- Eval work goes first while there is any; nothing in flight is ever cancelled for it.
- Every example of the lease is admitted at most once, and what was not admitted is handed on.
- A group goes to one engine, the least loaded verified one; without one nothing is admitted.
"""

from dataclasses import dataclass

from activities.contracts.rollouts import EngineTarget, Gauges, GroupWork
from configs.run import RunConfig
from workflows.messages import Control, EnvTarget
from workflows.sources import TrainSource, interleave, train_group
from workflows.state import Lease


@dataclass
class Flight:
    """A group in flight and the engine it is pinned to."""

    work: GroupWork
    engine: EngineTarget


class Scheduler:
    """Permits, modes and cursors of one dispatch generation."""

    def __init__(self, config: RunConfig, examples: dict[str, int], lease: Lease) -> None:
        self._source = TrainSource(config, examples)
        self.next_train = lease.next_train
        self.put_backs = lease.put_backs
        self.eval_cursors = dict(lease.evals)
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

    def on_finished(self, group: str) -> None:
        """The group's rollouts ended; its permits are free."""
        del self.flights[group]

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
        """Ends admission; `cursor` is then what the next generation goes on with."""
        self.admitting = False

    def cursor(self) -> Lease:
        """What has not been admitted."""
        return Lease(self.next_train, self.put_backs, dict(self.eval_cursors))

    # -- decisions --------------------------------------------------------------------------

    @property
    def inflight_train(self) -> int:
        """Train rollouts executing."""
        return sum(f.work.size for f in self.flights.values() if f.work.kind == "train")

    @property
    def inflight_eval(self) -> int:
        """Eval rollouts executing."""
        return sum(f.work.size for f in self.flights.values() if f.work.kind == "eval")

    def gauges(self) -> Gauges:
        """What rides in activity inputs."""
        return Gauges(
            self.inflight_train, self.inflight_eval, self.control.permits, self.control.version
        )

    def engine(self) -> EngineTarget | None:
        """The least loaded engine that may take work."""
        usable = [e for e in self.control.engines if (e.index, e.epoch) not in self._bad_engines]
        if not usable:
            return None
        load = {e.index: 0 for e in usable}
        for flight in self.flights.values():
            if flight.engine.index in load:
                load[flight.engine.index] += flight.work.size
        return min(usable, key=lambda e: (load[e.index], e.index))

    def env_address(self, env: str) -> str | None:
        """Address of the env's server, if it may take work."""
        target = self.control.envs.get(env)
        return None if target is None or target.address in self._bad_envs else target.address

    def env(self, env: str) -> EnvTarget | None:
        """The env's server as the run last named it."""
        return self.control.envs.get(env)

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

    def admit(self) -> tuple[GroupWork, EngineTarget] | None:
        """Takes the next group that fits the free permits, or None if nothing may start now."""
        if not self.admitting or self.control.stop:
            return None
        engine = self.engine()
        if engine is None:
            return None
        work = self.next_eval() or self.next_train_group()
        if work is None or self.env_address(work.env) is None:
            return None
        if self.inflight_train + self.inflight_eval + work.size > self.control.permits:
            return None
        if work.kind == "eval":
            epoch = work.group.removeprefix("eval/").rpartition("/")[0]
            self.eval_cursors[epoch] = work.example + 1
        elif self.put_backs < len(self.control.put_backs):
            self.put_backs += 1
        else:
            self.next_train += 1
        self.flights[work.group] = Flight(work, engine)
        return work, engine

    def waiting_for(self) -> str:
        """Why nothing starts, in words; '' while something could."""
        if self.control.stop:
            return "the run is stopping"
        if self.engine() is None:
            return "an engine at a verified version"
        work = self.next_eval() or self.next_train_group()
        if work is None:
            return f"a policy version above v{self.control.version}"
        if self.env_address(work.env) is None:
            return f"the env server of {work.env}"
        if self.inflight_train + self.inflight_eval + work.size > self.control.permits:
            return "a free permit"
        return ""
