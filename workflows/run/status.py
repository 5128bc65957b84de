"""How a run waits and how it presents itself.

Every wait has a name and a bound. A wait ends early when the run was asked to stop or when one of
its loops failed. The memo and search attributes change once per step or status, since each change
is an event; the details are free and follow every wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ActivityError

from ratchet.activities.contracts.names import LOG_LINE, LOG_VIEW, attempt_of
from ratchet.configs.live import pending
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.errors import Paused, RunFailed, Stopped, cause_of
from ratchet.workflows.protocol.messages import MEMO_KEY, RunInput
from ratchet.workflows.protocol.state import RunState, Waiting
from ratchet.workflows.rules.fleet import Fleet

STATUS = SearchAttributeKey.for_keyword("RatchetStatus")
STEP = SearchAttributeKey.for_int("RatchetStep")
VERSION = SearchAttributeKey.for_int("RatchetPolicyVersion")
REWARD = SearchAttributeKey.for_float("RatchetReward")
ENV = SearchAttributeKey.for_keyword("RatchetEnv")

VIEWED_AFTER = timedelta(seconds=1)
"""Interval between views of the pipeline, which are for people."""
SHOWN_AFTER = timedelta(seconds=5)
"""A wait that lasts this long is written to the memo, for readers without a worker."""
FAILS_BETWEEN_STEPS = "fails-between-steps"
"""Before it, a failure cut short the step under way, and failed runs ended without a checkpoint."""
SHOWS_REQUESTS = "shows-requests"
"""Before it, a request to stop, pause or resume was published only once it was carried out."""

LONGEST_WARNING = 500

T = TypeVar("T")


class RunLog:
    """The run's lifecycle, waits, notes, memo and search attributes.

    `failure` is the error that ended a loop, the first one; a `spared` step ends before it does.
    `recoveries` counts holds that are over: each gives waits in progress their full time again.
    `before` is the memo's content for a run that is yet to be restored.
    """

    def __init__(self, run_id: str, config: RunConfig, state: RunState) -> None:
        self._config = config
        self._state = state
        state.lifecycle.attempt = attempt_of(run_id)
        self._waits: list[Waiting] = []
        self._notes: list[str] = []
        self._background: dict[int, asyncio.Task[None]] = {}
        self._tasks_started = 0
        self._viewed: datetime | None = None
        self.failure: RunFailed | None = None
        self._spared = self._failing = False
        self.recoveries = 0
        self.before: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The step that the run shows: until it is restored, that of its source."""
        return int(self.before.get("step", self._state.steps.step))

    @property
    def waiting(self) -> Waiting | None:
        """What the run waits for now, of several at once the one that began first."""
        return self._waits[0] if self._waits else None

    @property
    def busy(self) -> bool:
        """Whether side work is in progress."""
        return bool(self._background)

    def in_background(self, work: Awaitable[None]) -> None:
        """Runs side work whose failure is the run's."""
        number = self._tasks_started
        self._tasks_started += 1

        async def tracked() -> None:
            await self.guard(work)
            del self._background[number]

        self._background[number] = asyncio.create_task(tracked())

    # -- waiting ----------------------------------------------------------------------------

    async def wait(
        self,
        name: Callable[[], str],
        predicate: Callable[[], bool],
        at_most: timedelta,
        *,
        progress: Callable[[], int] | None = None,
        stoppable: bool = True,
    ) -> None:
        """Waits until `predicate`; raises Stopped, Paused or RunFailed.

        A rising `progress` renews the bound. Without `stoppable` neither a stop nor a pause
        interrupts, nor a failure that spares the step under way.
        """
        waiting: Waiting | None = None
        try:
            while not self._interrupted(stoppable):
                if predicate():
                    return
                mark, recoveries = progress() if progress else 0, self.recoveries
                waiting = self._name_wait(waiting, name(), at_most)
                if await self._within(SHOWN_AFTER, name, predicate, stoppable):
                    continue
                self.publish()
                if await self._within(at_most, name, predicate, stoppable):
                    continue
                stands = progress is None or progress() == mark
                if stands and not self._state.outages.holds and self.recoveries == recoveries:
                    late = RunFailed("run", f"waited {at_most} for {name()}", code="stalled")
                    raise self.first(late)
        finally:
            if waiting is not None:
                self._waits.remove(waiting)
        if self.failure is not None:
            raise self.failure
        raise Stopped if self._state.requests.stop else Paused

    async def _within(
        self,
        at_most: timedelta,
        name: Callable[[], str],
        predicate: Callable[[], bool],
        stoppable: bool,
    ) -> bool:
        try:
            await workflow.wait_condition(
                lambda: predicate() or self._interrupted(stoppable),
                timeout=at_most,
                timeout_summary=name(),
            )
        except TimeoutError:
            return False
        return True

    async def perform(
        self, name: str, work: Awaitable[T], at_most: timedelta, *, stoppable: bool = False
    ) -> T:
        """Awaits an activity under a name and a bound; raises as `wait` does."""
        task = asyncio.ensure_future(work)
        try:
            await self.wait(lambda: name, task.done, at_most, stoppable=stoppable)
        except BaseException:
            task.cancel()
            raise
        return await task

    async def perform_unless(self, gone: Callable[[], bool], work: Awaitable[T]) -> T:
        """Awaits an activity of a particular server, and raises a cancellation once that server is
        `gone`: otherwise work for a dead process would be awaited until its time-out.
        """
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or gone())
        if not task.done():
            task.cancel()
        return await task

    async def guard(self, loop: Awaitable[None]) -> None:
        """Passes a loop's failure to the run, which sees it in every wait."""
        try:
            await loop
        except RunFailed as failure:
            self.fail(failure)
        except ActivityError as error:
            self.fail(RunFailed(error.activity_type, cause_of(error)))
        except Exception as error:
            self.fail(RunFailed("run", f"{type(error).__name__}: {error}", code="internal"))

    def fail(self, failure: RunFailed) -> None:
        """Has the run fail, in its next wait or once the step under way has ended."""
        if not workflow.patched(FAILS_BETWEEN_STEPS):
            self.failure = failure
        elif not self._failing:
            self._spared = failure.spares_steps and (self.failure is None or self._spared)
            self.failure = self.failure or failure

    def first(self, failure: RunFailed) -> RunFailed:
        """The failure that came before `failure`, if the run was about to fail for it."""
        return self.failure if self.failure is not None and self._spared else failure

    def fails(self) -> None:
        """The run ends for a failure: no other one matters any more."""
        self.failure, self._failing = None, True

    def _interrupted(self, stoppable: bool) -> bool:
        requests, status = self._state.requests, self._state.lifecycle.status
        stopping = bool(requests.stop) and status != "stopping"
        pausing = bool(requests.pause) and status == "running"
        failed = self.failure is not None and (stoppable or not self._spared)
        return failed or (stoppable and (stopping or pausing))

    def _name_wait(self, before: Waiting | None, name: str, at_most: timedelta) -> Waiting:
        now, waits = workflow.now(), self._waits
        waiting = Waiting(name, now.isoformat(), (now + at_most).isoformat())
        place = len(waits) if before is None else waits.index(before)
        waits[place : place + 1] = [waiting]
        self.show()
        return waiting

    # -- reporting --------------------------------------------------------------------------

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """Adds a note to the log and the run's page."""
        workflow.logger.log(level, text, extra={LOG_LINE: text})
        self._notes = [*self._notes[-19:], f"{workflow.now():%H:%M:%S} {text[:300]}"]
        self.show()

    def write_line(self, text: str) -> None:
        """Writes a line to the run's log."""
        workflow.logger.info(text, extra={LOG_LINE: text})

    def view(self, *, now: bool = False) -> None:
        """Passes a view of the pipeline to the process, for its log; emits no command."""
        at = workflow.now()
        if now or self._viewed is None or at - self._viewed >= VIEWED_AFTER:
            self._viewed = at
            view = pipeline(self._config, self._state, self.waiting)
            workflow.logger.info("pipeline", extra={LOG_VIEW: view})

    def warn(self, text: str) -> None:
        """Adds a warning that people should act on; it becomes an event once published."""
        self.note(text)
        before = self._state.lifecycle.warnings
        text = text if len(text) <= LONGEST_WARNING else f"{text[: LONGEST_WARNING - 1]}…"
        if text not in before:
            self._state.lifecycle.warnings = [*before[-9:], text]

    def show(self) -> None:
        """Updates the details on the run's page."""
        workflow.set_current_details(details(self._config, self._state, self.waiting, self._notes))

    def memo(self, **ended: Any) -> dict[str, Any]:
        """The run as the API shows it."""
        return memo(self._config, self._state, self.waiting, **{**self.before, **ended})

    def continue_as(self, arg: RunInput) -> NoReturn:
        """Continues as a new execution, which shows the run correctly from its first moment."""
        memo = {MEMO_KEY: self.memo()}
        workflow.continue_as_new(arg, memo=memo, search_attributes=self.attributes())

    def set_status(self, status: str) -> None:
        """Moves the run to another status, and publishes that."""
        self._state.lifecycle.status = status
        self.publish()

    def checked(self, examples: dict[str, int]) -> None:
        """Stores the preflight's counts of the examples of every env; warns of too few to train."""
        self._state.lifecycle.examples.update(examples)
        train = self._config.train
        there = sum(count for name, count in examples.items() if name.startswith("train/"))
        groups = (train.batch_size or 0) // train.group_size
        if self._config.max_steps != 0 and 0 < there < groups:
            self.warn(
                f"a batch takes {groups} groups and the train envs have only {there} "
                f"example{'s' if there > 1 else ''}, so each batch repeats some"
            )

    def started(self) -> None:
        """The config passed the checks, and the run's starting point is ready."""
        self._state.lifecycle.started_at = workflow.now().isoformat()
        self.set_status("starting")

    def ended(self, status: str, end_reason: str, **ended: Any) -> None:
        """Publishes the run's final state."""
        lifecycle = self._state.lifecycle
        lifecycle.status, lifecycle.finished_at = status, workflow.now().isoformat()
        lifecycle.end_reason = end_reason
        self.publish(end_reason=end_reason, **ended)

    def attributes(self) -> TypedSearchAttributes:
        """The attributes by which the run can be searched."""
        steps = self._state.steps
        pairs: list[SearchAttributePair[Any]] = [
            SearchAttributePair(STATUS, shown_status(self._state)),
            SearchAttributePair(STEP, self.step),
            SearchAttributePair(VERSION, max(steps.version, 0)),
            SearchAttributePair(ENV, self._config.envs[0]),
        ]
        if steps.reward is not None:
            pairs.append(SearchAttributePair(REWARD, steps.reward))
        return TypedSearchAttributes(pairs)

    def publish_request(self) -> None:
        """Publishes what was requested of a running run, which may have to end a step first."""
        if self._state.lifecycle.status == "running" and workflow.patched(SHOWS_REQUESTS):
            self.publish()

    def publish(self, **ended: Any) -> None:
        """Writes memo and search attributes."""
        updates = [pair.key.value_set(pair.value) for pair in self.attributes()]
        workflow.upsert_search_attributes(updates)
        workflow.upsert_memo({MEMO_KEY: self.memo(**ended)})
        self.show()
        self.view(now=True)


