"""The run's two stages: batches are shipped, and each is trained, pushed and verified.

    ready groups -> batch n shipped | train step n -> weights n pushed, verified -> version n

Batch n ships once the policy version is at least n - 1 - max_lag, so that it is written while the
one before is trained, and trains while the weights of the one before are pushed. Invariants:

- A shipped batch is trained exactly once and in order.
- What was sampled under a label that the gate may still refuse reaches no trainer.
- The version rises by one, and only after every engine that is up was verified at it.
- Between two steps the trainer stands at the run's step, unless it trains ahead: then nothing else
  is done between them.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult
from ratchet.activities.contracts.servers import EnginePool
from ratchet.activities.contracts.training import StepRecord, TrainStepResult
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.activities import RECORD_STEP, SHIP_BATCH
from ratchet.workflows.protocol.errors import RunFailed, cause_of, type_of
from ratchet.workflows.protocol.state import ShippedBatch, TrainedBatch
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.permits import Permits
from ratchet.workflows.rules.pushes import Pushes
from ratchet.workflows.rules.shipping import Shipping
from ratchet.workflows.rules.sinks import Arrivals, ship_input
from ratchet.workflows.run.context import NEVER, PAUSE_WHEN_EMPTY, Context
from ratchet.workflows.run.trainer import OTHER_BITS, Trainer

START_AT_MOST = timedelta(minutes=30)
END_TRAIN = "end-train-with-the-last-batch"
STALLED_AFTER = timedelta(minutes=30)
SWEEP_AT_MOST = timedelta(seconds=2)
REMEDY = (
    "groups whose rewards are all equal carry no signal: resume it to try other examples, or begin "
    "a run or a fork with harder or easier ones (train.env, curriculum) or filters that remove less"
)
LOW_SHARE = 0.1
SCORING, CHECKPOINT = "time/scoring", "time/checkpoint"
PUSH = "time/push/"
TOTALS = ("progress/tokens", "progress/samples", "progress/problems")


def started_within(config: RunConfig) -> timedelta:
    """How long the servers of a run may take to start: longer if an environment may."""
    envs = [*config.train.env, *config.eval.env]
    longest_s = max(env.start_timeout_s or 0.0 for env in envs)
    return max(START_AT_MOST, timedelta(seconds=2 * longest_s))


def stalled_after(config: RunConfig) -> timedelta:
    """How long a run that generates may go without a delivered group before it counts as stalled:
    enough for the slowest rollout that its envs allow, and for another try of it.
    """
    longest_s = max(env.timeout_s for env in [*config.train.env, *config.eval.env])
    return max(STALLED_AFTER, timedelta(seconds=2 * longest_s + 300))


def step_line(step: int, seconds: float, metrics: dict[str, float]) -> str:
    """A step as a line of the run's log."""
    tokens = metrics.get("progress/tokens", 0.0)
    parts = [
        f"step {step}",
        f"time {seconds:.2f} s",
        f"reward {metrics['reward/all/mean']:.4f}",
        f"tokens {tokens:.0f}",
        f"throughput {tokens / max(seconds, 1e-3):.1f} tokens/s",
    ]
    if "staleness/mean" in metrics:
        mean, most = metrics["staleness/mean"], metrics.get("staleness/max", 0.0)
        parts.append(f"staleness {mean:.2f} (max {most:.0f})")
    return " | ".join(parts)


@dataclass(frozen=True)
class Trained:
    """A batch that was trained, and when."""

    result: TrainStepResult
    began: datetime
    ended: datetime


