"""Which generations exist, what each may admit, and which groups are rolled out again. Pure.

Invariants: a lease is recorded before its generation starts; a report is accepted once, and never
from a generation that is over; older generations keep the permits they still use. What a lost
generation had in flight is rolled out by the next one under the same ids; any other group that is
rolled out again has a new id.
"""

from collections.abc import Callable
from dataclasses import replace

from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.activities.contracts.statuses import ENDED
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import Control, DispatchReport
from ratchet.workflows.protocol.state import GenerationState, Lease, RunState
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.rules.sinks import TrainSink
from ratchet.workflows.rules.sources import TrainSource, next_attempt

OVER = ("stopping", *ENDED)
STANDING = ("pausing", "paused", "starting")


def news_of(control: Control) -> Control:
    """A control without what alone is no reason to send it."""
    return replace(control, seq=0, missing=0, heard=-1)


class Leases:
    """Acts on the generations of a run's state. While `frozen` the next groups are drawn by another
    revision; `wake` is called when generations need an update. With `ends_train`, train groups are
    cancelled once the last batch is shipped; runs of older builds let them finish. `given_up` are
    groups that this run rolls out no more, since it ends; its last checkpoint requeues them.
    """

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        fleet: Fleet,
        sink: TrainSink,
        curriculum: Curriculum,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._part = state.dispatch
        self._fleet = fleet
        self._sink = sink
        self._curriculum = curriculum
        self._wake = wake
        self._source: TrainSource | None = None
        self.frozen = False
        self.ends_train = False
        self.given_up: list[str] = []

    # -- generations ------------------------------------------------------------------------

    @property
    def live(self) -> list[GenerationState]:
        """Generations that have not closed."""
        return [g for g in self._part.generations if g.state != "closed"]

    @property
    def next_train(self) -> int:
        """The train counter that no generation has admitted yet, as far as the run knows."""
        return max((g.lease.next_train for g in self._part.generations), default=0)

    @property
    def may_open(self) -> bool:
        """Whether the next generation is due."""
        state = self._state
        return (
            state.steps.version >= 0
            and not state.requests.stop
            and not state.requests.pause
            and not state.outages.holds
            and state.lifecycle.status not in (*OVER, *STANDING)
            and not any(g.state == "open" for g in self._part.generations)
        )

    def open(self, now: str) -> GenerationState:
        """Leases what was not admitted to the next generation, which is about to start."""
        part = self._part
        lease = part.generations[-1].lease if part.generations else Lease()
        generation = GenerationState(part.next_generation, lease, heard_at=now)
        part.next_generation += 1
        part.generations = [*self.live, generation]
        part.control_seq += 1
        return generation

    def on_started(self, generation: GenerationState) -> None:
        """The workflow of a generation that was opened runs."""
        generation.started = True

    @property
    def may_inform(self) -> bool:
        """Whether generations may get an update now. A version that is about to rise, because every
        engine has it, is sent together with the news that they have it.
        """
        target = self._state.servers.target_version
        return not (target > self._state.steps.version >= 0 and self._fleet.synced(target))

    def renumber(self) -> None:
        """Makes all later control states newer than those sent before."""
        self._part.control_seq += 1

    def on_report(self, report: DispatchReport, now: str) -> bool:
        """Accepts a generation's report; False if it was seen before, or its generation is over."""
        generation = next((g for g in self.live if g.number == report.generation), None)
        if generation is None or report.seq <= generation.seq:
            return False
        generation.seq = report.seq
        generation.state = report.state
        generation.inflight_train = report.inflight_train
        generation.inflight_eval = report.inflight_eval
        generation.reserved = report.reserved
        generation.oldest = report.oldest
        generation.outstanding = report.outstanding
        generation.waiting_for = report.waiting_for
        generation.heard_at = now
        generation.lease = report.lease
        if report.groups:
            self._part.deaths = 0
        self._drop_admitted()
        return True

    def _drop_admitted(self) -> None:
        """Drops requeued groups that the newest generation has admitted."""
        part = self._part
        admitted = part.generations[-1].lease.put_backs - part.requeued_before
        if admitted > 0:
            del part.requeued[:admitted]
            part.requeued_before += admitted

    def on_death(self, generation: GenerationState) -> list[str] | None:
        """Requeues, under the same ids, what a lost generation had in flight; returns it, or None
        if the generation has closed in the meantime.

        What it admitted after its last report lies beyond the lease of that report, with which the
        next generation continues.
        """
        if generation.state == "closed":
            return None
        generation.state = "closed"
        self._part.deaths += 1
        self._part.requeued.extend(generation.outstanding)
        self._wake()
        return generation.outstanding

    def forgive(self) -> None:
        """A pause resets the count of lost generations."""
        self._part.deaths = 0

    # -- groups that are rolled out again ---------------------------------------------------

    def requeue(self, group: str) -> None:
        """Requeues the group's example, under a new id."""
        self._part.requeued.append(next_attempt(group))
        self._wake()

    def requeue_refused(self) -> None:
        """Requeues groups with tokens of refused weights."""
        for group in self._sink.discard(self._state.servers.rejected_labels):
            self.requeue(group.group)

    def requeue_stale(self, step: int) -> None:
        """Requeues groups that are too old for batch `step`."""
        for group in self._sink.sweep(step):
            self._part.stale_in_queue += 1
            self._count_cancelled(group.env, "stale")
            self.requeue(group.group)

    def on_cancelled(self, group: GroupResult) -> None:
        """A group was cancelled in flight; unless the run ends, its example is rolled out again."""
        part = self._part
        if group.cancelled == "stop":
            self.given_up.append(group.group)
            return
        surplus = self._train_over and group.cancelled == "pause"
        self._count_cancelled(group.env, "surplus" if surplus else group.cancelled)
        part.stale_in_flight += group.cancelled == "stale"
        part.overload += group.cancelled == "overload"
        if group.kind == "eval" or group.cancelled == "pause":
            # Its completed rollouts are kept: only the rest is rolled out after the pause.
            part.requeued.append(group.group)
        else:
            self.requeue(group.group)

    def _count_cancelled(self, env: str, kind: str) -> None:
        counts, name = self._part.cancelled, f"{env}/{kind}"
        counts[name] = counts.get(name, 0) + 1

    def stale_in_flight(self, next_version: int) -> bool:
        """Whether some generation still rolls out what is too old once `next_version` is due."""
        freshest = next_version - self._config.train.max_off_policy_steps
        return any(g.oldest is not None and g.oldest < freshest for g in self.live)

    def metrics(self) -> dict[str, float]:
        """Groups cancelled since the last call, which resets their counts."""
        part = self._part
        counts = {
            "off_policy/dropped/in_flight": float(part.stale_in_flight),
            "off_policy/dropped/in_queue": float(part.stale_in_queue),
            "dispatcher/cancelled/overload": float(part.overload),
            **{f"cancelled/{name}": float(count) for name, count in part.cancelled.items()},
        }
        part.cancelled = {}
        part.stale_in_flight = part.stale_in_queue = part.overload = 0
        return counts

    # -- what generations receive -----------------------------------------------------------

    @property
    def _train_over(self) -> bool:
        steps = self._state.steps
        all_shipped = steps.step + len(steps.shipped) >= self._config.last_step
        return self.ends_train and all_shipped

    def _train_limit(self, version: int) -> int:
        """Counter below which train groups may be admitted; 0 while they stand back for evals, and
        once no batch is left to fill.
        """
        part, state = self._part, self._state
        if self._train_over or (state.evals.open and not self._config.eval.overlap):
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

    def control(self, generation: int) -> Control:
        """The current control state for a generation."""
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
            # A pause that has begun is completed: resume opens the next generation.
            pause=requests.pause or ("drain" if status == "pausing" or state.outages.holds else ""),
            engines=self._fleet.engines(),
            envs=self._fleet.envs(),
            evals=[progress.epoch for progress in state.evals.open],
            put_backs=list(part.requeued),
            put_backs_before=part.requeued_before,
            draws=dict(self._curriculum.state.draws),
            baselines=dict(state.arrivals.baselines),
            revision=state.live.revision,
            train_over=self._train_over,
            missing=self._missing,
            heard=max((g.seq for g in self.live if g.number == generation), default=-1),
        )

    @property
    def _missing(self) -> int:
        """Rollouts that fill the batch which is not full yet; 0 if each group may change what is
        rolled out next.
        """
        rollouts = self._config.train.batch_size
        if rollouts is None or self._curriculum.decides:
            return 0
        return rollouts - self._sink.collected % rollouts
