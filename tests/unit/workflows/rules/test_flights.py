"""Counts over all groups in flight are what walking over them gives, whatever changes."""

from collections import Counter
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ratchet.activities.contracts.rollouts import EngineTarget, GroupWork
from ratchet.workflows.protocol.state import EvalEpoch, Lease
from ratchet.workflows.rules.flights import Flight, Flights
from ratchet.workflows.rules.scheduler import Part, Scheduler
from tests.unit.workflows.support import ENGINES, EXAMPLES, admitted, config, control

SIZE = 4


class Changes(RuleBasedStateMachine):
    """Groups of two kinds and three envs on two engines; those of env 'c' are ageless."""

    def __init__(self) -> None:
        super().__init__()
        self.flights = Flights(frozenset({"c"}))
        self.entered = 0

    def _one(self, data: st.DataObject, flights: list[Flight]) -> Flight:
        return data.draw(st.sampled_from(flights))

    @property
    def _running(self) -> list[tuple[Flight, int]]:
        flights = self.flights.values()
        return [(f, first) for f in flights for first, part in f.parts.items() if not part.done]

    @rule(
        kind=st.sampled_from(["train", "eval"]),
        env=st.sampled_from("abc"),
        engine=st.sampled_from(ENGINES),
        version=st.integers(0, 3),
    )
    def enter(self, kind: str, env: str, engine: EngineTarget, version: int) -> None:
        work = GroupWork(f"{kind}/{self.entered}", kind, env, 0, SIZE)  # type: ignore[arg-type]
        self.flights.enter(Flight(work, engine, version))
        self.entered += 1

    @precondition(lambda self: any(f.to_begin for f in self.flights.values()))
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        flight = self._one(data, [f for f in self.flights.values() if f.to_begin])
        begun = flight.begun
        count = data.draw(st.integers(1, flight.to_begin))
        assert self.flights.hand_out(flight, count) == begun

    @precondition(lambda self: self._running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        flight, first = data.draw(st.sampled_from(self._running))
        part = flight.parts[first]
        self.flights.release(flight, first, data.draw(st.integers(part.ended, part.size)))

    @precondition(lambda self: self._running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.flights.end(*data.draw(st.sampled_from(self._running)))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), engine=st.sampled_from(ENGINES))
    def cancel_or_move(self, data: st.DataObject, engine: EngineTarget) -> None:
        flight = self._one(data, [*self.flights.values()])
        if data.draw(st.booleans()):
            self.flights.cancel(flight, "stale")
            self.flights.cancel(flight, "stop")
            assert flight.cancelled == "stale", "the first cause stays"
        else:
            self.flights.move(flight, engine)

    @precondition(lambda self: self._running)
    @rule(data=st.data(), address=st.sampled_from(["", "tcp://a", "tcp://a2"]))
    def serve(self, data: st.DataObject, address: str) -> None:
        self.flights.serve(*data.draw(st.sampled_from(self._running)), address)

    @precondition(lambda self: any(not f.busy for f in self.flights.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.flights.remove(self._one(data, [f for f in self.flights.values() if not f.busy]))

    @invariant()
    def counts_are_those_of_a_walk(self) -> None:
        flights, every = self.flights, [*self.flights.values()]
        inflight, load, versions = Counter[str](), Counter[int](), Counter[int]()
        served = Counter[str]()
        for flight in every:
            assert flight.ended == sum(part.ended for part in flight.parts.values())
            inflight[f"{flight.work.kind}/{flight.work.env}"] += flight.executing
            load[flight.engine.index] += SIZE - flight.ended
            for part in flight.parts.values():
                served[part.address] += part.size - part.ended
            if flight.work.kind == "train" and flight.work.env != "c":
                versions[flight.version] += 1
        assert flights.inflight() == inflight and flights.versions() == versions
        assert +flights.load == +load
        del served[""]
        assert flights.served == +served, "and what nobody serves is forgotten"
        for kind in ("train", "eval"):
            mine = [f for f in every if f.work.kind == kind]
            assert flights.executing(kind) == sum(f.executing for f in mine)
            assert flights.to_begin(kind) == sum(f.to_begin for f in mine)
            assert flights.half_dispatched(kind) is next((f for f in mine if f.to_begin), None)
        assert flights.executing() == sum(f.executing for f in every)
        assert flights.to_begin() == sum(f.to_begin for f in every)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class Sealed(Flights):
    """Flights that nobody may walk over."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("walked over all groups in flight")


def test_an_admission_walks_over_no_groups_in_flight() -> None:
    s = Scheduler(config(dispatch={"rollouts_per_activity": 1}), EXAMPLES, Lease())
    s.flights = Sealed()
    evals = [EvalEpoch("0-0/a", "a", 0, 2, 2)]
    s.on_control(control(1, permits=9, train_limit=50, evals=evals))
    parts = admitted(s)
    assert len(parts) == 9 and s.engine() is not None and s.oldest == 0 and not s.stale()
    assert s.gauges().inflight_train == 5 and s.gauges().inflight_eval == 4
    assert s.on_released({f"{parts[0].work.group}/{parts[0].first}": 1})
    assert isinstance(s.admit(0.0), Part)
    assert s.reserved == 9 + s.flights.to_begin()
