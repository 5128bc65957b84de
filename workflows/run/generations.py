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
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    Control,
    DispatchInput,
    DispatchReport,
    RunInput,
)
from ratchet.workflows.protocol.state import GenerationState, Lease, RunState
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.sinks import TrainSink
from ratchet.workflows.rules.sources import TrainSource, next_attempt
from ratchet.workflows.run.servers import Servers, is_running
from ratchet.workflows.run.status import RunLog

MAX_BARREN_BATCHES = 10
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

    `wanted` says that they must hear of something, `busy` counts what is under way for them. While
    `frozen` the next groups are another revision's to draw.
    """

    def __init__(
        self,
        arg: RunInput,
        config: RunConfig,
        state: RunState,
        fleet: Fleet,
        sink: TrainSink,
        servers: Servers,
        curriculum: Curriculum,
        log: RunLog,
    ) -> None:
        self._arg = arg
        self._config = config
        self._state = state
        self._fleet = fleet
        self._sink = sink
        self._servers = servers
        self._curriculum = curriculum
        self._log = log
        self._sent: dict[int, Control] = {}
        self._source: TrainSource | None = None
        self.busy = 0
        self.wanted = False
        self.frozen = False

    @property
    def live(self) -> list[GenerationState]:
        """Generations that have not closed."""
        return [g for g in self._state.generations if g.state != "closed"]

    @property
    def next_train(self) -> int:
        """The train counter that no generation has admitted yet, as far as the run was told."""
        return max((g.lease.next_train for g in self._state.generations), default=0)

    def on_report(self, report: DispatchReport) -> bool:
        """Takes a generation's report; False if it was seen before."""
        generation = next(
            (g for g in self._state.generations if g.number == report.generation), None
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
            self._state.generation_deaths = 0
        self._drop_admitted()
        return True

    def _drop_admitted(self) -> None:
        """Forgets put-back groups that the newest generation has admitted."""
        state = self._state
        admitted = state.generations[-1].lease.put_backs - state.put_backs_before
        if admitted > 0:
            del state.put_backs[:admitted]
            state.put_backs_before += admitted

    async def keep_open(self) -> None:
        """Starts the next generation as soon as the last one is in its tail."""
        state = self._state
        while True:
            await workflow.wait_condition(
                lambda: (
                    state.version >= 0
                    and not state.stop
                    and not state.pause
                    and not state.holds
                    and state.status not in (*OVER, *STANDING)
                    and not any(g.state == "open" for g in state.generations)
                )
            )
            self.busy += 1
            await self._open()
            self.busy -= 1
            self.wanted = True

    async def _open(self) -> None:
        state = self._state
        lease = state.generations[-1].lease if state.generations else Lease()
        number = state.next_generation
        state.next_generation += 1
        state.generations = self.live
        state.generations.append(
            GenerationState(number, lease, heard_at=workflow.now().isoformat())
        )
        state.control_seq += 1
        await workflow.start_child_workflow(
            DISPATCH,
            DispatchInput(
                run_id=self._arg.run_id,
                generation=number,
                config=self._arg.config,
                examples=state.examples,
                queues=self._arg.queues,
                lease=lease,
                control=self._control(number),
                shares=state.shares,
            ),
            id=self._id(number),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=f"dispatch generation {number} of {self._arg.run_id}",
        )
        state.generations[-1].started = True

    async def keep_informed(self) -> None:
        """Sends the control state whenever it changed."""
        while True:
            await workflow.wait_condition(self._has_news)
            self.wanted = self._servers.changed = self._log.unsettled = False
            self.put_back_refused()
            self._check()
            self.busy += 1
            await self.send()
            self.busy -= 1

    def _has_news(self) -> bool:
        """Whether dispatch is to hear of something. A version that is about to rise, since every
        engine has it, is told together with the news that they have.
        """
        state = self._state
        rising = state.target_version > state.version >= 0
        if rising and self._fleet.synced(state.target_version):
            return False
        return self.wanted or self._servers.changed or self._log.unsettled

    async def send(self) -> None:
        """Sends the control state to every live generation to which it would be news."""
        self._state.control_seq += 1
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
        state = self._state
        generation.state = "closed"
        state.generation_deaths += 1
        lost = generation.outstanding
        self._log.note(
            f"dispatch generation {generation.number} ended without handing over; "
            f"{len(lost)} groups in flight are leased anew"
        )
        state.put_backs.extend(lost)
        state.holds.pop(f"generation {generation.number}", None)
        self.wanted = True
        if state.generation_deaths >= MAX_DEATHS:
            text = f"{state.generation_deaths} dispatch generations in a row ended unexpectedly"
            raise RunFailed("dispatch", text)

    def put_back_refused(self) -> None:
        """Groups with tokens of refused weights are rolled out anew."""
        for group in self._sink.discard(self._state.rejected_labels):
            self.put_back(group.group)

    def put_back_stale(self, step: int) -> None:
        """Groups that are too old for batch `step` are rolled out anew."""
        for group in self._sink.sweep(step):
            self._sink.progress.stale_in_queue += 1
            self.put_back(group.group)

    def on_cancelled(self, group: GroupResult) -> None:
        """A group was given up in flight; unless the run ends, its example is rolled out anew."""
        progress = self._state.train
        if group.cancelled == "stop":
            return
        progress.stale_in_flight += group.cancelled == "stale"
        progress.overload += group.cancelled == "overload"
        if group.kind == "eval" or group.cancelled == "pause":
            # Its rollouts that ended are kept: only the rest is rolled out after the pause.
            self._state.put_backs.append(group.group)
        else:
            self.put_back(group.group)

    def put_back(self, group: str) -> None:
        """The group's example is to be rolled out anew, under a new id."""
        self._state.put_backs.append(next_attempt(group))
        self.wanted = True

    def _check(self) -> None:
        state = self._state
        if state.status in (*OVER, "paused"):
            return
        broken = self._fleet.broken()
        if broken is not None:
            text = f"{broken.name} failed {broken.downs} times in a row: {broken.detail}"
            raise RunFailed(broken.role, text)
        if self._sink.empty_batches_allowed >= MAX_BARREN_BATCHES:
            raise RunFailed(
                "rollouts",
                f"{state.train.barren} groups in a row had no rollout to train on; "
                f"last error: {state.train.last_error or 'none'}",
                # A run that has trained may only have lost its envs or endpoints for a while.
                final=state.step == 0,
            )

    def _train_limit(self, version: int) -> int:
        """Counter below which train groups may be admitted; 0 while they stand back for evals."""
        if self._state.evals and not self._config.eval.overlap:
            return 0
        if self._source is None:
            self._source = TrainSource(self._config, self._state.examples, self._state.shares)
        limit = self._source.counter_for(self._sink.rollouts_wanted(version))
        state = self._state
        if self.frozen:
            limit = min(limit, state.drawn_below)
        fresh = range(state.drawn_below, limit)
        self._curriculum.draws_for({counter: self._source.env_of(counter) for counter in fresh})
        state.drawn_below = max(state.drawn_below, limit)
        return limit

    def stale_in_flight(self, next_version: int) -> bool:
        """Whether some generation still rolls out what is too old once `next_version` is due."""
        freshest = next_version - self._config.train.max_off_policy_steps
        return any(g.oldest is not None and g.oldest < freshest for g in self.live)

    def _control(self, generation: int) -> Control:
        state = self._state
        assert state.limits is not None
        older = sum(g.reserved for g in self.live if g.number < generation)
        version = max(state.version, 0)
        return Control(
            seq=state.control_seq,
            version=version,
            next_version=max(state.next_version, version),
            train_limit=self._train_limit(version),
            permits=state.limits.permits - older,
            older=older,
            tasks_per_minute=state.limits.tasks_per_minute,
            trim=state.limits.trim,
            auto=state.limits.auto,
            stop=bool(state.stop) or state.status in OVER,
            # A pause that was begun is carried through: resume opens the next generation.
            pause=state.pause or ("drain" if state.status == "pausing" or state.holds else ""),
            engines=self._fleet.engines(),
            envs=self._fleet.envs(),
            evals=[progress.epoch for progress in state.evals],
            put_backs=list(state.put_backs),
            put_backs_before=state.put_backs_before,
            draws=dict(self._curriculum.state.draws),
            baselines=dict(state.baselines),
            revision=state.config_revision,
        )

    def _id(self, number: int) -> str:
        return f"{self._arg.run_id}/dispatch/{number}"
