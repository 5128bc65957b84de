"""Keeps one dispatch generation open and tells every live one what it must know.

Invariants: a generation's lease is recorded before the generation starts; older generations keep
the permits they still use; the control state only rises in `seq`. A generation that ends without
handing over delivers nothing more: what it had in flight is rolled out by the next one under the
same ids, so that whatever its activities committed is adopted.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from temporalio import workflow

from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.activities.contracts.statuses import ENDED
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    Control,
    DispatchInput,
    DispatchReport,
)
from ratchet.workflows.protocol.state import GenerationState, Lease
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sinks import TrainSink
from ratchet.workflows.rules.sources import TrainSource, next_attempt
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.servers import Servers, is_running

MAX_EMPTY_BATCHES = 10
LAST_WORD_WITHIN = timedelta(seconds=10)
"""A generation's last report reaches us before it ends; it may wait for our next task."""
SILENT_AFTER = timedelta(seconds=150)
"""Two signs of life, and then some: a generation that is silent for so long is looked at."""
MAX_DEATHS = 3
"""Generations in a row that may end without handing over, and without a delivery."""
LAST_WORD = 2**53
"""A sequence number above those of all controls."""
OVER = ("stopping", *ENDED)
STANDING = ("pausing", "paused", "starting")


class Generations:
    """The dispatch generations of one run.

    `busy` counts what is under way for them. While `frozen` the next groups are another revision's
    to draw.
    """

    def __init__(
        self, context: Context, sink: TrainSink, servers: Servers, curriculum: Curriculum
    ) -> None:
        self._arg = context.arg
        self._config = context.config
        self._state = context.state
        self._part = context.state.dispatch
        self._fleet = context.fleet
        self._sink = sink
        self._servers = servers
        self._curriculum = curriculum
        self._log = context.log
        self._news = context.news
        self._outages = context.outages
        self._sent: dict[int, Control] = {}
        self._source: TrainSource | None = None
        self.busy = 0
        self.frozen = False

    @property
    def live(self) -> list[GenerationState]:
        """Generations that have not closed."""
        return [g for g in self._part.generations if g.state != "closed"]

    @property
    def next_train(self) -> int:
        """The train counter that no generation has admitted yet, as far as the run was told."""
        return max((g.lease.next_train for g in self._part.generations), default=0)

    def on_report(self, report: DispatchReport) -> bool:
        """Takes a generation's report; False if it was seen before."""
        generation = next(
            (g for g in self._part.generations if g.number == report.generation), None
        )
        if generation is None or report.seq <= generation.seq or generation.state == "closed":
            return False
        generation.seq = report.seq
        generation.state = report.state
        generation.inflight_train = report.inflight_train
        generation.inflight_eval = report.inflight_eval
        generation.reserved = report.reserved
        generation.oldest = report.oldest
        generation.outstanding = report.outstanding
        generation.waiting_for = report.waiting_for
        generation.heard_at = workflow.now().isoformat()
        generation.lease = report.lease
        if report.groups:
            self._part.deaths = 0
        self._drop_admitted()
        return True

    def _drop_admitted(self) -> None:
        """Forgets requeued groups that the newest generation has admitted."""
        part = self._part
        admitted = part.generations[-1].lease.put_backs - part.requeued_before
        if admitted > 0:
            del part.requeued[:admitted]
            part.requeued_before += admitted

    async def keep_open(self) -> None:
        """Starts the next generation as soon as the last one is in its tail."""
        state = self._state
        while True:
            await workflow.wait_condition(
                lambda: (
                    state.steps.version >= 0
                    and not state.requests.stop
                    and not state.requests.pause
                    and not state.outages.holds
                    and state.lifecycle.status not in (*OVER, *STANDING)
                    and not any(g.state == "open" for g in self._part.generations)
                )
            )
            self.busy += 1
            await self._open()
            self.busy -= 1
            self._news.wake()

    async def _open(self) -> None:
        part = self._part
        lease = part.generations[-1].lease if part.generations else Lease()
        number = part.next_generation
        part.next_generation += 1
        part.generations = self.live
        part.generations.append(GenerationState(number, lease, heard_at=workflow.now().isoformat()))
        part.control_seq += 1
        await workflow.start_child_workflow(
            DISPATCH,
            DispatchInput(
                run_id=self._arg.run_id,
                generation=number,
                config=self._arg.config,
                examples=self._state.lifecycle.examples,
                queues=self._arg.queues,
                lease=lease,
                control=self._control(number),
                shares=self._state.live.shares,
            ),
            id=self._id(number),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=f"dispatch generation {number} of {self._arg.run_id}",
        )
        part.generations[-1].started = True

    async def keep_informed(self) -> None:
        """Sends the control state whenever it changed."""
        while True:
            await workflow.wait_condition(self._has_news)
            self._news.take()
            self.requeue_refused()
            self._check()
            self.busy += 1
            await self.send()
            self.busy -= 1

    def _has_news(self) -> bool:
        """Whether dispatch is to hear of something. A version that is about to rise, since every
        engine has it, is told together with the news that they have.
        """
        target = self._state.servers.target_version
        if target > self._state.steps.version >= 0 and self._fleet.synced(target):
            return False
        return self._news.pending

    async def send(self) -> None:
        """Sends the control state to every live generation to which it would be news."""
        self._part.control_seq += 1
        for generation in [g for g in self.live if g.started]:
            control = self._control(generation.number)
            news = replace(control, seq=0)
            if self._sent.get(generation.number) == news:
                continue
            self._sent[generation.number] = news
            there = await self._servers.signal(self._id(generation.number), "control", control)
            if not there:
                self._log.in_background(self._confirm_closed(generation))

    async def dismiss(self, report: DispatchReport) -> None:
        """Ends a generation of an earlier attempt of the run, which has outlived it."""
        over = Control(seq=LAST_WORD, stop=True)
        number = f"{report.run_id}/dispatch/{report.generation}"
        await self._servers.signal(number, "control", over)

    async def watch(self) -> None:
        """Looks at every generation that gives no sign of life."""
        while True:
            await workflow.wait_condition(lambda: bool(self.live))
            await workflow.sleep(SILENT_AFTER, summary="signs of life of dispatch")
            for generation in self.live:
                if self._is_silent(generation):
                    await self._look_at(generation)

    def _is_silent(self, generation: GenerationState) -> bool:
        heard = datetime.fromisoformat(generation.heard_at)
        return generation.started and workflow.now() - heard >= SILENT_AFTER

    async def _look_at(self, generation: GenerationState) -> None:
        self.busy += 1
        running = await is_running(self._id(generation.number), self._arg.queues)
        self.busy -= 1
        if running:
            # Its workers may be away, or the server busy: it goes on when they are back.
            self._log.note(f"dispatch generation {generation.number} is silent but runs")
        else:
            await self._confirm_closed(generation)

    async def _confirm_closed(self, generation: GenerationState) -> None:
        """A generation that is gone must have said so; its last report may still be under way."""
        try:
            await workflow.wait_condition(
                lambda: generation.state == "closed",
                timeout=LAST_WORD_WITHIN,
                timeout_summary=f"the last report of generation {generation.number}",
            )
        except TimeoutError:
            self._on_death(generation)

    def _on_death(self, generation: GenerationState) -> None:
        """Leases anew what a generation that is gone had in flight, under the same ids.

        What it admitted after its last report lies beyond the lease of that report, which the next
        generation goes on with.
        """
        part = self._part
        generation.state = "closed"
        part.deaths += 1
        lost = generation.outstanding
        self._log.note(
            f"dispatch generation {generation.number} ended without handing over; "
            f"{len(lost)} groups in flight are leased anew"
        )
        part.requeued.extend(lost)
        self._outages.drop(f"generation {generation.number}")
        self._news.wake()
        if part.deaths >= MAX_DEATHS:
            text = f"{part.deaths} dispatch generations in a row ended unexpectedly"
            raise RunFailed("dispatch", text)

    def forgive(self) -> None:
        """A pause ends what counts against the generations."""
        self._part.deaths = 0

    def requeue_refused(self) -> None:
        """Groups with tokens of refused weights are rolled out anew."""
        for group in self._sink.discard(self._state.servers.rejected_labels):
            self.requeue(group.group)

    def requeue_stale(self, step: int) -> None:
        """Groups that are too old for batch `step` are rolled out anew."""
        for group in self._sink.sweep(step):
            self._part.stale_in_queue += 1
            self.requeue(group.group)

    def on_cancelled(self, group: GroupResult) -> None:
        """A group was given up in flight; unless the run ends, its example is rolled out anew."""
        part = self._part
        if group.cancelled == "stop":
            return
        part.stale_in_flight += group.cancelled == "stale"
        part.overload += group.cancelled == "overload"
        if group.kind == "eval" or group.cancelled == "pause":
            # Its rollouts that ended are kept: only the rest is rolled out after the pause.
            part.requeued.append(group.group)
        else:
            self.requeue(group.group)

    def requeue(self, group: str) -> None:
        """The group's example is to be rolled out anew, under a new id."""
        self._part.requeued.append(next_attempt(group))
        self._news.wake()

    def metrics(self) -> dict[str, float]:
        """Groups that were given up since the last call, which starts their counts anew."""
        part = self._part
        counts = {
            "off_policy/dropped/in_flight": float(part.stale_in_flight),
            "off_policy/dropped/in_queue": float(part.stale_in_queue),
            "dispatcher/cancelled/overload": float(part.overload),
        }
        part.stale_in_flight = part.stale_in_queue = part.overload = 0
        return counts

    def _check(self) -> None:
        progress = self._state.train
        if self._state.lifecycle.status in (*OVER, "paused"):
            return
        broken = self._fleet.broken()
        if broken is not None:
            text = f"{broken.name} failed {broken.downs} times in a row: {broken.detail}"
            raise RunFailed(broken.role, text)
        if self._sink.empty_batches_allowed >= MAX_EMPTY_BATCHES:
            raise RunFailed(
                "rollouts",
                f"{progress.empty_groups} groups in a row had no rollout to train on; "
                f"last error: {progress.last_error or 'none'}",
                # A run that has trained may only have lost its envs or endpoints for a while.
                final=self._state.steps.step == 0,
            )

    def _train_limit(self, version: int) -> int:
        """Counter below which train groups may be admitted; 0 while they stand back for evals."""
        part, state = self._part, self._state
        if state.evals.open and not self._config.eval.overlap:
            return 0
        if self._source is None:
            self._source = TrainSource(self._config, state.lifecycle.examples, state.live.shares)
        limit = self._source.counter_for(self._sink.rollouts_wanted(version))
        if self.frozen:
            limit = min(limit, part.drawn_below)
        fresh = range(part.drawn_below, limit)
        self._curriculum.draws_for({counter: self._source.env_of(counter) for counter in fresh})
        part.drawn_below = max(part.drawn_below, limit)
        return limit

    def stale_in_flight(self, next_version: int) -> bool:
        """Whether some generation still rolls out what is too old once `next_version` is due."""
        freshest = next_version - self._config.train.max_off_policy_steps
        return any(g.oldest is not None and g.oldest < freshest for g in self.live)

    def _control(self, generation: int) -> Control:
        part, state, limits = self._part, self._state, self._state.permits.limits
        requests, status = state.requests, state.lifecycle.status
        older = sum(g.reserved for g in self.live if g.number < generation)
        version = max(state.steps.version, 0)
        return Control(
            seq=part.control_seq,
            version=version,
            next_version=max(state.steps.next_version, version),
            train_limit=self._train_limit(version),
            permits=limits.permits - older,
            older=older,
            tasks_per_minute=limits.tasks_per_minute,
            trim=limits.trim,
            auto=limits.auto,
            stop=bool(requests.stop) or status in OVER,
            # A pause that was begun is carried through: resume opens the next generation.
            pause=requests.pause or ("drain" if status == "pausing" or state.outages.holds else ""),
            engines=self._fleet.engines(),
            envs=self._fleet.envs(),
            evals=[progress.epoch for progress in state.evals.open],
            put_backs=list(part.requeued),
            put_backs_before=part.requeued_before,
            draws=dict(self._curriculum.state.draws),
            baselines=dict(state.arrivals.baselines),
            revision=state.live.revision,
        )

    def _id(self, number: int) -> str:
        return f"{self._arg.run_id}/dispatch/{number}"
