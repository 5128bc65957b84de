"""Everything that one dispatch generation decides. Pure: events in, decisions and reports out.

The Scheduler decides what starts next; this class decides what is cancelled, what happens after an
activity failed, and what is reported to the run. `Dispatch` turns that into activities, timers and
signals. Invariants:

- Every admitted group is delivered exactly once: as a result, as an error with its cause, or as
  one cancellation with its first cause.
- What was admitted and is in no report yet is `outstanding` in every report.
- Everything that requires action or a report wakes the generation (`has_news`).
- A report that waits (`holds_back`) never delays a batch by more than HELD_FOR.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import GroupResult, GroupWork
from ratchet.configs.algorithm import scores_at_once
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import (
    Control,
    DispatchInput,
    DispatchReport,
    LostServer,
)
from ratchet.workflows.rules.flights import Cause, Flight
from ratchet.workflows.rules.held_work import HeldWorks
from ratchet.workflows.rules.placement import MAX_RELOCATIONS, Attempt
from ratchet.workflows.rules.scheduler import Part, Scheduler
from ratchet.workflows.rules.sinks import counted

TOGETHER = 16
"""Rollouts of small groups that one activity runs: each activity costs its own share of Temporal's
work. An eval is over with its last group anyway.
"""
SHORT_S = 2.0
"""Train groups share an activity if the last one of their env took no longer: whoever ends first
waits for the others.
"""
GROUPS_PER_REPORT = 100
"""Keeps a report, at about 500 B a group, below 64 KiB."""
HELD_FOR = timedelta(seconds=5)
"""The longest time for which a report waits for more groups: each one costs a turn of the run and
one of the generation.
"""


class Generation:
    """Groups in flight, those to be reported, and when to check again."""

    def __init__(self, config: RunConfig, arg: DispatchInput) -> None:
        self._arg = arg
        self._config = config
        self.scheduler = Scheduler(config, arg.examples, arg.lease, arg.shares)
        self.scheduler.on_control(arg.control)
        self.flights = self.scheduler.flights
        self.held = HeldWorks()
        self.outbox: list[GroupResult] = []
        self.changed = self.report_due = False
        self.may_hold_back = self.may_share = False
        self._reported: dict[int, int] = {}
        self._took_s: dict[str, float] = {}
        self._lost: list[LostServer] = []
        self._waits: list[str] = []
        self._unplaced: list[str] = []
        self._seq = 0

    # -- turns ------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether the next turn is due."""
        return self.changed or self.report_due or bool(self.outbox and not self.holds_back)

    @property
    def must_report(self) -> bool:
        """Whether the run needs a report now."""
        held = self.holds_back or not self.outbox
        return bool(self._lost) or self.report_due or not held

    @property
    def holds_back(self) -> bool:
        """Whether the run can do nothing yet with the groups that ended: all of them count as they
        are, and they do not fill its next batch.
        """
        control, outbox = self.scheduler.control, self.outbox
        return (
            self.may_hold_back
            and control.missing > 0
            and self.scheduler.admitting
            and 0 < len(outbox) < GROUPS_PER_REPORT
            and all(self._is_plain(group) for group in outbox)
            and sum(self._counted(group) for group in outbox) < self._missing()
        )

    def _missing(self) -> int:
        """Rollouts that fill the run's next batch, beyond those that were reported."""
        control, batch = self.scheduler.control, self._config.train.batch_size
        assert batch is not None
        unheard = sum(n for seq, n in self._reported.items() if seq > control.heard)
        return (control.missing - unheard) % batch or batch

    def _is_plain(self, group: GroupResult) -> bool:
        """Whether a group only counts: nothing of it failed, is replaced or is observed."""
        whole = self._counted(group) == group.size
        return whole and not (group.errored or group.observed or group.error)

    def _counted(self, group: GroupResult) -> int:
        """Rollouts with which a group fills a batch."""
        if group.kind != "train" or group.cancelled:
            return 0
        return counted(self._config, group)

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be admitted and everything in flight was delivered."""
        return not (self.scheduler.admitting or self.flights or self.outbox)

    @property
    def buffered(self) -> int:
        """Rollouts that have ended in groups that have not."""
        return sum(flight.ended for flight in self.flights.values())

    @property
    def waiting_for(self) -> str:
        """What this generation waits for, '' for nothing."""
        if not self._waits:
            return self.scheduler.blocked.reason
        others = f" and {len(self._waits) - 1} more" if len(self._waits) > 1 else ""
        return f"an engine and an env server for {self._waits[0]}{others}"

    def must_hand_over(self, *, long: bool) -> bool:
        """Whether the next generation should admit; `long`: this one's history is long."""
        now, revision = self.scheduler.control, self._arg.control.revision
        wanted = now.stop or bool(now.pause) or now.revision != revision
        return self.scheduler.admitting and (wanted or long)

    def begin_turn(self, *, long: bool) -> bool:
        """True if admission ends with this turn, which the run must learn at once."""
        self.changed = False
        if hands_over := self.must_hand_over(long=long):
            self.scheduler.close()
        return hands_over

    def review(self) -> list[str]:
        """Cancels what must not continue; returns the groups whose activities must be cancelled."""
        control, scheduler = self.scheduler.control, self.scheduler
        given_up = self.give_up(list(self.flights), "stop") if control.stop else []
        if control.pause == "cancel":
            given_up += self.give_up(list(self.flights), "pause")
        given_up += self.give_up(scheduler.surplus(), "pause")
        unplaced, self._unplaced = self._unplaced, []
        given_up += self.give_up([g for g in unplaced if g in self.flights], "pause")
        given_up += self.give_up(scheduler.stale(), "stale")
        return given_up + self.give_up(scheduler.overload(), "overload")

    def give_up(self, groups: list[str], why: Cause) -> list[str]:
        """Hands out no more of the groups; returns them. Those without a running activity are
        delivered at once, the others when their activities have ended.
        """
        for group in groups:
            flight = self.flights[group]
            self.flights.cancel(flight, why)
            if not flight.busy:
                self._deliver(flight)
        return groups

    def report(self, *, closed: bool = False, most: int = GROUPS_PER_REPORT) -> DispatchReport:
        """The next report, with at most `most` groups; the last one says that all is `closed`."""
        scheduler, groups, lost = self.scheduler, self.outbox[:most], self._lost
        self.outbox, self._lost, self.report_due = self.outbox[most:], [], False
        heard = scheduler.control.heard
        self._reported = {seq: n for seq, n in self._reported.items() if seq > heard}
        self._reported[self._seq] = sum(map(self._counted, groups))
        self._seq += 1
        return DispatchReport(
            generation=self._arg.generation,
            seq=self._seq - 1,
            state="closed" if closed else "open" if scheduler.admitting else "tail",
            groups=groups,
            inflight_train=self.flights.executing("train"),
            inflight_eval=self.flights.executing("eval"),
            reserved=scheduler.reserved,
            lease=scheduler.cursor(),
            oldest=scheduler.oldest,
            outstanding=[*self.flights, *(group.group for group in self.outbox)],
            waiting_for=self.waiting_for,
            lost=lost,
            run_id=self._arg.run_id,
            trouble=self.held.reason,
        )

    # -- events -----------------------------------------------------------------------------

    def on_control(self, control: Control) -> None:
        """Applies the run's newest control state; older ones are ignored."""
        self.changed |= self.scheduler.on_control(control)

    def on_released(self, ended: dict[str, int]) -> None:
        """Rollouts ended inside activities that still run: their permits are free."""
        if self.scheduler.on_released(ended):
            self.changed = True
            # A tail's permits belong to the next generation, which gets them through the run.
            self.report_due |= not self.scheduler.admitting

    def on_held(self, work: str, reason: str, now: float) -> None:
        """The result of `work` cannot be stored; the first such work is reported to the run."""
        self.report_due |= self.held.on_failed(work, reason, now)

    def on_work_ended(self, work: str) -> None:
        """`work` no longer needs the store; the run is informed once nothing is held."""
        self.report_due |= self.held.on_ended(work)

    def on_part_ended(self, part: Part, lost: str) -> bool:
        """A part's activities are over, `lost` says why in vain; True if its group must now be
        finalized.
        """
        group = part.work.group
        flight = self.flights[group]
        flight.lost = lost or flight.lost
        complete = self.scheduler.on_ended(group, part.first)
        flight.finalizing = complete and not (flight.cancelled or flight.user_error)
        if (complete or flight.cancelled) and not flight.busy:
            self._deliver(flight, error=flight.lost)
        self.changed = True
        return flight.finalizing

    def on_finalized(self, group: str, result: GroupResult | None, error: str) -> None:
        """The group's result, or why there is none."""
        self._deliver(self.flights[group], result, error)

    def finalize_from(self, part: Part) -> int | None:
        """The version that a group began at, if the activity of `part` is to finalize it, too; None
        if that is left to an activity of its own: for a group in parts, and where scoring may take
        long, since the rollouts hold their permits meanwhile, or depends on when it happens.
        """
        work = part.work
        whole = part.last - part.first == work.size
        at_once = work.kind == "eval" or scores_at_once(self._config.algorithm(work.env))
        return self.flights[work.group].version if whole and at_once else None

    def together(self, parts: Sequence[Part]) -> list[list[Part]]:
        """The parts that begin now, by the activity that runs them: whole groups of one env on one
        engine may share one, those that train if they are short. While the store fails each has its
        own, since each is held.
        """
        most = 1 if self.held.reason else self._config.dispatch.rollouts_per_activity or TOGETHER
        activities: list[list[Part]] = []
        filling: dict[object, list[Part]] = {}
        for part in parts:
            work = part.work
            key = work.env, part.engine, self.finalize_from(part)
            beside = filling.get(key)
            if part.last - part.first < work.size or not self._shares(work):
                activities.append([part])
            elif beside and sum(one.work.size for one in beside) + work.size <= most:
                beside.append(part)
            else:
                activities.append([part])
                filling[key] = activities[-1]
        return activities

    def _shares(self, work: GroupWork) -> bool:
        if work.kind == "eval":
            return True
        return self.may_share and self._took_s.get(work.env, math.inf) <= SHORT_S

    def on_played(self, work: GroupWork, seconds: float) -> None:
        """An activity that ran a group, or several, took `seconds`."""
        if work.kind == "train":
            self._took_s[work.env] = seconds

    # -- attempts ---------------------------------------------------------------------------

    def attempt(self, part: Part) -> Attempt:
        """A part's first attempt; it has no address if its env may not be used now."""
        attempt = Attempt(part.work, part.engine, first=part.first)
        self._serve(attempt)
        return attempt

    def attempt_together(self, parts: Sequence[Part]) -> Attempt:
        """The only attempt of several parts in one activity, on one env server."""
        attempt = self.attempt(parts[0])
        for part in parts[1:]:
            self.flights.serve(self.flights[part.work.group], part.first, attempt.address)
        return attempt

    def alone(self, part: Part) -> Part:
        """A part that an activity of several groups did not end, on its engine as it is now, which
        may have another version since.
        """
        engines = {
            (engine.index, engine.epoch): engine for engine in self.scheduler.control.engines
        }
        engine = engines.get((part.engine.index, part.engine.epoch), part.engine)
        self.flights.move(self.flights[part.work.group], engine)
        return replace(part, engine=engine)

    def has_place(self, attempt: Attempt) -> bool:
        """Whether there is an engine and an env server that the attempt may use."""
        address = self.scheduler.places.address(attempt.work)
        return bool(address) and self.scheduler.engine() is not None

    def on_waits(self, attempt: Attempt) -> None:
        """The attempt has no such place now: the run is informed what is waited for."""
        self._waits.append(attempt.work.group)
        self.report_due = True

    def on_waited(self, attempt: Attempt) -> None:
        """The attempt no longer waits."""
        self._waits.remove(attempt.work.group)

    def on_unplaced(self, attempt: Attempt) -> None:
        """There was no place for too long: the group is requeued."""
        self._unplaced.append(attempt.work.group)
        self.changed = True

    def place(self, attempt: Attempt) -> None:
        """Pins the attempt to an available engine and env server."""
        engine = self.scheduler.engine()
        assert engine is not None
        # The rest of the group follows, for the prefix cache.
        attempt.engine = engine
        self.flights.move(self.flights[attempt.work.group], engine)
        if not attempt.finalizing:
            self._serve(attempt)

    def _serve(self, attempt: Attempt) -> None:
        """Has the attempt use the least loaded env server, if there is one."""
        attempt.address = self.scheduler.address(attempt.work)
        self.flights.serve(self.flights[attempt.work.group], attempt.first, attempt.address)

    def on_failed(self, attempt: Attempt, kind: str, reason: str) -> bool:
        """An activity failed by `kind`; True if a server was lost, so that a wait and a new place
        must follow. Then it is retried unless the attempt has a failure.
        """
        work = attempt.work
        if kind == names.ENGINE_LOST or (kind == names.ENV_LOST and not attempt.finalizing):
            lost = self.scheduler.places.leave(attempt, kind, reason)
            if lost is not None and lost not in self._lost:
                self._lost.append(lost)
                self.changed = True
            if attempt.losses == MAX_RELOCATIONS:
                attempt.failure = f"abandoned after {MAX_RELOCATIONS} relocations: {reason}"
            return True
        attempt.failure = reason
        self.flights[work.group].user_error = kind == names.BAD_INPUT
        # A train group with damaged artifacts is rolled out again, under another id.
        if kind == names.CORRUPT and work.kind == "train" and f"/{work.group}" in reason:
            self.give_up([work.group], "damaged")
        return False

    def on_rested(self, attempt: Attempt) -> None:
        """The wait after a loss is over, or was cut short."""
        self.scheduler.places.forgive(attempt)

    def _deliver(self, flight: Flight, result: GroupResult | None = None, error: str = "") -> None:
        work, cancelled = flight.work, flight.cancelled
        if result is None or cancelled:
            result = GroupResult(
                group=work.group,
                kind=work.kind,
                env=work.env,
                ref=None,
                size=work.size,
                survivors=0,
                errored=work.size,
                reward_mean=0.0,
                samples=0,
                tokens=0,
                version_start=flight.version,
                error=f"Cancelled: {cancelled}" if cancelled else error,
                cancelled=cancelled,
                user_error=flight.user_error and not cancelled,
            )
        self.flights.remove(flight)
        self.outbox.append(result)
        self.changed = True