def shown_status(state: RunState) -> str:
    """The run's status for people: a hold pauses a running run, one that ends a step before it
    stops or pauses does so already, and a paused run that nobody wants paused any more, such as
    one that was just restored, is about to start.
    """
    status, requests = state.lifecycle.status, state.requests
    if status == "running" and (requests.stop or state.outages.holds or requests.pause):
        return "stopping" if requests.stop else "paused" if state.outages.holds else "pausing"
    return "starting" if status == "paused" and not requests.pause else status


def memo(
    config: RunConfig, state: RunState, waiting: Waiting | None, **ended: Any
) -> dict[str, Any]:
    """The run as a small JSON object; `ended` adds finished_at, end_reason and error."""
    life, steps, live = state.lifecycle, state.steps, state.live
    checkpoint, origin, holds = state.trainer.checkpoint, life.origin, state.outages.holds
    status, requests = shown_status(state), state.requests
    return {
        "status": status,
        "attempt": life.attempt,
        "lineage": {"source": origin.source, "step": origin.step, "kind": origin.kind}
        if origin
        else config.model.lineage,
        "paused_because": "; ".join(holds.values()) or requests.trouble or None,
        "pause_reason": requests.pause_reason if status in ("pausing", "paused") else None,
        "name": config.name,
        "created_at": life.created_at,
        "started_at": life.started_at or None,
        "finished_at": life.finished_at or None,
        "step": steps.step,
        "max_steps": config.max_steps,
        "envs": config.envs,
        "model": config.model.name,
        "policy_version": steps.version,
        "policy": state.servers.policy_origin,
        "reward": steps.reward,
        "eval": state.evals.last,
        "checkpoint": {"step": checkpoint.step} if checkpoint else None,
        "restarts": Fleet(state.servers.hosts).restarts(),
        "rollouts": {"train": state.arrivals.rollouts, "eval": state.evals.rollouts},
        "waiting_for": {"name": waiting.name, "since": waiting.since, "until": waiting.until}
        if waiting
        else None,
        "error": None,
        "end_reason": life.end_reason or None,
        "metadata": {
            name: value
            for name, value in {**config.metadata, **live.overrides.get("metadata", {})}.items()
            if value is not None
        },
        "config_revision": live.revision,
        "alarm": steps.alarm or None,
        "warnings": life.warnings,
        "config_changes": live.overrides,
        "config_pending": pending(config, live.overrides) if live.pending else {},
        **ended,
    }


