"""Keeps one dispatch generation open and sends every live one its control state.

Invariants: a generation's lease is recorded before the generation starts; the control state only
rises in `seq`. A generation that ends without handing over delivers nothing more, which is
detected: `Leases` requeues what it had in flight for the next one.
"""

from datetime import datetime, timedelta

from temporalio import workflow

from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.messages import (
    DISPATCH,
    Control,
    DispatchInput,
    DispatchReport,
)
from ratchet.workflows.protocol.state import GenerationState
from ratchet.workflows.rules.leases import OVER, Leases, news_of
from ratchet.workflows.rules.sinks import Arrivals
from ratchet.workflows.run.context import NEVER, PAUSE_WHEN_EMPTY, Context
from ratchet.workflows.run.servers import Servers, is_running

LAST_WORD_WITHIN = timedelta(seconds=10)
"""A generation's last report reaches us before it ends; it may wait for our next task."""
SILENT_AFTER = timedelta(seconds=150)
"""More than two signs of life: a generation that is silent for this long is checked."""
MAX_DEATHS = 3
"""Generations in a row that may end without handing over and without a delivery."""
LAST_WORD = 2**53
"""A sequence number above those of all controls."""


class Generations:
    """The dispatch generations of one run. `busy` counts work in progress for them."""

    def __init__(
        self, context: Context, leases: Leases, arrivals: Arrivals, servers: Servers
    ) -> None:
        self._arg = context.arg
        self._config = context.config
        self._state = context.state
        self._leases = leases
        self._fleet = context.fleet
        self._arrivals = arrivals
        self._sink = arrivals.sink
        self._warned = 0
        self._servers = servers
        self._log = context.log
        self._news = context.news
        self._outages = context.outages
        self._sent: dict[int, Control] = {}
        self.busy = 0

    async def keep_open(self) -> None:
        """Starts the next generation as soon as the last one is in its tail."""
        while True:
            await workflow.wait_condition(lambda: self._leases.may_open)
            self.busy += 1
            await self._open()
            self.busy -= 1
            self._news.wake()

    async def _open(self) -> None:
        generation = self._leases.open(workflow.now().isoformat())
        number = generation.number
        await workflow.start_child_workflow(
            DISPATCH,
            DispatchInput(
                run_id=self._arg.run_id,
                generation=number,
                config=self._arg.config,
                examples=self._state.lifecycle.examples,
                queues=self._arg.queues,
                lease=generation.lease,
                control=self._leases.control(number),
                shares=self._state.live.shares,
            ),
            id=self._id(number),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            static_summary=f"dispatch generation {number} of {self._arg.run_id}",
        )
        self._leases.on_started(generation)

    async def keep_informed(self) -> None:
        """Sends the control state whenever it has changed."""
        while True:
            await workflow.wait_condition(lambda: self._news.pending and self._leases.may_inform)
            self._news.take()
            self._leases.requeue_refused()
            self._check()
            self.busy += 1
            await self.send()
            self.busy -= 1

    async def send(self) -> None:
        """Sends the control state to every live generation that does not have it yet."""
        self._leases.renumber()
        for generation in [g for g in self._leases.live if g.started]:
            control = self._leases.control(generation.number)
            news = news_of(control)
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
        """Checks every generation that gives no sign of life."""
        while True:
            await workflow.wait_condition(lambda: bool(self._leases.live))
            await workflow.sleep(SILENT_AFTER, summary="signs of life of dispatch")
            for generation in self._leases.live:
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
            # Its workers may be away, or the server busy: it continues when they are back.
            self._log.note(f"dispatch generation {generation.number} is silent but runs")
        else:
            await self._confirm_closed(generation)

    async def _confirm_closed(self, generation: GenerationState) -> None:
        """A generation that is gone must have said so; its last report may still be on its way."""
        try:
            await workflow.wait_condition(
                lambda: generation.state == "closed",
                timeout=LAST_WORD_WITHIN,
                timeout_summary=f"the last report of generation {generation.number}",
            )
        except TimeoutError:
            self._on_death(generation)

    def _on_death(self, generation: GenerationState) -> None:
        lost, deaths = self._leases.on_death(generation), self._state.dispatch.deaths
        if lost is None:
            return
        self._log.warn(
            f"dispatch generation {generation.number} ended without handing over; "
            f"{len(lost)} groups in flight are requeued"
        )
        self._outages.drop(f"generation {generation.number}")
        if deaths >= MAX_DEATHS:
            text = f"{deaths} dispatch generations in a row ended unexpectedly"
            raise RunFailed("dispatch", text)

    def _check(self) -> None:
        progress = self._state.train
        if self._state.lifecycle.status in (*OVER, "paused"):
            return
        broken = self._fleet.broken()
        if broken is not None:
            text = f"{broken.name} failed {broken.downs} times in a row: {broken.detail}"
            raise RunFailed(broken.role, text)
        last = f"the last one: {progress.last_error or 'no reason is known'}"
        text = f"{progress.empty_groups} groups in a row had no rollout to train on; {last}"
        batches, most = self._sink.empty_batches, self._config.train.max_empty_batches
        if int(batches) > self._warned:
            self._log.warn(text)
            if workflow.patched(PAUSE_WHEN_EMPTY):
                self._log.publish()
        self._warned = int(batches)
        if self._config.when_all_fail != "continue" and self._arrivals.all_failed():
            self._fail_first(progress.last_error)
        if most != NEVER and batches >= most:
            # A run that has trained may only have lost its envs or endpoints for a while.
            if self._state.steps.step > 0 or workflow.patched(PAUSE_WHEN_EMPTY):
                self._arrivals.forgive()
                raise RunFailed("rollouts", text)
            raise RunFailed("rollouts", text, final=True)

    def _fail_first(self, error: str) -> None:
        rollouts = self._state.arrivals.rollouts
        self._arrivals.forgive()
        raise RunFailed(
            "rollouts",
            f"all {rollouts} rollouts so far failed: {error}",
            code="all_failed",
            final=self._config.when_all_fail == "end",
        )

    def _id(self, number: int) -> str:
        return f"{self._arg.run_id}/dispatch/{number}"
