"""One dispatch generation without Temporal: the object that decides for Dispatch, in a shell.

Activities, time and signals are whatever the test makes happen; see pipeline.py for the run. What
the generation reports is compared with what was made to happen, every broken promise is an
AssertionError.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ratchet.activities.contracts import names
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.rollouts import EngineTarget, GroupResult, GroupWork
from ratchet.workflows.protocol.messages import Control, DispatchInput
from ratchet.workflows.protocol.state import Lease
from ratchet.workflows.rules import generation as rules
from ratchet.workflows.rules.leases import news_of
from ratchet.workflows.rules.placement import Attempt
from ratchet.workflows.rules.scheduler import Part

if TYPE_CHECKING:
    from tests.unit.workflows.pipeline import World

MOST = 2
"""Groups in a report: so few, that there are often more."""


@dataclass(eq=False)
class Running:
    """An activity of a group, and the task around it: one of its parts, or (without one) what
    finalizes it. `told` of its rollouts were reported as ended.
    """

    attempt: Attempt
    part: Part | None
    version: int
    label: str
    told: int = 0
    doing: Literal["work", "rest", "wait", "held"] = "work"
    cancelled: bool = False
    losses: int = 0

    @property
    def group(self) -> str:
        """The group's name."""
        return self.attempt.work.group

    @property
    def name(self) -> str:
        """What Dispatch calls this work."""
        return self.group if self.part is None else f"{self.group}/{self.part.first}"

    @property
    def size(self) -> int:
        """Rollouts of the part."""
        return 0 if self.part is None else self.part.last - self.part.first


