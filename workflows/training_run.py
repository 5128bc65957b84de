"""A training run: steps the policy version forward, from durable state only.

    batch n  ->  train step n  ->  weights n pushed and verified  ->  policy version n

One workflow per run; its id is the run's id. Rollouts are kept in flight by Dispatch generations,
servers are kept alive by Host workflows; both report by signal. Invariants:

- A shipped batch is trained exactly once and in order.
- The version rises by one, and only after every engine that is up was verified at it.
- Every wait has a name and a bound, shown in the memo and the UI.
- Public signals never raise, whatever their payload.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    import contextlib
    import json
    from dataclasses import replace
    from datetime import timedelta

    from activities.contracts import names
    from activities.contracts.hosting import HostReport
    from activities.contracts.rollouts import (
        BatchResult,
        EvalResult,
        FilterTally,
        FinalizeEvalInput,
        GroupResult,
    )
    from activities.contracts.training import PolicyResult, PreparePolicyInput, StepRecord
    from activities.storage.refs import ArtifactRef
    from configs.run import RunConfig
    from workflows import policies
    from workflows.failures import RunFailed, Stopped, cause_of
    from workflows.fleet import Fleet, planned_hosts
    from workflows.generations import Generations
    from workflows.messages import (
        TRAINING_RUN,
        DispatchReport,
        PreflightInput,
        RunInput,
        normal_signal_name,
        parse_stop,
        parse_trigger_eval,
    )
    from workflows.preflight import run_preflight
    from workflows.run_log import RunLog
    from workflows.servers import Servers
    from workflows.sinks import TrainSink, eval_arrival, ship_input
    from workflows.sources import fired_evals
    from workflows.state import EvalEpoch, EvalProgress, RunState
    from workflows.trainer import Trainer

QUEUED_AT_MOST = timedelta(days=7)
START_AT_MOST = timedelta(minutes=30)
STALLED_AFTER = timedelta(minutes=30)
CLOSE_AT_MOST = timedelta(seconds=60)
SWEEP_AT_MOST = timedelta(seconds=2)
MAX_PENDING_EVALS = 4
MAX_EMPTY_BATCHES = 10
LOW_SHARE = 0.1
KEPT_LABEL_VERSIONS = 100


@workflow.defn(name=TRAINING_RUN)
class TrainingRun:
    """One run, from its first check to its last checkpoint."""

    @workflow.init
    def __init__(self, arg: RunInput) -> None:
        self._arg = arg
        self._config = config = RunConfig.model_validate(arg.config)
        self._state = state = arg.state or RunState(
            created_at=arg.created_at, examples=dict(arg.examples)
        )
        self._fleet = Fleet(state.hosts)
        self._sink = TrainSink(config, state.train)
        self._log = RunLog(config, state)
        self._servers = Servers(arg, state, self._fleet, self._log, config.gate_tolerance)
        self._trainer = Trainer(arg.run_id, state, self._fleet, self._servers, self._log)
        self._generations = Generations(
            arg, config, state, self._fleet, self._sink, self._servers, self._log
        )

    # -- signals and queries ----------------------------------------------------------------

    @workflow.signal
    def stop(self, value: Any = None, *rest: Any) -> None:
        """Ends the run gracefully, with a final checkpoint. Any payload will do."""
        self._state.stop = self._state.stop or parse_stop(value).reason

    @workflow.signal
    def trigger_eval(self, value: Any = None, *rest: Any) -> None:
        """Evaluates now: all envs, or those named."""
        known = [env.name for env in self._config.eval.env]
        request, warning = parse_trigger_eval(value, known)
        if warning:
            self._log.note(warning)
        if self._state.version < 0 or self._state.stop:
            self._log.note("trigger_eval: ignored, since the run does not step now")
            return
        pending = [progress.epoch.env for progress in self._state.evals]
        full = [env for env in request.envs if pending.count(env) >= MAX_PENDING_EVALS]
        if full:
            self._log.note(f"trigger_eval: {', '.join(full)} already wait; ignored")
        self._open_evals([env for env in request.envs if env not in full])

    @workflow.signal(dynamic=True)
    def other_signal(self, name: str, args: Sequence[RawValue]) -> None:
        """Public signals under other spellings; anything else is logged and ignored."""
        value = args[0].payload.data if args else None
        known = normal_signal_name(name)
        if known == "stop":
            self.stop(value)
        elif known == "trigger_eval":
            self.trigger_eval(value)
        else:
            self._log.note(f"unknown signal {name!r} was ignored")

    @workflow.signal
    def host_report(self, report: HostReport) -> None:
        """A server came up or went down."""
        if self._fleet.on_report(report):
            self._generations.wanted = True
            if report.state != "up":
                text = f"{report.role} {report.index} (epoch {report.epoch}) is {report.state}"
                self._log.note(f"{text}: {report.detail[-200:]}")

    @workflow.signal
    def dispatch_report(self, report: DispatchReport) -> None:
        """Groups were finalized, or a generation hands over."""
        if not self._generations.on_report(report):
            return
        for lost in report.lost:
            self._servers.lose(lost.role, lost.index, lost.epoch, lost.reason)
        for group in report.groups:
            if group.user_error:
                self._log.failure = RunFailed("scoring", group.error, code="bad_input", user=True)
            elif group.cancelled:
                # Neither a success nor an error: the example is rolled out anew, or the run ends.
                if group.cancelled == "stale":
                    self._state.train.stale_in_flight += 1
                    self._generations.put_back(group.group)
            elif group.kind == "eval":
                self._on_eval_group(group)
            else:
                self._sink.add(group)
                self._state.rollouts += group.size
        self._generations.put_back_refused()
        self._generations.wanted = True

    @workflow.query
    def status(self) -> dict[str, Any]:
        """The run as the API shows it."""
        return self._log.memo()

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
            await self._steps()
            await self._evals_done()
            await self._settle()
            end_reason = f"all {self._config.max_steps} steps are done"
        except Stopped:
            end_reason = f"stopped at step {self._state.step}: {self._state.stop}"
        except RunFailed as failure:
            return await self._fail(failure)
        except ActivityError as error:
            return await self._fail(RunFailed(error.activity_type, cause_of(error)))
        except asyncio.CancelledError:
            await self._close("cancelled", end_reason="cancelled")
            raise
        self._log.set_status("stopping")
        try:
            await self._trainer.checkpoint(self._durable_summary())
        except RunFailed as failure:
            return await self._fail(failure)
        except asyncio.CancelledError:
            await self._close("cancelled", end_reason="cancelled before the final checkpoint")
            raise
        await self._close("succeeded", end_reason=end_reason)
        return self._log.memo(end_reason=end_reason)

    async def _start(self) -> None:
        state, queues = self._state, self._arg.queues
        if not state.examples:
            self._log.set_status("queued")
            found = await self._log.carry_out(
                f"workers on {queues.env} and {queues.trainer} to check the config",
                run_preflight(PreflightInput(self._arg.config, queues)),
                QUEUED_AT_MOST,
                stoppable=True,
            )
            if found.problems:
                text = "; ".join(f"{p.key}: {p.message}" for p in found.problems)
                raise RunFailed("preflight", text, code="bad_input", user=True)
            state.examples = dict(found.examples)
        state.started_at = workflow.now().isoformat()
        self._log.set_status("starting")
        prepare: Awaitable[PolicyResult] = workflow.execute_activity(
            names.PREPARE_POLICY,
            PreparePolicyInput(self._arg.run_id),
            result_type=PolicyResult,
            task_queue=queues.trainer,
            start_to_close_timeout=policies.PREPARE_TIMEOUT,
            heartbeat_timeout=policies.HEARTBEAT,
            retry_policy=policies.ROLLOUTS,
            summary=f"prepare policy {self._config.model.name}",
        )
        policy = await self._log.carry_out(
            "the policy to be prepared", prepare, policies.PREPARE_TIMEOUT, stoppable=True
        )
        state.policy_origin = policy.origin
        state.weights, state.target_version = policy.weights, 0
        state.hosts.extend(planned_hosts(self._config))
        await self._servers.open()

    def _start_loops(self) -> None:
        loops = [self._servers.keep_engine(host) for host in self._fleet.of("engine")]
        loops += [self._generations.keep_open(), self._generations.keep_informed()]
        for loop in loops:
            asyncio.create_task(self._log.guard(loop))  # noqa: RUF006  the workflow owns its tasks
        self._generations.wanted = True

    async def _open(self) -> None:
        def name() -> str:
            missing = ", ".join(self._fleet.missing())
            return f"servers to come up: {missing}" if missing else "engines to be verified at v0"

        await self._log.wait(
            name, lambda: not self._fleet.missing() and self._fleet.synced(0), START_AT_MOST
        )
        self._state.version = 0
        self._log.set_status("running")
        self._fire_evals(0)

    async def _steps(self) -> None:
        while self._state.step < self._config.max_steps:
            if not self._config.eval.overlap:
                await self._evals_done()
            await self._step(self._state.step + 1)
            step = self._state.step
            if step % self._config.checkpoint.interval == 0 and step < self._config.max_steps:
                await self._trainer.checkpoint(self._durable_summary())
                self._log.publish()
            await self._maybe_continue_as_new()

    async def _step(self, step: int) -> None:
        """Batch `step` → train → push and verify → version `step`."""
        state = self._state
        began = workflow.now()
        await self._log.wait(
            lambda: (
                f"rollouts for batch {step}: "
                f"{self._sink.collected} of {self._config.train.batch_size}"
            ),
            self._batch_is_ready,
            STALLED_AFTER,
            progress=lambda: state.train.delivered,
        )
        collected = workflow.now()
        shipped = await self._ship(step)
        if shipped is None:
            return
        batch, reference = shipped
        shipped_at = workflow.now()
        trained = await self._trainer.train(step, reference)
        trained_at = workflow.now()
        await self._sweep_before_push(step)
        state.weights, state.target_version = trained.weights, step
        await self._log.wait(
            lambda: f"engines to be verified at v{step}",
            lambda: self._fleet.synced(step),
            START_AT_MOST,
            stoppable=False,
        )
        synced = workflow.now()
        state.step, state.version = step, step
        state.rejected_labels = [
            label
            for label in state.rejected_labels
            if int(label.partition(".")[0]) > step - KEPT_LABEL_VERSIONS
        ]
        state.reward = batch.metrics["reward/all/mean"]
        self._fire_evals(step)
        self._generations.wanted = True
        self._log.publish()
        times = {
            "time/wait_for_batch": collected - began,
            "time/ship_batch": shipped_at - collected,
            "time/train": trained_at - shipped_at,
            "time/sync_weights": synced - trained_at,
            "time/step": synced - began,
        }
        self._record(
            step,
            {
                **batch.metrics,
                **trained.metrics,
                **{name: span.total_seconds() for name, span in times.items()},
                **self._stale_counts(),
                "progress/rollouts": float(state.rollouts),
            },
        )

    def _batch_is_ready(self) -> bool:
        self._generations.put_back_refused()
        self._generations.put_back_stale(self._state.step + 1)
        return self._sink.collected >= self._config.train.batch_size

    async def _sweep_before_push(self, step: int) -> None:
        """Lets dispatch give up what is too old before the engines pause for new weights."""
        self._state.next_version = step
        if self._generations.stale_in_flight(step):
            self._generations.wanted = True
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: not self._generations.stale_in_flight(step),
                    timeout=SWEEP_AT_MOST,
                    timeout_summary=f"stale rollouts to be given up before v{step}",
                )

    def _stale_counts(self) -> dict[str, float]:
        progress = self._state.train
        counts = {
            "off_policy/dropped/in_flight": float(progress.stale_in_flight),
            "off_policy/dropped/in_queue": float(progress.stale_in_queue),
        }
        progress.stale_in_flight = progress.stale_in_queue = 0
        return counts

    async def _ship(self, step: int) -> tuple[BatchResult, ArtifactRef] | None:
        """Ships batch `step`; None if the filters left nothing of it to train on."""
        groups = self._sink.cut()
        ship: Awaitable[BatchResult] = workflow.execute_activity(
            names.SHIP_BATCH,
            ship_input(self._arg.run_id, step, groups, self._state.train.barren_filters),
            result_type=BatchResult,
            task_queue=self._arg.queues.rollout,
            **policies.STORE_WORK,
            summary=f"ship batch {step} · {len(groups)} groups",
        )
        batch = await self._log.carry_out(f"batch {step} to be written", ship, START_AT_MOST)
        progress, rollouts = self._state.train, sum(group.survivors for group in groups)
        if batch.ref is None:
            self._sink.on_empty()
            self._log.note(f"batch {step} had nothing to train on ({rollouts} rollouts)")
            if progress.empty_batches >= MAX_EMPTY_BATCHES:
                text = f"{progress.empty_batches} batches in a row had nothing to train on"
                raise RunFailed("rollouts", f"{text}: every rollout was filtered out", code="empty")
            self._generations.wanted = True
            return None
        progress.empty_batches = 0
        progress.barren_filters = FilterTally()
        if batch.rollouts <= rollouts * LOW_SHARE:
            self._log.note(f"batch {step}: only {batch.rollouts} of {rollouts} rollouts can train")
        self._state.batches.append(batch.ref)
        return batch, batch.ref

    # -- evals ------------------------------------------------------------------------------

    def _fire_evals(self, step: int) -> None:
        if step > self._state.fired:
            self._state.fired = step
            self._open_evals(fired_evals(self._config, step))

    def _open_evals(self, envs: list[str]) -> None:
        state = self._state
        for env in envs:
            examples = self._config.eval_num_examples(env)
            epoch = EvalEpoch(
                epoch=f"{state.step}-{state.eval_count}/{env}",
                env=env,
                step=state.step,
                num_examples=min(examples, state.examples.get(f"eval/{env}", examples)),
                group_size=self._config.eval_group_size(env),
            )
            state.eval_count += 1
            state.evals.append(EvalProgress(epoch))
        self._generations.wanted = True

    def _on_eval_group(self, group: GroupResult) -> None:
        epoch = group.group.removeprefix("eval/").rpartition("/")[0]
        progress = next((p for p in self._state.evals if p.epoch.epoch == epoch), None)
        if progress is None:
            return
        self._state.eval_rollouts += group.size
        if eval_arrival(progress, group):
            self._state.evals.remove(progress)
            if self._state.stop:
                return
            self._log.in_background(self._finalize_eval(progress))

    async def _finalize_eval(self, progress: EvalProgress) -> None:
        epoch = progress.epoch
        result: EvalResult = await workflow.execute_activity(
            names.FINALIZE_EVAL,
            FinalizeEvalInput(
                self._arg.run_id,
                epoch.epoch,
                epoch.env,
                epoch.step,
                epoch.num_examples,
                epoch.group_size,
                sorted(progress.missing),
            ),
            result_type=EvalResult,
            task_queue=self._arg.queues.rollout,
            **policies.STORE_WORK,
            summary=f"eval of {epoch.env} at step {epoch.step}",
        )
        self._state.last_eval[epoch.env] = {
            "step": float(result.step),
            "reward": result.reward_mean,
            "version": float(result.versions[1]),
        }
        self._log.publish()

    async def _evals_done(self) -> None:
        await self._log.wait(
            lambda: f"{len(self._state.evals)} evals to finish",
            lambda: not self._state.evals,
            STALLED_AFTER,
            progress=lambda: self._state.eval_rollouts,
        )
        self._generations.wanted = True

    # -- ending and continuing --------------------------------------------------------------

    async def _maybe_continue_as_new(self) -> None:
        info = workflow.info()
        limit = self._config.dispatch.generation_events
        if not (info.is_continue_as_new_suggested() or info.get_current_history_length() >= limit):
            return
        await self._settle()
        if self._state.stop:
            return
        workflow.continue_as_new(
            replace(self._arg, examples=self._state.examples, state=self._state)
        )

    async def _settle(self) -> None:
        """Waits until nothing of this workflow's own is under way."""
        await self._log.wait(
            lambda: "side work to settle",
            lambda: (
                not self._log.busy
                and self._servers.pushes_in_flight == 0
                and self._generations.busy == 0
                and not self._generations.wanted
                and not self._servers.changed
                and workflow.all_handlers_finished()
            ),
            START_AT_MOST,
        )

    async def _fail(self, failure: RunFailed) -> dict[str, Any]:
        await self._close("failed", error=failure.error, end_reason=str(failure)[:300])
        raise ApplicationError(
            str(failure), failure.error, type=failure.code, non_retryable=True
        ) from None

    async def _close(self, status: str, **ended: Any) -> None:
        """Ends dispatch and hosts, and writes the run's last word."""
        self._log.set_status("stopping")
        await self._generations.send()
        await self._servers.close()
        try:
            await workflow.wait_condition(
                lambda: not self._generations.live and not self._log.busy,
                timeout=CLOSE_AT_MOST,
                timeout_summary="dispatch to close",
            )
        except TimeoutError:
            self._log.note("dispatch did not close in time")
        self._state.status = status
        self._log.publish(finished_at=workflow.now().isoformat(), **ended)

    def _durable_summary(self) -> str:
        """What a checkpoint keeps of the run besides the trainer: cursors and counters."""
        state = self._state
        return json.dumps(
            {
                "step": state.step,
                "version": state.version,
                "next_train": self._generations.next_train,
                "ready": [group.group for group in state.train.ready],
                "evals": [progress.epoch.epoch for progress in state.evals],
                "lost": state.train.lost,
                "shipped_rollouts": state.train.shipped_rollouts,
                "put_backs": state.put_backs,
            }
        )

    # -- side work --------------------------------------------------------------------------

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        async def record() -> None:
            await workflow.execute_activity(
                names.RECORD_STEP,
                StepRecord(self._arg.run_id, step, metrics),
                task_queue=self._arg.queues.orchestrator,
                **policies.STORE_WORK,
                summary=f"record step {step}",
            )

        self._log.in_background(record())
