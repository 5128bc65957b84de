"""One dispatch generation: keeps rollouts in flight until it hands over to the next.

The Scheduler decides; this workflow turns its decisions into activities and reports what arrived.
Every admitted group ends in exactly one report: as a result, as an error with its cause, or as one
typed cancellation. The generation never continues as new: it ends, so its history is bounded by
what it admits.
"""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import (
    EngineTarget,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    Released,
    RunRolloutsInput,
)
from ratchet.configs.upgrades import read_config
from ratchet.workflows.protocol import policies
from ratchet.workflows.protocol.errors import cause_of, type_of
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    Control,
    DispatchInput,
    DispatchReport,
    LostServer,
)
from ratchet.workflows.protocol.policies import rest_after
from ratchet.workflows.rules.scheduler import Part, Scheduler

SIGN_OF_LIFE = timedelta(seconds=60)
MAX_ADMISSIONS_PER_TASK = 64
MAX_RELOCATIONS = 20
"""Times a group is sent out anew after its engine or env server was lost."""
RELOCATION_PAUSE = timedelta(seconds=5)
"""Rest before the same server is tried again: a dropped connection is no dead server."""
TRIES_OF_ITS_OWN = 3
"""Times that work is tried again for the store's sake before one tries for all: a generation may
hold hundreds, and every try is events of its history.
"""
WOKEN_BY_ONE = 8
"""Held works that are tried once another was stored, each of which then wakes as many."""
LONG_TRY = timedelta(seconds=60)
GROUPS_PER_REPORT = 100
"""Keeps a report, at some 500 B a group, below 64 KiB."""

Cause = Literal["stale", "overload", "damaged", "pause", "stop"]


@dataclass
class GroupRun:
    """A group in flight: its parts by first rollout, and how it fares."""

    work: GroupWork
    version: int
    parts: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    lost: str = ""
    user_error: bool = False
    cancelled: Cause | Literal[""] = ""


