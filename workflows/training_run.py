"""A training run: advances the policy version step by step, from durable state only.

    batch n  ->  train step n  ->  weights n pushed and verified  ->  policy version n

An evaluation is a run without steps, train envs and a trainer: it evaluates version 0 and ends.

One workflow per run; its id is the run's id. Dispatch generations keep rollouts in flight, Host
workflows keep servers alive; both report by signal. Invariants:

- Every wait has a name and a bound, shown in the memo and the UI.
- Public signals never raise, whatever their payload.
- Only permanent errors fail a run that has begun to train; all others pause it, with the
  reason.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError

from ratchet.activities.contracts.checks import CheckResult
from ratchet.activities.contracts.controls import (
    CONTROLS,
    EvalBody,
    PauseBody,
    ReasonBody,
    Verb,
    verb_of,
)
from ratchet.activities.contracts.health import HEALTH_REPORT, HealthReport
from ratchet.activities.contracts.hosting import ENGINE_LOAD, EngineLoad, HostReport
from ratchet.activities.contracts.training import (
    PolicyResult,
    PreparePolicyInput,
    RestoreInput,
    RestoreResult,
)
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE
from ratchet.activities.contracts.wire import decoded
from ratchet.configs.model import version_named
from ratchet.configs.upgrades import config_document, read_config
from ratchet.workflows.preflight import run_preflight
from ratchet.workflows.protocol.activities import PREPARE, PREPARE_POLICY, RESTORE_RUN
from ratchet.workflows.protocol.errors import Paused, RunFailed, Stopped, cause_of
from ratchet.workflows.protocol.messages import (
    CHANGE_CONFIG,
    MEMO_KEY,
    TRAINING_RUN,
    DispatchReport,
    PreflightInput,
    RunInput,
)
from ratchet.workflows.protocol.state import Lifecycle, Origin, PermitsState, RunState
from ratchet.workflows.rules.curriculum import Curriculum, too_large
from ratchet.workflows.rules.fleet import hosts_of, shared
from ratchet.workflows.rules.leases import OVER, Leases
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.rules.permits import Permits
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.rules.restore import kept, restored
from ratchet.workflows.rules.shipping import Shipping
from ratchet.workflows.rules.sinks import Arrivals, TrainSink
from ratchet.workflows.run.config_changes import ConfigChanges
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.deliveries import Deliveries
from ratchet.workflows.run.ending import Ending, cancelled_for
from ratchet.workflows.run.evals import Evals, evals_to_finish
from ratchet.workflows.run.generations import Generations
from ratchet.workflows.run.pausing import PAUSED_AT_MOST, Pausing
from ratchet.workflows.run.servers import Servers, is_running, rest_between_looks
from ratchet.workflows.run.status import RunLog, progress
from ratchet.workflows.run.steps import START_AT_MOST, Steps, stalled_after, started_within
from ratchet.workflows.run.trainer import Trainer

QUEUED_AT_MOST = timedelta(days=7)
OWN_ENV_SERVERS = "own-env-servers"
PREPARES_FIRST = "prepares-first"
OVERLAPPED_PUSHES = "overlapped-pushes"
LOADS_TASKS = "loads-tasks-while-servers-start"
RESTORED_FROM = ("step", "reward", "eval", "checkpoint", "lineage")
"""What a run that is being restored shows of its source, until it is restored."""


def _hears_controls(run: "type[TrainingRun]") -> "type[TrainingRun]":
    """Gives the class a handler for each public signal.

    They belong to the class, since a signal that arrives with the first workflow task, as after a
    continue-as-new, is decoded before there is an instance that could register a handler.
    """
    for verb in CONTROLS.values():
        if verb.signal:
            handler = workflow.signal(name=verb.signal)(_handler(verb))
            setattr(run, handler.__name__, handler)
    return run


def _handler(verb: Verb) -> Callable[..., None]:
    def hear(run: Any, value: Any = None, *rest: Any) -> None:
        run.hear(verb, value)

    hear.__name__ = f"hear_{verb.name}"
    hear.__qualname__ = f"TrainingRun.{hear.__name__}"
    return hear


@workflow.defn(name=TRAINING_RUN)
@_hears_controls
class TrainingRun:
    """One run, from its first check to its last checkpoint."""

    @workflow.init
    def __init__(self, arg: RunInput) -> None:
        self._config = config = read_config(arg.config)
        self._arg = arg = replace(arg, config=config_document(config))
        self._state = arg.state or RunState(
            lifecycle=Lifecycle(created_at=arg.created_at, examples=dict(arg.examples)),
            permits=PermitsState(limits_of(config)),
        )
        self._context = context = Context.of(arg, config, self._state)
        self._fleet, self._log, self._news = context.fleet, context.log, context.news
        self._outages = context.outages
        if arg.restore is not None:
            said = workflow.memo_value(MEMO_KEY, {}, type_hint=dict)
            self._log.before = {key: said[key] for key in RESTORED_FROM if key in said}
        state = self._state
        curriculum = Curriculum(config, state.lifecycle.examples, state.curriculum)
        sink = TrainSink(config, state.train)
        self._arrivals = Arrivals(config, state.arrivals, sink, curriculum)
        self._leases = leases = Leases(
            config, state, self._fleet, sink, curriculum, self._news.wake
        )
        self._pushes = pushes = Pushes(state.servers, self._fleet, self._news.wake)
        self._shipping = Shipping(config, state, sink, leases, pushes)
        self._permits = Permits(config, state, self._fleet)
        self._servers = Servers(context, pushes)
        self._config_changes = ConfigChanges(context, self._permits)
        self._trainer = Trainer(context, self._servers, pushes)
        self._evals = Evals(context)
        self._generations = Generations(context, leases, self._arrivals, self._servers)
        self._deliveries = Deliveries(
            self._fleet,
            leases,
            self._arrivals,
            self._evals,
            lose=self._servers.lose,
            fail=self._log.fail,
        )
        self._stepping = Steps(
            context, self._arrivals, self._permits, self._trainer, leases, pushes, self._shipping
        )
        self._pausing = Pausing(
            context,
            self._servers,
            leases,
            pushes,
            self._generations,
            self._stepping,
            self._trainer,
            self._save,
        )
        self._ending = Ending(
            context, self._servers, leases, self._generations, self._trainer, self._save
        )
        self._acts: dict[str, Callable[[Any], None]] = {
            "stop": self._stop,
            "pause": self._pause,
            "resume": self._resume,
            "checkpoint": self._checkpoint,
            "eval": self._eval,
        }

    # -- signals and queries ----------------------------------------------------------------

    def hear(self, verb: Verb, value: Any) -> None:
        """Receives a public signal with any payload; warns of what in it was ignored."""
        body, warning = verb.heard(value)
        if warning:
            self._log.warn(f"{verb.signal}: {warning}")
        self._acts[verb.name](body)

    def _stop(self, body: ReasonBody) -> None:
        self._pausing.on_stop(body.reason or "stop signal")
        self._log.publish_request()

    def _pause(self, body: PauseBody) -> None:
        self._pausing.on_pause(body.mode, body.reason or "pause signal")
        self._log.publish_request()

    def _resume(self, body: ReasonBody) -> None:
        self._pausing.on_resume()
        self._log.publish_request()

    def _checkpoint(self, body: ReasonBody) -> None:
        if self._config.trains:
            self._pausing.on_checkpoint()
        else:
            self._log.warn("checkpoint: ignored, since an evaluation trains nothing")

    def _eval(self, body: EvalBody) -> None:
        self._evals.on_trigger(body.envs)
        self._news.wake()

    @workflow.signal(dynamic=True)
    def other_signal(self, name: str, args: Sequence[RawValue]) -> None:
        """Public signals under other spellings; anything else is ignored with a warning."""
        verb = verb_of(name)
        if verb and verb.signal:
            self.hear(verb, args[0].payload.data if args else None)
        else:
            self._log.warn(f"unknown signal {name!r} was ignored")

    @workflow.update(name=CHANGE_CONFIG)
    def change_config(self, patch: dict[str, Any]) -> dict[str, Any]:
        """Changes the config of the running run; returns all changes so far."""
        diff = self._config_changes.take(patch)
        self._log.note(f"config changed: {json.dumps(patch)}")
        self._log.publish(config_diff=diff)
        self._news.wake()
        return self._state.live.overrides

    @change_config.validator
    def _check_change(self, patch: dict[str, Any]) -> None:
        status = self._state.lifecycle.status
        if self._state.requests.stop or status in OVER:
            raise ValueError(f"the run is {status} and accepts no more changes")
        if self._arg.restore is not None:
            raise ValueError("the run is being restored and accepts no changes yet; try again")
        self._config_changes.check(patch)

    @workflow.signal
    def host_report(self, report: HostReport) -> None:
        """A server came up or went down, or waits for the store or its disk; so does the run."""
        if report.run_id and report.run_id != self._arg.run_id:
            return
        self._servers.on_report(report)

    @workflow.signal(name=HEALTH_REPORT)
    def health_report(self, report: HealthReport) -> None:
        """A health finding began; the signal in the history is what the event log shows."""
        self._log.note(f"step {report.step}: {report.finding.message}")

    @workflow.signal(name=ENGINE_LOAD)
    def engine_load(self, load: EngineLoad) -> None:
        """An engine reports its load; 'auto' permits follow it."""
        if load.run_id and load.run_id != self._arg.run_id:
            return
        # While it is paused for a push, an engine keeps reporting its queue from before.
        if self._pushes.in_flight:
            return
        if reason := self._permits.on_load(workflow.time(), load):
            self._log.note(reason)
            self._news.wake()

    @workflow.signal
    def dispatch_report(self, report: DispatchReport) -> None:
        """Groups were finalized, or a generation hands over."""
        if report.run_id and report.run_id != self._arg.run_id:
            self._log.in_background(self._generations.dismiss(report))
            return
        if not self._leases.on_report(report, workflow.now().isoformat()):
            return
        self._outages.hold(f"generation {report.generation}", report.trouble)
        self._deliveries.take(report)
        self._news.wake()
        self._log.view()

    @workflow.query
    def status(self) -> dict[str, Any]:
        """The run as the API shows it."""
        return self._log.memo()

    @workflow.query
    def progress(self) -> dict[str, Any]:
        """The run's progress, and what is in flight now."""
        return progress(self._config, self._state, self._log.waiting)

    @workflow.query
    def config(self) -> dict[str, Any]:
        """The run's config with all changes made while it was running."""
        return self._config_changes.current()

    # -- the run ----------------------------------------------------------------------------

    @workflow.run
    async def run(self, arg: RunInput) -> dict[str, Any]:
        """Returns the run's final summary; raises ApplicationError if it failed."""
        try:
            if arg.state is None:
                await self._start()
            self._start_loops()
            if arg.state is None:
                await self._open()
            await self._go_on_to_the_end()
            done = f"all {self._config.max_steps} steps" if self._config.trains else "all evals"
            end_reason = f"{done} are done"
        except Stopped:
            end_reason = f"stopped at step {self._log.step}: {self._state.requests.stop}"
        except RunFailed as failure:
            await self._ending.save_before_failing()
            return await self._fail(failure)
        except ActivityError as error:
            await self._ending.save_before_failing()
            return await self._fail(RunFailed(error.activity_type, cause_of(error)))
        except asyncio.CancelledError:
            await self._ending.close("cancelled", end_reason=cancelled_for() or "cancelled")
            raise
        at_rest = self._state.lifecycle.status == "paused"
        self._log.set_status("stopping")
        try:
            if at_rest and not self._trainer.is_saved:
                await self._servers.open("trainer")
            await self._save()
        except RunFailed as failure:
            return await self._fail(failure)
        except asyncio.CancelledError:
            late = "cancelled before the final checkpoint"
            said = cancelled_for()
            await self._ending.close("cancelled", end_reason=f"{late}: {said}" if said else late)
            raise
        await self._ending.close("succeeded", end_reason=end_reason)
        return self._log.memo()

    async def _start(self) -> None:
        queues, cores = self._arg.queues, self._arg.cores
        if not self._state.lifecycle.examples:
            self._log.set_status("queued")

            def check() -> Awaitable[CheckResult]:
                restored = self._arg.restore is not None
                work = run_preflight(PreflightInput(self._arg.config, queues, restored))
                name = f"workers on {queues.env} and {queues.trainer} to check the config"
                return self._log.perform(name, work, QUEUED_AT_MOST, stoppable=True)

            found = await self._outages.perform("the preflight", check)
            if found.problems:
                text = "; ".join(f"{p.key}: {p.message}" for p in found.problems)
                raise RunFailed("preflight", text, code="bad_input", user=True)
            self._log.checked(found.examples)
            cores = found.cores
        if self._arg.restore is not None:
            await self._restore(self._arg.restore, cores)
        policy: PolicyResult | None = None
        if self._config.after is not None:
            # The run whose version it is may delete that while this one waits.
            of_run = version_named(self._config.model.name) is not None
            if of_run and workflow.patched(PREPARES_FIRST):
                self._log.set_status("queued")
                policy = await self._outages.perform("the policy", self._prepare)
            await self._take_turns(self._config.after)
        self._log.started()
        if policy is None:
            policy = await self._outages.perform("the policy", self._prepare)
        self._pushes.begin(policy)
        hosts = hosts_of(self._config, cores)
        together = shared(hosts_of(self._config, cores))
        if len(together) < len(hosts) and not workflow.patched(OWN_ENV_SERVERS):
            hosts = together
        self._fleet.hosts.extend(hosts)
        await self._servers.open()

    def _prepare(self) -> Awaitable[PolicyResult]:
        summary = f"prepare policy {self._config.model.name}"
        work = PREPARE_POLICY(PreparePolicyInput(self._arg.run_id), self._arg.queues, summary)
        name = "the policy to be prepared"
        return self._log.perform(name, work, PREPARE.timeout, stoppable=True)

    async def _take_turns(self, before: str) -> None:
        """Waits until the run that goes before this one has ended."""

        async def over() -> None:
            began = workflow.now()
            while await is_running(before, self._arg.queues):
                rest = rest_between_looks(workflow.now() - began)
                await workflow.sleep(rest, summary=f"run {before} to end")

        self._log.set_status("queued")
        name = f"run {before} to end, since this one begins after it"
        # That run may be paused for as long as a run may.
        await self._log.perform(name, over(), PAUSED_AT_MOST, stoppable=True)

    async def _restore(self, restore: RestoreInput, cores: int) -> None:
        """Continues, as a new execution, from a checkpoint."""

        def read() -> Awaitable[RestoreResult]:
            work = RESTORE_RUN(restore, self._arg.queues, f"restore {restore.source}")
            name = f"the checkpoint of {restore.source} to be copied"
            return self._log.perform(name, work, PREPARE.timeout, stoppable=True)

        result = await self._outages.perform("the checkpoint", read)
        result = replace(result, run_state=CHECKPOINT_STATE.upgraded(result.run_state))
        found: RunState = decoded(RunState, result.run_state["state"])
        state = restored(restore, result, found, self._config, cores)
        restoring = RunLog(self._arg.run_id, self._config, state)
        life, mine = state.lifecycle, self._state.lifecycle
        # A fork stays one that is resumed before it has a checkpoint of its own.
        if (lineage := self._log.before.get("lineage") or {}).get("kind") == "fork":
            life.origin = Origin(**lineage)
        life.created_at = life.created_at or mine.created_at
        life.started_at = life.started_at or workflow.now().isoformat()
        life.examples = {**mine.examples, **life.examples}
        if problems := too_large(self._config, life.examples):
            text = "; ".join(f"{key}: {message}" for key, message in problems)
            raise RunFailed("preflight", text, code="bad_input", user=True)
        # Changes requested while the checkpoint was read.
        state.requests = self._state.requests
        # Notes made here are gone with this execution.
        for refused in result.refused:
            restoring.warn(refused)
        state.evals.requested = self._state.evals.requested
        restoring.continue_as(replace(self._arg, restore=None, state=state))

    def _start_loops(self) -> None:
        self._shipping.overlaps = workflow.patched(OVERLAPPED_PUSHES)
        loops = [self._servers.keep_engine(host) for host in self._fleet.of("engine")]
        loops += [self._generations.keep_open(), self._generations.keep_informed()]
        loops += [self._generations.watch(), self._stepping.keep_shipping()]
        for loop in loops:
            self._start_aside(loop)
        self._news.wake()

    def _start_aside(self, work: Awaitable[None]) -> None:
        asyncio.create_task(self._log.guard(work))  # noqa: RUF006  the workflow owns its tasks

    async def _open(self) -> None:
        if workflow.patched(LOADS_TASKS):
            self._start_aside(self._servers.load_tasks())

        def name() -> str:
            missing = ", ".join(self._fleet.missing())
            return (
                f"all servers to be up ({missing})" if missing else "v0 to be verified on engines"
            )

        await self._log.wait(
            name,
            lambda: not self._fleet.missing() and self._fleet.synced(0),
            started_within(self._config),
        )
        self._stepping.begin()
        self._log.set_status("running")
        self._evals.fire(0)
        self._news.wake()

    async def _go_on_to_the_end(self) -> None:
        """All steps and evals, with pauses on request."""
        state = self._state
        self._evals.open_requested()
        while True:
            try:
                if state.lifecycle.status == "paused":
                    await self._pausing.rest()
                    await self._revise()
                    await self._maybe_continue_as_new()
                    await self._pausing.wake()
                    self._evals.open_again()
                self._shipping.on_hold = False
                await self._steps()
                if not self._config.trains:
                    await self._evaluate()
                await self._evals_done()
                await self._settle()
                if not state.live.pending:
                    return
                await self._revise()
                await self._maybe_continue_as_new()
            except Paused:
                await self._come_to_rest(None)
            except RunFailed as failure:
                await self._come_to_rest(self._log.first(failure))

    async def _come_to_rest(self, failure: RunFailed | None) -> None:
        """To 'paused', whatever else fails on the way."""
        while True:
            if failure is not None and (failure.final or self._state.requests.stop):
                raise failure
            try:
                await self._pausing.come_to_rest(failure)
                if failure is None:
                    await self._maybe_continue_as_new()
                    return
                break
            except RunFailed as another:
                failure = another
        # The loop that failed is gone: all loops start again.
        await workflow.wait_condition(workflow.all_handlers_finished)
        self._go_on_as_new()

    async def _steps(self) -> None:
        state, config, steps = self._state, self._config, self._state.steps
        while steps.step < config.last_step:
            if not config.eval.overlap:
                await self._evals_done()
            if not self._stepping.is_ahead:
                await self._stepping.until_shipped(or_else=self._asked)
            stepped = self._stepping.is_ahead or not self._asked()
            if stepped:
                await self._stepping.step()
                self._evals.fire(steps.step)
                self._log.publish()
            if self._stepping.is_ahead:
                # Only between two steps there is time for anything else.
                continue
            due = self._shipping.is_checkpoint_due(steps.step) and stepped
            if due or state.requests.checkpoint:
                if self._trainer.is_saved:
                    self._log.warn(f"checkpoint: step {steps.step} is saved, none was written")
                self._pausing.on_saved()
                await self._save()
                self._log.publish()
            await self._revise()
            await self._maybe_continue_as_new()

    async def _revise(self) -> None:
        await self._config_changes.make()
        self._leases.frozen = self._config_changes.made

    def _asked(self) -> bool:
        """Whether something was requested that can only be done between two steps."""
        return self._state.requests.checkpoint or self._state.live.pending

    async def _evaluate(self) -> None:
        """All evals of a run without steps, which are as long as they are: it continues as new on
        the way.
        """
        evals = self._state.evals
        while evals.open:
            await self._log.wait(
                lambda: evals_to_finish(len(evals.open)),
                lambda: not evals.open or self._context.is_long(),
                stalled_after(self._config),
                progress=lambda: evals.rollouts,
            )
            await self._maybe_continue_as_new()

    async def _evals_done(self) -> None:
        await self._log.wait(
            lambda: evals_to_finish(len(self._state.evals.open)),
            lambda: not self._state.evals.open,
            stalled_after(self._config),
            progress=lambda: self._state.evals.rollouts,
        )
        self._news.wake()

    # -- ending and continuing --------------------------------------------------------------

    async def _maybe_continue_as_new(self) -> None:
        if not (self._context.is_long() or self._config_changes.made):
            return
        self._shipping.on_hold = True
        await self._settle()
        self._go_on_as_new()

    def _go_on_as_new(self) -> None:
        if self._state.requests.stop:
            return
        arg = replace(self._arg, config=config_document(self._config_changes.config))
        examples = self._state.lifecycle.examples
        self._log.continue_as(replace(arg, examples=examples, state=self._state))

    async def _settle(self) -> None:
        """Waits until nothing of this workflow's own is in progress."""
        await self._log.wait(
            lambda: "side work to settle",
            lambda: (
                not self._log.busy
                and self._pushes.in_flight == 0
                and self._generations.busy == 0
                and not self._stepping.shipping
                and not self._news.pending
                and workflow.all_handlers_finished()
            ),
            START_AT_MOST,
        )

    async def _fail(self, failure: RunFailed) -> dict[str, Any]:
        await self._ending.close("failed", error=failure.error, end_reason=str(failure)[:300])
        raise ApplicationError(
            str(failure), failure.error, type=failure.code, non_retryable=True
        ) from None

    async def _save(self) -> None:
        began = workflow.now()
        await self._trainer.checkpoint(self._kept)
        if seconds := (workflow.now() - began).total_seconds():
            self._stepping.on_checkpoint(seconds)

    def _kept(self) -> str:
        return kept(self._state, self._config, self._leases.given_up)