class Steps:
    """Ships the batches of one run and steps its policy version."""

    def __init__(
        self,
        context: Context,
        arrivals: Arrivals,
        permits: Permits,
        trainer: Trainer,
        leases: Leases,
        pushes: Pushes,
        shipping: Shipping,
    ) -> None:
        self._arg = context.arg
        self._config = context.config
        self._state = context.state
        self._part = context.state.steps
        self._engines: EnginePool = context.fleet
        self._arrivals = arrivals
        self._sink = arrivals.sink
        self._permits = permits
        self._pushes = pushes
        self._rule = shipping
        self._trainer = trainer
        self._leases = leases
        self._outages = context.outages
        self._log = context.log
        self._news = context.news
        self._is_long = context.is_long
        self.shipping = False
        self._ahead: asyncio.Task[Trained] | None = None
        self._shipped_at: dict[int, datetime] = {}
        self._waited = timedelta()
        self._low = False

    def begin(self) -> None:
        """Version 0 is ready."""
        self._part.version = 0

    # -- batches ----------------------------------------------------------------------------

    async def keep_shipping(self) -> None:
        """Ships every batch as soon as it is due and full."""
        # A batch cut when an earlier loop failed is no longer being written.
        self._sink.uncut()
        self._end_train()
        while True:
            await workflow.wait_condition(self._rule.may_ship)
            if not self._rule.may_ship():
                continue
            self.shipping = True
            try:
                await self._ship(self._rule.next_batch)
            finally:
                self.shipping = False
            self._end_train()
            self._news.wake()

    def _end_train(self) -> None:
        """Cancels train rollouts once all batches ship: they would slow down the last evals."""
        if self._rule.all_shipped:
            self._leases.ends_train = workflow.patched(END_TRAIN)

    async def _ship(self, step: int) -> None:
        """Writes batch `step`; if the filters leave nothing of it, its step needs another."""
        began = workflow.now()
        groups = self._arrivals.cut(self._rule.undecided)
        filters = self._sink.take_filters()
        arg = ship_input(self._arg.run_id, step, groups, filters)
        summary = f"ship batch {step} · {len(groups)} groups"
        try:
            batch = await self._outages.perform(
                f"batch {step}", lambda: SHIP_BATCH(arg, self._arg.queues, summary)
            )
        except ActivityError as error:
            self._requeue_damaged(error, filters)
            return
        self._arrivals.on_written()
        self._watch_rewards(batch.unusual_rewards)
        if batch.ref is None:
            self._on_empty(step, groups, filters, batch.metrics.get("reward/all/mean"))
            return
        self._sink.on_shipped()
        rollouts = sum(group.survivors for group in groups)
        self._watch_share(step, batch.rollouts, rollouts)
        seconds = (workflow.now() - began).total_seconds()
        shipped = ShippedBatch(step, batch.ref, batch.metrics, batch.metrics_ref, seconds)
        self._part.shipped.append(shipped)
        self._shipped_at[step] = workflow.now()

    def _watch_share(self, step: int, trainable: int, rollouts: int) -> None:
        """Warns when batches begin to have little to train on, and notes each that has."""
        before, self._low = self._low, trainable <= rollouts * LOW_SHARE
        if self._low:
            text = f"batch {step}: only {trainable} of {rollouts} rollouts can train"
            (self._log.note if before else self._log.warn)(text)

    def _watch_rewards(self, unusual: dict[str, tuple[float, float]]) -> None:
        """Warns once of an env whose rewards leave [0, 1]."""
        for env, (low, high) in unusual.items():
            about = f"env {env} gives rewards outside [0, 1]"
            if not any(text.startswith(about) for text in self._state.lifecycle.warnings):
                self._log.warn(
                    f"{about}, from {low:g} to {high:g} so far: solve rates, gates by correctness "
                    "and difficulty pools take 1 for solved and 0 for not; scale its rewards"
                )

    def _requeue_damaged(self, error: ActivityError, filters: FilterTally) -> None:
        """Groups that cannot be read any more are rolled out again; raises any other error."""
        reason = cause_of(error)
        damaged = [g for g in self._state.train.cut if f"/groups/{g.group}.json" in reason]
        if type_of(error) != names.CORRUPT or not damaged:
            raise error
        self._log.warn(f"damaged, so rolled out again: {reason}")
        self._rule.on_damaged(damaged, filters)

    def _on_empty(
        self, step: int, groups: list[GroupResult], filters: FilterTally, reward: float | None
    ) -> None:
        self._sink.on_empty(filters)
        rollouts = sum(group.survivors for group in groups)
        empty, most = self._state.train.empty_batches, self._config.train.max_empty_batches
        earned = "" if reward is None else f", of mean reward {reward:.3f},"
        text = f"its {rollouts} rollouts{earned} were all filtered out"
        self._log.warn(f"batch {step} had nothing to train on, {empty} in a row: {text}")
        pauses = workflow.patched(PAUSE_WHEN_EMPTY)
        if pauses:
            self._log.publish()
        if most == NEVER or empty < most:
            return
        text = f"{empty} batches in a row had nothing to train on: the last one's {text[4:]}"
        if not pauses:
            raise RunFailed("rollouts", text, code="empty", final=True)
        self._arrivals.forgive()
        raise RunFailed("rollouts", f"{text}; {REMEDY}", code="empty")

    # -- steps ------------------------------------------------------------------------------

    async def until_shipped(self, or_else: Callable[[], bool] = lambda: False) -> None:
        """Waits until the next batch is ready for training, or `or_else` holds."""
        state, step, began = self._state, self._part.step + 1, workflow.now()
        await self._log.wait(
            lambda: self._waits_for_batch(step),
            lambda: bool(self._part.shipped) or or_else(),
            stalled_after(self._config),
            progress=lambda: state.train.delivered + state.evals.rollouts,
        )
        self._waited += workflow.now() - began

    @property
    def is_ahead(self) -> bool:
        """Whether the next batch is being trained, or was, before its step began."""
        return self._ahead is not None

    async def step(self) -> None:
        """Batch n → train → push and verify → version n; batch n + 1 may train meanwhile."""
        try:
            await self._step()
        except BaseException:
            await self._abandon()
            raise

    async def _abandon(self) -> None:
        """Cancels what is trained ahead: its batch trains again once the run goes on."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.cancel()
            await workflow.wait([ahead])

    async def _train(self, batch: ShippedBatch) -> Trained:
        began = workflow.now()
        result = await self._trainer.train(batch.step, batch.ref)
        return Trained(result, began, workflow.now())

    async def _until_synced(self, step: int) -> timedelta:
        """Waits until the engines are verified at `step`, and trains the next batch meanwhile.
        Returns how long the trainer waited, though that batch was there.
        """
        began = workflow.now()

        async def wait(or_else: Callable[[], bool]) -> None:
            await self._log.wait(
                lambda: f"policy v{step}: weights being pushed and verified",
                lambda: self._engines.synced(step) or or_else(),
                START_AT_MOST,
                stoppable=False,
            )

        await wait(self._may_train_ahead)
        idle = workflow.now() - max(began, self._shipped_at.get(step + 1, began))
        if not self._engines.synced(step):
            self._ahead = asyncio.create_task(self._train(self._part.shipped[1]))
            await wait(lambda: False)
        return idle if len(self._part.shipped) > 1 else timedelta()

    def _may_train_ahead(self) -> bool:
        fails = self._log.failure is not None
        return self._rule.may_train_ahead() and not self._is_long() and not fails

    async def _step(self) -> None:
        part, step, began = self._part, self._part.step + 1, workflow.now()
        if self._ahead is None:
            await self.until_shipped()
            began = workflow.now()
        waited, self._waited = self._waited.total_seconds(), timedelta()
        batch = part.shipped[0]
        assert batch.step == step
        trained = await (self._ahead or self._train(batch))
        self._ahead = None
        trained_at = workflow.now()
        self._trainer.record(TrainedBatch(step, batch.ref, self._state.live.revision))
        await self._sweep_before_push(step)
        # It may have been pushed before the run paused.
        if self._pushes.offer(step, trained.result.weights):
            self._log.warn(OTHER_BITS.format(step))
        idle = await self._until_synced(step)
        part.shipped.pop(0)
        self._shipped_at.pop(step, None)
        part.step, part.version = step, step
        self._pushes.forget_labels(step)
        part.reward = batch.metrics["reward/all/mean"]
        self._watch_drift(step, trained.result.metrics.get("mismatch_kl", 0.0))
        self._news.wake()
        # The slowest group may have been scored while the trainer was still busy.
        scoring = min(waited, batch.metrics.get(SCORING, 0.0))
        times = {
            "time/wait_for_batch": waited - scoring,
            SCORING: scoring,
            "time/train": (trained_at - began).total_seconds(),
            "time/sync_weights": (workflow.now() - trained_at).total_seconds(),
            "time/step": waited + (workflow.now() - began).total_seconds(),
            # Also what it trained before this step began, while the weights before were pushed.
            "time/trainer": (trained.ended - trained.began).total_seconds(),
        }
        self._log.write_line(step_line(step, times["time/step"], batch.metrics))
        times |= {f"{PUSH}{name}": value for name, value in self._pushes.take_seconds().items()}
        times[f"{PUSH}idle"] = idle.total_seconds()
        if (checkpoint := part.totals.pop(CHECKPOINT, None)) is not None:
            times[CHECKPOINT] = checkpoint
        self._record(
            step,
            {
                **batch.metrics,
                **trained.result.metrics,
                **times,
                "time/ship_batch": batch.seconds,
                **self._counts(batch),
            },
            [ref for ref in (batch.metrics_ref, trained.result.metrics_ref) if ref is not None],
        )

    def on_checkpoint(self, seconds: float) -> None:
        """Records a checkpoint's duration, which is reported with the next step."""
        totals = self._part.totals
        totals[CHECKPOINT] = totals.get(CHECKPOINT, 0.0) + seconds

    def _watch_drift(self, step: int, mismatch_kl: float) -> None:
        """Reports when trainer and engines assign different probabilities to sampled tokens."""
        bound = self._config.inference.drift_alarm
        before, self._part.alarm = self._part.alarm, ""
        if bound is not None and not mismatch_kl <= bound:
            self._part.alarm = f"step {step}: mismatch KL {mismatch_kl:.3g} is above {bound:g}"
            if not before:
                self._log.note(f"drift: {self._part.alarm}")

    def _waits_for_batch(self, step: int) -> str:
        if self.shipping:
            return f"batch {step} to be written"
        return f"rollouts for batch {step}: {self._sink.filled()}"

    async def _sweep_before_push(self, step: int) -> None:
        """Lets dispatch cancel groups that are too old before the engines pause for new weights."""
        self._part.next_version = step
        if self._leases.stale_in_flight(step):
            self._news.wake()
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: not self._leases.stale_in_flight(step),
                    timeout=SWEEP_AT_MOST,
                    timeout_summary=f"stale rollouts to be cancelled before v{step}",
                )

    def _counts(self, batch: ShippedBatch) -> dict[str, float]:
        """Counters of the run so far, and groups cancelled since the last step."""
        totals = self._part.totals
        for name in TOTALS:
            total = name.replace("/", "/total_")
            totals[total] = totals.get(total, 0.0) + batch.metrics.get(name, 0.0)
        return {
            **totals,
            **self._arrivals.metrics(),
            **self._permits.metrics(),
            "progress/rollouts": float(self._state.arrivals.rollouts),
            "progress/evals": float(self._state.evals.count),
            **self._leases.metrics(),
        }

    def _record(self, step: int, metrics: dict[str, float], parts: list[ArtifactRef]) -> None:
        monitor = self._config.monitor
        record = StepRecord(self._arg.run_id, step, metrics, parts, monitor.url, monitor.url_var)
        work = self._outages.perform(
            f"record of step {step}",
            lambda: RECORD_STEP(record, self._arg.queues, f"record step {step}"),
        )
        self._log.in_background(work)