def progress(config: RunConfig, state: RunState, waiting: Waiting | None) -> dict[str, Any]:
    """The run's progress, and what is in flight, as a small JSON object."""
    live = [g for g in state.dispatch.generations if g.state != "closed"]
    return {
        "status": shown_status(state),
        "step": state.steps.step,
        "max_steps": config.max_steps,
        "policy_version": state.steps.version,
        "rollouts": {"train": state.arrivals.rollouts, "eval": state.evals.rollouts},
        "in_flight": {
            "train": sum(g.inflight_train for g in live),
            "eval": sum(g.inflight_eval for g in live),
        },
        "ready_rollouts": sum(group.survivors for group in state.train.ready),
        "shipped_batches": len(state.steps.shipped),
        "evals": {
            p.epoch.epoch: {"groups": len(p.arrived), "of": p.epoch.num_examples}
            for p in state.evals.open
        },
        "servers": {host.name: "up" if host.up else "down" for host in state.servers.hosts},
        "waiting_for": waiting.name if waiting else None,
    }


def pipeline(config: RunConfig, state: RunState, waiting: Waiting | None) -> dict[str, Any]:
    """The run's log view; generations show what only they know."""
    ready, size = state.train.ready, config.train.batch_size
    return {
        **progress(config, state, waiting),
        "collected": sum(group.survivors if size else group.tokens for group in ready),
        "wanted": size or config.train.token_batch_size,
        "unit": "rollouts" if size else "tokens",
        "interval": config.log.interval,
    }