class Generation:
    """One Dispatch workflow. `inbox` holds controls under way to it, each with the permits of the
    whole run when it was sent; `granted` is the last of them to arrive.
    """

    def __init__(self, world: "World", number: int, lease: Lease, control: Control) -> None:
        arg = DispatchInput(
            "run", number, world.plain, world.state.lifecycle.examples, Queues(), lease, control
        )
        self.granted = world.permits
        self.world = world
        self.number = number
        self.decides = rules.Generation(world.config, arg)
        self.decides.may_hold_back = self.decides.may_share = True
        self.scheduler = self.decides.scheduler
        self.works: list[Running] = []
        self.inbox: list[tuple[Control, int]] = []
        self.long = self.over = False
        self._sent = news_of(control)
        self._heard = [control]
        self._rings_at = self._reports_at = float("inf")
        self._loop = self._turns()
        # What reports must agree with: groups by name and what of them was handed out, those
        # reported, why each was given up, and engines that were lost for good.
        self._admitted: dict[str, GroupWork] = {}
        self._begun: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._causes: dict[str, str] = {}
        self._gone: set[tuple[int, int]] = set()
        self._unreported: set[tuple[int, int]] = set()
        self._reports = 0

    @property
    def groups(self) -> list[str]:
        """Groups that are begun and not over."""
        return list(self.decides.flights)

    @property
    def parts(self) -> list[Running]:
        """Parts that are under way."""
        return [work for work in self.works if work.part is not None]

    @property
    def finalizing(self) -> list[Running]:
        """Groups whose rollouts have all ended."""
        return [work for work in self.works if work.part is None]

    # -- signals ----------------------------------------------------------------------------

    def send(self, control: Control, permits: int) -> None:
        """The run sends a control, if it is news to the generation."""
        if news_of(control) != self._sent:
            self._sent = news_of(control)
            self.inbox.append((control, permits))

    def hear(self) -> None:
        """The next control arrives."""
        control, self.granted = self.inbox.pop(0)
        self._heard.append(control)
        self.decides.on_control(control)
        assert self.scheduler.control == control

    def hear_again(self, back: int) -> None:
        """A control of before arrives once more, and changes nothing."""
        before = self.decides.changed
        self.decides.on_control(self._heard[-1 - back % len(self._heard)])
        assert self.scheduler.control == self._heard[-1] and self.decides.changed == before

    # -- Dispatch's loop --------------------------------------------------------------------

    def turn(self, *, hand_over: bool = False, sign_of_life: bool = False) -> bool:
        """Dispatch goes on until it next waits, if something wakes it: for a signal to be sent
        (True) or for news.
        """
        self.long |= hand_over
        self.decides.report_due |= sign_of_life
        if self.world.now >= self._rings_at:
            self._rings_at = float("inf")
            self.decides.changed = True
        if self.world.now >= self._reports_at:
            self._reports_at = float("inf")
            self.decides.report_due |= bool(self.decides.outbox)
        return not self.over and next(self._loop)

    def _turns(self) -> Iterator[bool]:
        decides = self.decides
        while True:
            if decides.begin_turn(long=self.long):
                self._report()
                yield True
            self._review()
            self._admit()
            if decides.must_report:
                self._report()
                yield True
            if decides.is_over:
                break
            if decides.holds_back:
                within = self.world.now + rules.HELD_FOR.total_seconds()
                self._reports_at = min(self._reports_at, within)
            yield False
            while not decides.has_news:
                yield False
        self._report(closed=True)
        assert self._reported == self._admitted.keys(), "what was admitted is never delivered"
        self.over = True
        yield False

    def _review(self) -> None:
        control, train = self.scheduler.control, self.world.config.train
        known = dict(self.decides.flights)
        freshest = control.next_version - train.max_off_policy_steps
        for group, flight in known.items():
            aged = flight.work.kind == "train" and flight.version < freshest
            due = ("stop" if control.stop else "pause") if self._told_to_end else ""
            surplus = control.train_over and flight.work.kind == "train"
            if due := due or ("pause" if surplus else "stale" if aged else ""):
                self._causes.setdefault(group, due)
        given_up = self.decides.review()
        for group in given_up:
            assert group in self._causes or (control.trim and known[group].work.kind == "train")
            self._causes.setdefault(group, "overload")
        for work in self.works:
            work.cancelled |= work.group in given_up
        kept = [flight for flight in self.decides.flights.values() if not flight.cancelled]
        assert not self._causes.keys() & {flight.work.group for flight in kept}, "it must not go on"
        executing = sum(flight.executing for flight in kept)
        if control.trim and executing > control.permits:
            assert not any(f.executing for f in kept if f.work.kind == "train"), "too much goes on"

    @property
    def _told_to_end(self) -> bool:
        return self.scheduler.control.stop or self.scheduler.control.pause == "cancel"

    def _admit(self) -> None:
        admitted: list[Part] = []
        while True:
            evals_wait = self._evals_wait()
            decision = self.scheduler.admit(self.world.now)
            if not isinstance(decision, Part):
                break
            assert not (evals_wait and decision.work.kind == "train"), "an eval was passed by"
            admitted.append(decision)
        for parts in self.decides.together(admitted):
            if len(parts) > 1:
                # Their common activity ends at once, and each goes on alone.
                self.decides.attempt_together(parts)
                parts = [self.decides.alone(part) for part in parts]
            for part in parts:
                self._start(part)
        if decision.retry_s:
            self._rings_at = min(self._rings_at, self.world.now + decision.retry_s)

    def _evals_wait(self) -> bool:
        """Whether this generation has eval work that it could start."""
        scheduler = self.scheduler
        if scheduler.admitting and (scheduler.next_requeued("eval") or scheduler.next_eval()):
            return True
        return any(f.to_begin and f.work.kind == "eval" for f in scheduler.flights.values())

    def _start(self, part: Part) -> None:
        name, world = part.work.group, self.world
        if part.first == 0:
            world.on_begun(self, part.work)
            assert name not in self._admitted
            self._admitted[name] = part.work
        assert name not in self._causes, f"{name} was given up"
        self._begun[name] += part.last - part.first
        attempt = self.decides.attempt(part)
        self.decides.on_played(part.work, 9.0 if part.work.example % 3 == 0 else 0.1)
        work = Running(attempt, part, *world.samples[attempt.engine.index])
        work.doing = "work" if attempt.address else "wait"
        self.works.append(work)
        world.on_started()

    def _report(self, *, closed: bool = False) -> None:
        report = self.decides.report(closed=closed, most=MOST)
        left = self.decides.outbox and not self.decides.holds_back
        assert self.decides.must_report == bool(left), "it reports for ever"
        assert report.seq == self._reports and report.generation == self.number
        assert closed or report.state == ("open" if self.scheduler.admitting else "tail")
        assert len(report.groups) <= MOST, "more groups in a report than it may carry"
        for group in report.groups:
            assert group.group not in self._reported, "a group is reported twice"
            assert group.cancelled == self._causes.get(group.group, ""), "not the first cause"
            self._reported.add(group.group)
        known = [group for group in self._admitted if group not in self._reported]
        assert Counter(report.outstanding) == Counter(known), "what is admitted is not outstanding"
        held = sum(work.size - work.told for work in self.parts)
        flights = [self._admitted[group] for group in self.groups]
        ahead = [w.size - self._begun[w.group] for w in flights if w.group not in self._causes]
        assert report.inflight_train + report.inflight_eval == held
        assert report.reserved == held + sum(ahead), "permits are kept that nobody needs"
        assert bool(report.trouble) == any(work.doing == "held" for work in self.works)
        self._unreported -= {(s.index, s.epoch) for s in report.lost if s.role == "engine"}
        assert not self._unreported, "a lost engine is not reported"
        self._reports += 1
        self.world.mail.append(report)

    # -- what becomes of activities ---------------------------------------------------------

    def release(self, work: Running, *, told: bool) -> None:
        """A rollout ends while others of its part go on; `told` is whether the signal arrives."""
        if work.doing != "work" or work.cancelled:
            return
        self.world.commit(work)
        if told and work.told < work.size:
            work.told += 1
            self.decides.on_released({work.name: work.told})
            assert self.decides.changed
            assert not self.scheduler.on_released({work.name: work.told})

    def end(self, work: Running, result: GroupResult | None = None) -> None:
        """The activity ends, cancelled or not; what finalizes a group has a `result`."""
        if work.cancelled:
            if work.doing == "rest":
                self.decides.on_rested(work.attempt)
            flight = self.decides.flights[work.group]
            self._over(work, None, flight.lost or "cancelled from outside")
        elif work.doing == "work":
            self._over(work, result, "")
        else:
            self.go_on(work)

    def fail(self, work: Running, kind: str) -> None:
        """The activity fails: it lost its server, found something damaged, or the store is full."""
        if work.doing != "work" or work.cancelled:
            return
        attempt, decides = work.attempt, self.decides
        if work.part is not None:
            self.world.commit(work)
        if kind == names.STORE_FAILED:
            decides.on_held(work.name, "disk full", self.world.now)
            work.doing = "held"
            return
        if kind == names.CORRUPT and attempt.work.kind == "train":
            self._causes.setdefault(work.group, "damaged")
        if decides.on_failed(attempt, kind, f"groups/{work.group}.json"):
            work.doing = "rest"
            work.losses += 1
            if work.losses >= 2:
                self._lose_for_good(work, kind)
        else:
            self._over(work, None, attempt.failure)

    def _lose_for_good(self, work: Running, kind: str) -> None:
        if work.part is not None:
            work.losses = 0
        if kind == names.ENGINE_LOST:
            assert self.decides.must_report and self.decides.has_news, "a loss wakes nobody"
            engine = (work.attempt.engine.index, work.attempt.engine.epoch)
            self._gone.add(engine)
            self._unreported.add(engine)

    def go_on(self, work: Running) -> None:
        """A rest is over, or what the activity waits for is there."""
        attempt, held = work.attempt, self.decides.held
        if work.doing == "rest":
            self.decides.on_rested(attempt)
            work.doing = "wait"
        elif work.doing == "wait" and self.decides.has_place(attempt):
            self.decides.place(attempt)
            work.doing = "work"
            if attempt.failure:
                self._over(work, None, attempt.failure)
        elif work.doing == "held" and (not held.shares_tries(work.name) or held.may_try(work.name)):
            held.take_turn()
            held.on_stored()
            self.decides.on_work_ended(work.name)
            work.doing = "work"

    def _over(self, work: Running, result: GroupResult | None, lost: str) -> None:
        self.works.remove(work)
        self.decides.on_work_ended(work.name)
        if work.part is None:
            self.decides.on_finalized(work.group, result, lost)
            return
        self.world.commit(work)
        if self.decides.on_part_ended(work.part, lost):
            assert work.group not in self._causes, "a group that was given up is finalized"
            flight = self.decides.flights[work.group]
            attempt = Attempt(flight.work, flight.engine, finalizing=True)
            self.works.append(Running(attempt, None, work.version, work.label))

    # -- what always holds ------------------------------------------------------------------

    def check(self) -> None:
        """A permit is held by a rollout that runs, and no server is avoided without a reason."""
        held = sum(flight.executing for flight in self.decides.flights.values())
        assert held == sum(work.size - work.told for work in self.parts)
        served = Counter[str]()
        for work in self.parts:
            served[work.attempt.address] += work.size - work.told
        del served[""]
        assert self.decides.flights.served == +served, "an env server's load is not what it serves"
        for engine in self.scheduler.control.engines:
            key = (engine.index, engine.epoch)
            rests = any(w.doing == "rest" and _at(w.attempt.engine, key) for w in self.works)
            if not rests and key not in self._gone:
                others = {e.index: 1 for e in self.scheduler.control.engines if e != engine}
                assert self.scheduler.places.engine(others) == engine, "avoided for no reason"


def _at(engine: EngineTarget, key: tuple[int, int]) -> bool:
    return (engine.index, engine.epoch) == key