@workflow.defn(name=DISPATCH)
class Dispatch:
    """Generation `generation` of a run's dispatch."""

    @workflow.init
    def __init__(self, arg: DispatchInput) -> None:
        config = read_config(arg.config)
        self._arg = arg
        self._events_limit = config.dispatch.generation_events
        self._timeouts = {env.name: env.timeout_s for env in [*config.train.env, *config.eval.env]}
        self._frozen = {env.name for env in config.train.env if config.is_frozen(env.name)}
        self._scheduler = Scheduler(config, arg.examples, arg.lease, arg.shares)
        self._scheduler.on_control(arg.control)
        self._groups: dict[str, GroupRun] = {}
        self._outbox: list[GroupResult] = []
        self._lost: list[LostServer] = []
        self._troubles: dict[str, str] = {}
        self._troubled_at = 0.0
        self._may_try = 0
        self._alarm: asyncio.Task[None] | None = None
        self._rings_at = 0.0
        self._seq = 0
        self._changed = False
        self._silent = False
        self._run_is_over = False

    @workflow.signal
    def control(self, control: Control) -> None:
        """The run's newest wishes."""
        if self._scheduler.on_control(control):
            self._changed = True

    @workflow.signal(name=names.RELEASED)
    def released(self, released: Released) -> None:
        """Rollouts ended inside activities that still run: their permits are free."""
        if self._scheduler.on_released(released.ended):
            self._changed = True
            # A tail's permits are the next generation's, which hears of them through the run.
            self._silent = self._silent or not self._scheduler.admitting

    @workflow.run
    async def run(self, arg: DispatchInput) -> None:
        """Returns when nothing more may be admitted and everything in flight was delivered."""
        pulse = asyncio.create_task(self._pulse())
        while not self._run_is_over:
            self._changed = False
            if self._scheduler.admitting and self._must_hand_over():
                self._scheduler.close()
                await self._report("tail")
            if self._scheduler.control.stop:
                self._give_up(list(self._groups), "stop")
            if self._scheduler.control.pause == "cancel":
                self._give_up(list(self._groups), "pause")
            self._give_up(self._scheduler.stale(), "stale")
            self._give_up(self._scheduler.overload(), "overload")
            await self._admit()
            if self._outbox or self._lost or self._silent:
                await self._report("open" if self._scheduler.admitting else "tail")
            if not self._scheduler.admitting and not self._groups and not self._outbox:
                break
            await workflow.wait_condition(
                lambda: self._changed or bool(self._outbox) or self._silent
            )
        pulse.cancel()
        self._give_up(list(self._groups), "stop")
        if not self._run_is_over:
            await self._report("closed")

    async def _pulse(self) -> None:
        while True:
            await workflow.sleep(SIGN_OF_LIFE, summary="sign of life")
            self._silent = True

    def _must_hand_over(self) -> bool:
        return (
            self._scheduler.control.stop
            or bool(self._scheduler.control.pause)
            or self._scheduler.control.revision != self._arg.control.revision
            or workflow.info().is_continue_as_new_suggested()
            or workflow.info().get_current_history_length() >= self._events_limit
        )

    async def _admit(self) -> None:
        admitted = 0
        while isinstance(decision := self._scheduler.admit(workflow.time()), Part):
            work = decision.work
            version = self._scheduler.control.version
            run = self._groups.setdefault(work.group, GroupRun(work, version))
            run.parts[decision.first] = asyncio.create_task(self._perform(run, decision))
            admitted += 1
            if admitted % MAX_ADMISSIONS_PER_TASK == 0:
                # A timer ends the workflow task, so that one task never carries too many commands.
                await workflow.sleep(0.001)
                if self._scheduler.admitting and self._must_hand_over():
                    self._changed = True
                    return
        if decision.retry_s:
            self._set_alarm(decision.retry_s)

    def _set_alarm(self, seconds: float) -> None:
        """Looks again after `seconds`, unless an alarm will ring by then."""
        rings_at = workflow.time() + seconds
        if self._alarm is not None and not self._alarm.done():
            if self._rings_at <= rings_at + 0.05:
                return
            self._alarm.cancel()
        self._rings_at = rings_at
        self._alarm = asyncio.create_task(self._ring_after(seconds))

    async def _ring_after(self, seconds: float) -> None:
        await workflow.sleep(seconds, summary="rate limit or burst cap")
        self._changed = True

    def _give_up(self, groups: list[str], why: Cause) -> None:
        """Cancels what runs of the groups; each is delivered as one cancellation."""
        for group in groups:
            run = self._groups[group]
            run.cancelled = run.cancelled or why
            self._scheduler.give_up(group)
            for task in run.parts.values():
                task.cancel()
            if not run.parts:
                self._deliver(run, self._cancelled(run))

    async def _perform(self, run: GroupRun, part: Part) -> None:
        """One part; the last of its group to end finalizes the group and delivers it."""
        scheduler, group = self._scheduler, run.work.group
        try:
            run.lost = await self._roll_out(run, part) or run.lost
        except asyncio.CancelledError:
            # Unasked, it is a loss like any other: nobody would roll the example out anew.
            run.lost = run.lost or "cancelled from outside"
        except Exception as error:
            # A group that vanished would keep its permits and its generation open for ever.
            run.lost = cause_of(error)
        complete = scheduler.on_ended(group, part.first)
        self._changed = True
        if len(run.parts) > 1 or not (complete or run.cancelled):
            del run.parts[part.first]
            return
        if run.cancelled:
            self._deliver(run, self._cancelled(run))
            return
        if run.user_error:
            failed = self._failed(run.work, run.version, run.lost)
            self._deliver(run, replace(failed, user_error=True))
            return
        try:
            result = await self._finalize(run)
            if run.cancelled:
                result = self._cancelled(run)
        except asyncio.CancelledError:
            lost = self._failed(run.work, run.version, "cancelled from outside")
            result = self._cancelled(run) if run.cancelled else lost
        self._deliver(run, result)

    def _on_damage(self, run: GroupRun, kind: str, reason: str) -> None:
        """A train group of which something kept is damaged is rolled out anew, under another id."""
        if kind == names.CORRUPT and run.work.kind == "train" and f"/{run.work.group}" in reason:
            run.cancelled = run.cancelled or "damaged"
            self._scheduler.give_up(run.work.group)

    def _deliver(self, run: GroupRun, result: GroupResult) -> None:
        self._scheduler.on_finished(run.work.group)
        del self._groups[run.work.group]
        self._outbox.append(result)
        self._changed = True

    def _cancelled(self, run: GroupRun) -> GroupResult:
        text = f"Cancelled: {run.cancelled}"
        return replace(self._failed(run.work, run.version, text), cancelled=run.cancelled)

    async def _roll_out(self, run: GroupRun, part: Part) -> str:
        """Returns '' once every rollout of the part ended, or why they were given up."""
        work, engine = part.work, part.engine
        reason, tried = "", 0
        for _ in range(MAX_RELOCATIONS):
            address = self._scheduler.env_address(work.env)
            if address is None:
                engine, address = await self._place(work)
            try:
                await self._with_patience(
                    f"{work.group}/{part.first}",
                    names.RUN_ROLLOUTS,
                    RunRolloutsInput(
                        self._arg.run_id,
                        work,
                        engine,
                        address,
                        self._scheduler.gauges(),
                        part.first,
                        part.last,
                    ),
                    task_queue=self._arg.queues.rollout,
                    start_to_close_timeout=self._rollout_timeout(work),
                    heartbeat_timeout=policies.HEARTBEAT,
                    retry_policy=policies.ROLLOUTS,
                    cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
                    summary=self._summary(work, engine.version, part),
                )
                return ""
            except ActivityError as error:
                if isinstance(error.cause, CancelledError):
                    raise asyncio.CancelledError from None
                reason, kind = cause_of(error), type_of(error)
            if kind not in (names.ENGINE_LOST, names.ENV_LOST):
                run.user_error = kind == names.BAD_INPUT
                self._on_damage(run, kind, reason)
                return reason
            tried += 1
            if kind == names.ENGINE_LOST:
                moved = await self._leave_engine(work, engine, reason, again=tried < 2)
            else:
                moved = await self._leave_env(work, address, reason, again=tried < 2)
            if moved:
                tried = 0
            engine, address = await self._place(work)
        return f"given up after {MAX_RELOCATIONS} relocations: {reason}"

    async def _leave_engine(
        self, work: GroupWork, engine: EngineTarget, reason: str, *, again: bool
    ) -> bool:
        """Rests; True once the engine is not to be used, after telling the run if need be."""
        scheduler = self._scheduler
        scheduler.avoid_engine(engine)
        if not again:
            self._report_lost(LostServer("engine", engine.index, engine.epoch, reason))
        await workflow.sleep(RELOCATION_PAUSE, summary=f"relocate {work.group}")
        if again:
            scheduler.forgive_engine(engine)
        return not again

    async def _leave_env(self, work: GroupWork, address: str, reason: str, *, again: bool) -> bool:
        """As `_leave_engine`, for the env server at `address`."""
        scheduler = self._scheduler
        scheduler.avoid_env(address)
        target = scheduler.env(work.env)
        kept = target is not None and target.address == address and target.epoch > 0
        if not again and target is not None and kept:
            self._report_lost(LostServer("env", target.index, target.epoch, reason))
        await workflow.sleep(RELOCATION_PAUSE, summary=f"relocate {work.group}")
        # A server that is not ours to restart can only be tried again.
        if again or not kept:
            scheduler.forgive_env(address)
        return not again

    def _report_lost(self, lost: LostServer) -> None:
        if lost not in self._lost:
            self._lost.append(lost)
            self._changed = True

    async def _place(self, work: GroupWork) -> tuple[EngineTarget, str]:
        """Waits for an engine and an env server that may be used, and pins the group to them."""
        scheduler = self._scheduler
        await workflow.wait_condition(
            lambda: scheduler.engine() is not None and scheduler.env_address(work.env) is not None
        )
        engine, address = scheduler.engine(), scheduler.env_address(work.env)
        assert engine is not None and address is not None
        # What is left of the group follows, for the prefix cache.
        scheduler.flights[work.group].engine = engine
        return engine, address

    async def _finalize(self, run: GroupRun) -> GroupResult:
        """The group's result; another engine is asked where the one that served it is gone."""
        work, version, lost, reason = run.work, run.version, run.lost, ""
        for tried in range(MAX_RELOCATIONS):
            engine = self._scheduler.flights[work.group].engine
            try:
                return await self._finalize_once(work, version, lost, engine)
            except ActivityError as error:
                if isinstance(error.cause, CancelledError):
                    raise asyncio.CancelledError from None
                reason, kind = cause_of(error), type_of(error)
            if kind != names.ENGINE_LOST:
                self._on_damage(run, kind, reason)
                failed = self._failed(work, version, reason)
                return replace(failed, user_error=kind == names.BAD_INPUT)
            await self._leave_engine(work, engine, reason, again=tried == 0)
            await self._place(work)
        text = f"given up after {MAX_RELOCATIONS} relocations: {reason}"
        return self._failed(work, version, text)

    async def _finalize_once(
        self, work: GroupWork, version: int, lost: str, engine: EngineTarget
    ) -> GroupResult:
        result: GroupResult = await self._with_patience(
            work.group,
            names.FINALIZE_GROUP,
            FinalizeGroupInput(
                self._arg.run_id,
                work,
                version,
                lost,
                engine,
                self._scheduler.control.baselines.get(work.env, {}),
            ),
            result_type=GroupResult,
            task_queue=self._arg.queues.rollout,
            **policies.SCORING,
            summary=f"finalize {self._summary(work, version)}",
        )
        return result

    async def _with_patience(self, work: str, name: str, arg: Any, **options: Any) -> Any:
        """Carries out an activity; while what it makes cannot be stored, tells the run and tries
        again.
        """
        tried = 0
        try:
            while True:
                wake = asyncio.create_task(self._wake()) if tried > TRIES_OF_ITS_OWN else None
                try:
                    result = await workflow.execute_activity(name, arg, **options)
                    self._may_try = WOKEN_BY_ONE
                    return result
                except ActivityError as error:
                    if type_of(error) != names.STORE_FAILED:
                        raise
                    self._may_try = 0
                    self._trouble(work, cause_of(error))
                finally:
                    if wake is not None:
                        wake.cancel()
                tried += 1
                await self._rest_for_store(work, tried)
        finally:
            self._trouble(work, "")

    async def _rest_for_store(self, work: str, tried: int) -> None:
        """Until `work` may be tried again: of all that is held the first tries for the others, and
        some of them follow once anything was stored.
        """
        if tried > TRIES_OF_ITS_OWN:
            while not (self._may_try or self._is_first(work)):
                await workflow.wait_condition(lambda: bool(self._may_try) or self._is_first(work))
            if self._may_try:
                self._may_try -= 1
                return
        rest = rest_after(workflow.time() - self._troubled_at)
        await workflow.sleep(rest, summary=f"store to be mended for {work}")

    async def _wake(self) -> None:
        """Lets another try while one takes long: it may take hours, and the store be mended."""
        await workflow.sleep(LONG_TRY, summary="another to be tried beside one that takes long")
        self._may_try = max(self._may_try, 1)

    def _is_first(self, work: str) -> bool:
        return next(iter(self._troubles)) == work

    def _trouble(self, work: str, reason: str) -> None:
        """What keeps `work` from being stored; '' for nothing. The run hears of the first and of
        the last such trouble.
        """
        before = bool(self._troubles)
        if reason:
            if not before:
                self._troubled_at = workflow.time()
            self._troubles[work] = reason
        else:
            self._troubles.pop(work, None)
        if bool(self._troubles) != before:
            self._silent = True

    def _failed(self, work: GroupWork, version: int, error: str) -> GroupResult:
        return GroupResult(
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
            version_start=version,
            error=error,
        )

    def _rollout_timeout(self, work: GroupWork) -> timedelta:
        """Twice the longest rollout: once to run, once to queue inside the engine. Those that a
        frozen model plays may have to queue for it among all others.
        """
        queued = policies.FROZEN_QUEUE if work.env in self._frozen else timedelta()
        return timedelta(seconds=2 * self._timeouts[work.env] + 60) + queued

    def _summary(self, work: GroupWork, version: int, part: Part | None = None) -> str:
        name = work.group.removeprefix("train/").removeprefix("eval/")
        whole = part is None or part.last - part.first == work.size
        rollouts = "" if whole or part is None else f" [{part.first}:{part.last}]"
        return f"{work.kind} group {name}{rollouts} · {work.env} · v{version}"

    async def _report(self, state: str) -> None:
        """Delivers the outbox. A run that is over has no use for it: the generation ends."""
        groups, self._outbox = (
            self._outbox[:GROUPS_PER_REPORT],
            self._outbox[GROUPS_PER_REPORT:],
        )
        lost, self._lost = self._lost, []
        self._silent = False
        scheduler = self._scheduler
        report = DispatchReport(
            generation=self._arg.generation,
            seq=self._seq,
            state=state,  # type: ignore[arg-type]
            groups=groups,
            inflight_train=scheduler.inflight_train,
            inflight_eval=scheduler.inflight_eval,
            reserved=scheduler.reserved,
            lease=scheduler.cursor(),
            oldest=scheduler.oldest,
            outstanding=list(self._groups) + [group.group for group in self._outbox],
            waiting_for=scheduler.blocked.reason,
            lost=lost,
            run_id=self._arg.run_id,
            trouble=next(iter(self._troubles.values()), ""),
        )
        self._seq += 1
        run = workflow.get_external_workflow_handle(names.workflow_of(self._arg.run_id))
        try:
            await run.signal("dispatch_report", report)
        except ApplicationError:
            self._run_is_over = True
