"""The run's two stages: batches are shipped, and each is trained, pushed and verified.

    ready groups -> batch n shipped | train step n -> weights n pushed, verified -> version n

Batch n ships once the policy version is at least n - 1 - max_lag, so that it is written while the
one before is trained. Invariants:

- A shipped batch is trained exactly once and in order.
- No batch is cut while weights are being pushed: what was sampled from weights that the gate may
  still refuse reaches no trainer.
- The version rises by one, and only after every engine that is up was verified at it.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult
from ratchet.activities.contracts.training import StepRecord
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
    "groups whose rewards are all equal carry no signal: use harder or easier examples "
    "(curriculum, data) or filters that remove less (filters), then resume"
)
LOW_SHARE = 0.1
SCORING, CHECKPOINT = "time/scoring", "time/checkpoint"
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
        self._fleet = context.fleet
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
        self.shipping = False
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
        groups, filters = self._arrivals.cut(), self._sink.take_filters()
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
        if batch.ref is None:
            self._on_empty(step, groups, filters, batch.metrics.get("reward/all/mean"))
            return
        self._sink.on_shipped()
        rollouts = sum(group.survivors for group in groups)
        self._watch_share(step, batch.rollouts, rollouts)
        self._watch_rewards(batch.unusual_rewards)
        seconds = (workflow.now() - began).total_seconds()
        shipped = ShippedBatch(step, batch.ref, batch.metrics, batch.metrics_ref, seconds)
        self._part.shipped.append(shipped)

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
        self._sink.uncut(filters)
        for group in self._sink.take_out(damaged):
            self._leases.requeue(group.group)

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

    async def step(self) -> None:
        """Batch n → train → push and verify → version n."""
        part, step = self._part, self._part.step + 1
        await self.until_shipped()
        waited, self._waited = self._waited.total_seconds(), timedelta()
        batch = part.shipped[0]
        assert batch.step == step
        batch_at = workflow.now()
        trained = await self._trainer.train(step, batch.ref)
        trained_at = workflow.now()
        await self._sweep_before_push(step)
        # It may have been pushed before the run paused.
        if self._pushes.offer(step, trained.weights):
            self._log.note(OTHER_BITS.format(step))
        await self._log.wait(
            lambda: f"policy v{step}: weights being pushed and verified",
            lambda: self._fleet.synced(step),
            START_AT_MOST,
            stoppable=False,
        )
        part.shipped.pop(0)
        self._trainer.record(TrainedBatch(step, batch.ref, self._state.live.revision))
        part.step, part.version = step, step
        self._pushes.forget_labels(step)
        part.reward = batch.metrics["reward/all/mean"]
        self._watch_drift(step, trained.metrics.get("mismatch_kl", 0.0))
        self._news.wake()
        # The slowest group may have been scored while the trainer was still busy.
        scoring = min(waited, batch.metrics.get(SCORING, 0.0))
        times = {
            "time/wait_for_batch": waited - scoring,
            SCORING: scoring,
            "time/train": (trained_at - batch_at).total_seconds(),
            "time/sync_weights": (workflow.now() - trained_at).total_seconds(),
            "time/step": waited + (workflow.now() - batch_at).total_seconds(),
        }
        self._log.write_line(step_line(step, times["time/step"], batch.metrics))
        if (checkpoint := part.totals.pop(CHECKPOINT, None)) is not None:
            times[CHECKPOINT] = checkpoint
        self._record(
            step,
            {
                **batch.metrics,
                **trained.metrics,
                **times,
                "time/ship_batch": batch.seconds,
                **self._counts(batch),
            },
            [ref for ref in (batch.metrics_ref, trained.metrics_ref) if ref is not None],
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
