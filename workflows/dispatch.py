"""One dispatch generation: keeps rollouts in flight until it hands over to the next.

`Generation` decides; this workflow turns its decisions into activities, timers and signals, and
reports their outcomes to it. Every admitted group ends in exactly one report. The generation never
continues as new: it ends, so its history is bounded by what it admits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rests import rest_after
from ratchet.activities.contracts.rollouts import (
    LONGEST_WAIT_S,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    Released,
    RunRolloutsInput,
)
from ratchet.configs.upgrades import read_config
from ratchet.workflows.protocol.activities import (
    FINALIZE_GROUP,
    RUN_ROLLOUTS,
    Activity,
    Input,
    Result,
)
from ratchet.workflows.protocol.errors import cause_of, type_of
from ratchet.workflows.protocol.messages import DISPATCH, Control, DispatchInput
from ratchet.workflows.rules import placement
from ratchet.workflows.rules.flights import Flight
from ratchet.workflows.rules.generation import HELD_FOR, Generation
from ratchet.workflows.rules.placement import Attempt
from ratchet.workflows.rules.scheduler import Part

SIGN_OF_LIFE = timedelta(seconds=60)
MAX_ADMISSIONS_PER_TASK = 64
VIEWED_AFTER = timedelta(seconds=1)
LONG_TRY = timedelta(seconds=60)
OUTSIDE = "cancelled from outside"

T = TypeVar("T")


@workflow.defn(name=DISPATCH)
class Dispatch:
    """Generation `generation` of a run's dispatch."""

    @workflow.init
    def __init__(self, arg: DispatchInput) -> None:
        config = read_config(arg.config)
        self._arg = arg
        self._events_limit = config.dispatch.generation_events
        self._timeouts = {env.name: env.timeout_s for env in [*config.train.env, *config.eval.env]}
        self._generation = Generation(config, arg)
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._alarm: asyncio.Task[None] | None = None
        self._rings_at = 0.0
        self._held: asyncio.Task[None] | None = None
        self._run_is_over = False
        self._viewed: datetime | None = None

    @workflow.signal
    def control(self, control: Control) -> None:
        """The newest control state from the run."""
        self._generation.on_control(control)

    @workflow.signal(name=names.RELEASED)
    def released(self, released: Released) -> None:
        """Rollouts ended inside activities that still run."""
        self._generation.on_released(released.ended)

    @workflow.run
    async def run(self, arg: DispatchInput) -> None:
        """Returns when nothing more may be admitted and everything in flight was delivered."""
        generation = self._generation
        generation.may_hold_back = workflow.patched("holds-reports-back")
        generation.may_share = workflow.patched("train-groups-together")
        pulse = asyncio.create_task(self._pulse())
        while not self._run_is_over:
            if generation.begin_turn(long=self._is_long()):
                await self._report()
            self._cancel(generation.review())
            await self._admit()
            if generation.must_report:
                await self._report()
            self._view()
            if generation.is_over:
                break
            if generation.holds_back and (self._held is None or self._held.done()):
                self._held = asyncio.create_task(self._report_later())
            await workflow.wait_condition(lambda: generation.has_news)
        pulse.cancel()
        self._cancel(generation.give_up(list(generation.flights), "stop"))
        if not self._run_is_over:
            await self._report(closed=True)
        self._view(closed=True)

    def _view(self, *, closed: bool = False) -> None:
        """Passes a view of this generation to the process, for its log; emits no command."""
        now = workflow.now()
        if closed or self._viewed is None or now - self._viewed >= VIEWED_AFTER:
            self._viewed = now
            view = {**asdict(self._generation.scheduler.gauges()), "closed": closed}
            view["buffered"] = self._generation.buffered
            workflow.logger.info("pipeline", extra={names.LOG_VIEW: view})

    async def _pulse(self) -> None:
        while True:
            await workflow.sleep(SIGN_OF_LIFE, summary="sign of life")
            self._generation.report_due = True

    async def _report_later(self) -> None:
        await workflow.sleep(HELD_FOR, summary="more groups to report")
        self._generation.report_due |= bool(self._generation.outbox)

    def _is_long(self) -> bool:
        info = workflow.info()
        length = info.get_current_history_length()
        return info.is_continue_as_new_suggested() or length >= self._events_limit

    async def _admit(self) -> None:
        generation = self._generation
        admitted: list[Part] = []
        while isinstance(decision := generation.scheduler.admit(workflow.time()), Part):
            admitted.append(decision)
            if len(admitted) == MAX_ADMISSIONS_PER_TASK:
                self._begin(admitted)
                admitted = []
                # A timer ends the workflow task, so that one task never carries too many commands.
                await workflow.sleep(0.001)
                if generation.must_hand_over(long=self._is_long()):
                    generation.changed = True
                    return
        self._begin(admitted)
        if decision.retry_s:
            self._set_alarm(decision.retry_s)

    def _begin(self, admitted: list[Part]) -> None:
        for parts in self._generation.together(admitted):
            if len(parts) > 1 and workflow.patched("eval-groups-together"):
                self._start(self._perform_together(parts), parts)
                continue
            for part in parts:
                self._start(self._perform(part), [part])

    def _start(self, work: Coroutine[Any, Any, None], parts: list[Part]) -> None:
        task = asyncio.create_task(work)
        for part in parts:
            self._tasks.setdefault(part.work.group, []).append(task)

    def _set_alarm(self, seconds: float) -> None:
        """Schedules a look after `seconds`, unless an alarm rings before that."""
        rings_at = workflow.time() + seconds
        if self._alarm is not None and not self._alarm.done():
            if self._rings_at <= rings_at + 0.05:
                return
            self._alarm.cancel()
        self._rings_at = rings_at
        self._alarm = asyncio.create_task(self._ring_after(seconds))

    async def _ring_after(self, seconds: float) -> None:
        await workflow.sleep(seconds, summary="rate limit or burst cap")
        self._generation.changed = True

    def _cancel(self, groups: list[str]) -> None:
        for group in groups:
            for task in self._tasks.get(group, ()):
                task.cancel()

    async def _perform_together(self, parts: list[Part]) -> None:
        """Runs and finalizes whole groups in one activity. Each that it does not end is then
        performed alone, and adopts what was committed.
        """
        generation = self._generation
        ended: dict[str, GroupResult | None] = {}
        try:
            ended = await self._roll_out_together(parts)
        except (asyncio.CancelledError, Exception) as error:
            workflow.logger.info("%s groups go on alone: %s", len(parts), error)
        for part in parts:
            group = part.work.group
            flight, result = generation.flights[group], ended.get(group)
            if result is None and not flight.cancelled:
                part = generation.alone(part)
                self._start(self._perform(part), [part])
                continue
            if generation.on_part_ended(part, ""):
                generation.on_finalized(group, result, "")
            self._tasks.pop(group, None)

    async def _roll_out_together(self, parts: list[Part]) -> dict[str, GroupResult | None]:
        """The results of the groups, as far as the activity has finalized them."""
        generation, works = self._generation, [part.work for part in parts]
        attempt = generation.attempt_together(parts)
        if not attempt.address:
            return {}
        began = workflow.time()
        result = await RUN_ROLLOUTS(
            RunRolloutsInput(
                self._arg.run_id,
                works[0],
                attempt.engine,
                attempt.address,
                generation.scheduler.gauges(),
                finalize_from=generation.finalize_from(parts[0]),
                more=works[1:],
            ),
            self._arg.queues,
            f"{self._summary(works[0], attempt.engine.version)} and {len(works) - 1} more",
            timeout=self._rollout_timeout(works[0]),
        )
        generation.on_played(works[0], workflow.time() - began)
        # A worker of an older build runs the first group only.
        return dict(
            zip([work.group for work in works], [result.finalized, *result.more], strict=False)
        )

    async def _perform(self, part: Part) -> None:
        """Runs one part; the last of its group to end finalizes the group."""
        generation, group = self._generation, part.work.group
        flight = generation.flights[group]
        finalized = None
        try:
            lost, finalized = await self._roll_out(part)
        except asyncio.CancelledError:
            # A cancellation that we did not request is a loss: nobody would requeue the example.
            lost = flight.lost or OUTSIDE
        except Exception as error:
            # A group that vanished would hold its permits and keep its generation open forever.
            lost = cause_of(error)
        if generation.on_part_ended(part, lost):
            if finalized is None:
                await self._finalize(flight)
            else:
                generation.on_finalized(group, finalized, "")
        if group not in generation.flights:
            self._tasks.pop(group, None)

    async def _roll_out(self, part: Part) -> tuple[str, GroupResult | None]:
        """Returns '' once every rollout of the part ended, or why they were cancelled; and the
        group, if the activity has finalized it, too.
        """
        work, generation = part.work, self._generation
        finalize_from = generation.finalize_from(part)
        if finalize_from is not None and not workflow.patched("finalize-with-rollouts"):
            finalize_from = None
        attempt = generation.attempt(part)
        if not attempt.address:
            await self._place(attempt)
        began = workflow.time()
        result = await self._try(
            attempt,
            lambda: self._with_patience(
                f"{work.group}/{part.first}",
                RUN_ROLLOUTS,
                RunRolloutsInput(
                    self._arg.run_id,
                    work,
                    attempt.engine,
                    attempt.address,
                    generation.scheduler.gauges(),
                    part.first,
                    part.last,
                    finalize_from,
                ),
                self._summary(work, attempt.engine.version, part),
                self._rollout_timeout(work),
            ),
        )
        if result is None:
            return attempt.failure, None
        generation.on_played(work, workflow.time() - began)
        return attempt.failure, result.finalized

    async def _finalize(self, flight: Flight) -> None:
        """Finalizes a group; another engine is used if the one that served it is gone."""
        attempt, result = Attempt(flight.work, flight.engine, finalizing=True), None
        try:
            result = await self._try(attempt, lambda: self._finalize_once(flight))
        except asyncio.CancelledError:
            attempt.failure = OUTSIDE
        self._generation.on_finalized(flight.work.group, result, attempt.failure)

    async def _finalize_once(self, flight: Flight) -> GroupResult:
        work, control = flight.work, self._generation.scheduler.control
        return await self._with_patience(
            work.group,
            FINALIZE_GROUP,
            FinalizeGroupInput(
                self._arg.run_id,
                work,
                flight.version,
                flight.lost,
                flight.engine,
                control.baselines.get(work.env, {}),
            ),
            f"finalize {self._summary(work, flight.version)}",
        )

    async def _try(self, attempt: Attempt, once: Callable[[], Awaitable[T]]) -> T | None:
        """Runs an activity; if a server was lost, again there or elsewhere. Returns None if the
        attempt failed.
        """
        while not attempt.failure:
            try:
                return await once()
            except ActivityError as error:
                if isinstance(error.cause, CancelledError):
                    raise asyncio.CancelledError from None
                reason, kind = cause_of(error), type_of(error)
            if self._generation.on_failed(attempt, kind, reason):
                await self._rest(attempt)
                await self._place(attempt)
        return None

    async def _rest(self, attempt: Attempt) -> None:
        try:
            summary = f"relocate {attempt.work.group}"
            await workflow.sleep(placement.RELOCATION_PAUSE, summary=summary)
        except asyncio.CancelledError:
            if workflow.patched("forgive-after-cancelled-rest"):
                self._generation.on_rested(attempt)
            raise
        self._generation.on_rested(attempt)

    async def _place(self, attempt: Attempt) -> None:
        """Waits for an engine and an env server; a group that gets none is requeued."""
        generation = self._generation

        def there() -> bool:
            return generation.has_place(attempt)

        if not there() and workflow.patched("bounded-wait-for-a-place"):
            generation.on_waits(attempt)
            summary = f"an engine and an env server for {attempt.work.group}"
            try:
                await workflow.wait_condition(
                    there, timeout=placement.PLACED_WITHIN, timeout_summary=summary
                )
            except TimeoutError:
                generation.on_unplaced(attempt)
            finally:
                generation.on_waited(attempt)
        # A group that is to be requeued is cancelled at the next turn.
        await workflow.wait_condition(there)
        generation.place(attempt)

    async def _with_patience(
        self,
        work: str,
        activity: Activity[Input, Result],
        arg: Input,
        summary: str,
        timeout: timedelta | None = None,
    ) -> Result:
        """Runs an activity, repeatedly while its result cannot be stored."""
        generation = self._generation
        held = generation.held
        try:
            while True:
                wake = asyncio.create_task(self._wake()) if held.shares_tries(work) else None
                try:
                    result = await activity(arg, self._arg.queues, summary, timeout=timeout)
                    held.on_stored()
                    return result
                except ActivityError as error:
                    if type_of(error) != names.STORE_FAILED:
                        raise
                    generation.on_held(work, cause_of(error), workflow.time())
                finally:
                    if wake is not None:
                        wake.cancel()
                await self._rest_for_store(work)
        finally:
            generation.on_work_ended(work)

    async def _rest_for_store(self, work: str) -> None:
        held = self._generation.held
        if held.shares_tries(work):
            while not held.may_try(work):
                await workflow.wait_condition(lambda: held.may_try(work))
            if held.take_turn():
                return
        rest = rest_after(held.held_s(workflow.time()))
        await workflow.sleep(rest, summary=f"the store to recover for {work}")

    async def _wake(self) -> None:
        """A long try may take hours, and the store may recover before that."""
        await workflow.sleep(LONG_TRY, summary="a second try during a slow one")
        self._generation.held.on_slow_try()

    def _rollout_timeout(self, work: GroupWork) -> timedelta:
        """The longest rollout: its execution plus its waits."""
        return timedelta(seconds=self._timeouts[work.env] + LONGEST_WAIT_S + 60)

    def _summary(self, work: GroupWork, version: int, part: Part | None = None) -> str:
        name = work.group.removeprefix("train/").removeprefix("eval/")
        whole = part is None or part.last - part.first == work.size
        rollouts = "" if whole or part is None else f" [{part.first}:{part.last}]"
        return f"{work.kind} group {name}{rollouts} · {work.env} · v{version}"

    async def _report(self, *, closed: bool = False) -> None:
        """Reports to the run. If the run is over, the generation ends."""
        run = workflow.get_external_workflow_handle(names.workflow_of(self._arg.run_id))
        try:
            await run.signal("dispatch_report", self._generation.report(closed=closed))
        except ApplicationError:
            self._run_is_over = True