def details(config: RunConfig, state: RunState, waiting: Waiting | None, notes: list[str]) -> str:
    """Markdown for the run's page in Temporal's Web UI."""
    steps, checkpoint = state.steps, state.trainer.checkpoint
    reward = "–" if steps.reward is None else f"{steps.reward:.3f}"
    collected = sum(group.survivors for group in state.train.ready)
    wanted = config.train.batch_size or f"{config.train.token_batch_size} tokens"
    lines = [f"{' + '.join(config.envs)} · {config.model.name}", ""]
    if config.trains:
        lines += [
            f"**{shown_status(state)}** · step {steps.step}"
            f"{'' if config.max_steps is None else f' of {config.max_steps}'} · "
            f"policy v{max(steps.version, 0)} · reward {reward}",
            "",
            f"- rollouts waiting for a batch: {collected} of {wanted}",
            f"- last checkpoint: {f'step {checkpoint.step}' if checkpoint else 'none yet'}",
        ]
    else:
        lines += [f"**{shown_status(state)}** · evaluation", ""]
    if steps.alarm:
        lines.append(f"- **drift**: {steps.alarm}")
    for env, result in state.evals.last.items():
        reward = "–" if result["reward"] is None else f"{result['reward']:.3f}"
        lines.append(f"- last eval of {env}: {reward} at step {result['step']:.0f}")
        if result.get("failed"):
            lines.append(f"  - {result['failed']} of {result['of']} failed: {result['error']}")
    for progress in state.evals.open:
        epoch = progress.epoch
        lines.append(
            f"- eval {epoch.epoch}: {len(progress.arrived)} of {epoch.num_examples} groups"
        )
    for generation in state.dispatch.generations:
        if generation.state != "closed":
            held_back = f", waits for {generation.waiting_for}" if generation.waiting_for else ""
            lines.append(
                f"- dispatch generation {generation.number}: {generation.inflight_train} train and "
                f"{generation.inflight_eval} eval rollouts in flight{held_back}"
            )
    for host in state.servers.hosts:
        if not host.up:
            lines.append(f"- {host.name}: down{f' ({host.detail[-200:]})' if host.detail else ''}")
    if waiting is not None:
        lines += ["", f"Waiting for **{waiting.name}** since {waiting.since}"]
    lines += [f"\n> {note}" for note in notes[-5:]]
    return "\n".join(lines)
