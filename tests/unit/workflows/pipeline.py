"""A whole run in one thread: the workflows' pure parts, wired as the workflows wire them.

`World` stands for TrainingRun and uses its Generations, Evals and Arrivals themselves
wherever they wait for nothing; dispatching.py has the generations. Activities, time and signals
are whatever the test makes happen. Every broken promise is an AssertionError.
"""

from dataclasses import replace
from typing import Any, Literal, cast

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult, GroupWork
from ratchet.configs.live import changed
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import DispatchReport, RunInput
from ratchet.workflows.protocol.state import (
    GenerationState,
    Lease,
    Lifecycle,
    PermitsState,
    RunState,
    ServersState,
    ShippedBatch,
)
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.fleet import Fleet, hosts_of
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.rules.sinks import Arrivals, TrainSink
from ratchet.workflows.rules.sources import train_counter
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.evals import Evals
from ratchet.workflows.run.generations import Generations
from ratchet.workflows.run.news import News
from ratchet.workflows.run.outages import Outages
from tests.unit.workflows.dispatching import Generation, Running


class Log:
    """Where a run's notes and side work go: nowhere."""

    def note(self, text: str) -> None:
        """Forgets it."""

    def in_background(self, work: Any) -> None:
        """Side work is not carried out."""
        work.close()


class World:
    """TrainingRun, and what it keeps score of. `mail` holds reports under way to it."""

    def __init__(self, config: RunConfig, examples: dict[str, int]) -> None:
        self.config = config
        hosts = [
            replace(h, up=True, verified=0, epoch=1, address=f"{h.name}@1")
            for h in hosts_of(config)
        ]
        self.state = state = RunState(
            Lifecycle("running", examples=examples),
            permits=PermitsState(limits_of(config)),
            servers=ServersState(hosts),
        )
        state.steps.version = 0
        self.overrides: dict[str, Any] = {}
        self.plain = config.model_dump(mode="json")
        arg = RunInput("run", self.plain, examples=examples)
        none, log = cast(Any, None), cast(Any, Log())
        news = News()
        context = Context(arg, config, state, Fleet(hosts), log, news, Outages(state, log, news))
        self.sink = TrainSink(config, state.train)
        self.curriculum = Curriculum(config, examples, state.curriculum)
        self.generations = Generations(context, self.sink, none, self.curriculum)
        self.arrivals = Arrivals(config, state.arrivals, self.sink, self.curriculum)
        self.evals = Evals(context)
        self.live: list[Generation] = []
        self.dead: list[Generation] = []
        self.mail: list[DispatchReport] = []
        self.now = 1000.0
        self.pushes = 0
        self.pushing = False
        self.sampled_at = 0
        self.opened_evals: set[str] = set()
        # What the books are kept on: lowest version and labels of committed rollouts by group, who
        # began a group, what was delivered, what became of a counter, and its example.
        self.committed: dict[str, tuple[int, set[str]]] = {}
        self.begun_by: dict[str, Generation] = {}
        self.delivered: set[str] = set()
        self.spent: dict[int, str] = {}
        self.example_of: dict[int, tuple[str, int]] = {}
        self.fire(0)

    # -- what the workflow does -------------------------------------------------------------

    @property
    def label(self) -> str:
        """What engines stamp on the tokens that they sample now."""
        return f"{self.sampled_at}.{self.pushes}"

    @property
    def permits(self) -> int:
        """Rollouts that may execute at once."""
        return self.state.permits.limits.permits

    def fire(self, step: int) -> None:
        """Opens the evals that are due."""
        self.evals.fire(step)
        self.opened_evals |= {progress.epoch.epoch for progress in self.state.evals.open}

    def trigger(self) -> None:
        """Somebody asks for an eval of every env."""
        self.evals.on_trigger([])
        self.opened_evals |= {progress.epoch.epoch for progress in self.state.evals.open}

    def change(self, dispatch: dict[str, Any]) -> None:
        """A live change of the config."""
        permits = self.state.permits
        self.overrides, config = changed(self.plain, self.overrides, {"dispatch": dispatch})
        permits.limits = limits_of(config, permits.limits)

    @property
    def waiting(self) -> list[str]:
        """Requeued groups that no generation has begun, as far as the run was told."""
        state = self.state.dispatch
        begun = state.generations[-1].lease.ahead
        places = enumerate(state.requeued, start=state.requeued_before)
        return [group for place, group in places if place not in begun]

    @property
    def may_open(self) -> bool:
        """Whether the next generation is due."""
        state = self.state
        running = state.lifecycle.status == "running" and not state.requests.pause
        return running and not any(g.state == "open" for g in state.dispatch.generations)

    def open(self) -> None:
        """Leases what was not admitted to the next generation."""
        state = self.state.dispatch
        lease = state.generations[-1].lease if state.generations else Lease()
        number = state.next_generation
        state.next_generation += 1
        state.generations = self.generations.live
        state.generations.append(GenerationState(number, lease))
        state.control_seq += 1
        self.live.append(Generation(self, number, lease, self.generations._control(number)))
        state.generations[-1].started = True

    def inform(self) -> None:
        """Sends the control state to every generation."""
        self.generations.requeue_refused()
        self.state.dispatch.control_seq += 1
        for generation in self.live:
            generation.send(self.generations._control(generation.number), self.permits)

    def receive(self) -> None:
        """The next report arrives."""
        report, state = self.mail.pop(0), self.state.dispatch
        generation = next(g for g in state.generations if g.number == report.generation)
        assert report.seq > generation.seq and generation.state != "closed"
        generation.seq, generation.state = report.seq, report.state
        generation.inflight_train = report.inflight_train
        generation.inflight_eval = report.inflight_eval
        generation.reserved = report.reserved
        generation.oldest, generation.outstanding = report.oldest, report.outstanding
        generation.lease = report.lease
        if report.groups:
            state.deaths = 0
        self.generations._drop_admitted()
        for group in report.groups:
            assert group.group not in self.delivered, "a group was delivered twice"
            if group.cancelled == "pause":
                # It is rolled out again after the pause, under the same id.
                del self.begun_by[group.group]
            else:
                self.delivered.add(group.group)
            if group.cancelled:
                self.generations.on_cancelled(group)
            elif group.kind == "eval":
                self.evals.on_group(group)
            else:
                self._on_train(group)
        self.generations.requeue_refused()
        if report.state == "closed":
            self.live = [g for g in self.live if g.number != report.generation]
        for lost in report.lost:
            host = next(
                h for h in self.state.servers.hosts if (h.role, h.index) == (lost.role, lost.index)
            )
            host.up &= host.epoch != lost.epoch

    def revive(self) -> None:
        """Servers that were lost are up again."""
        for host in self.state.servers.hosts:
            if not host.up:
                host.epoch, host.up = host.epoch + 1, True
                host.address = f"{host.name}@{host.epoch}"

    def pause(self, mode: Literal["drain", "cancel"]) -> None:
        """Somebody asks for a pause, which is carried through whatever they ask for next."""
        if self.state.lifecycle.status == "running":
            self.state.requests.pause, self.state.lifecycle.status = mode, "pausing"

    def resume(self) -> None:
        """Somebody asks for the run to go on."""
        self.state.requests.pause = ""

    def settle(self) -> None:
        """The pause was carried through, and may be over."""
        life = self.state.lifecycle
        if life.status in ("pausing", "paused") and not self.live:
            life.status = "paused" if self.state.requests.pause else "running"

    def _on_train(self, group: GroupResult) -> None:
        before = self.state.train.empty_groups
        self.arrivals.on_group(group)
        if self.state.train.empty_groups > before:
            self._spend(group, "empty")

    def _spend(self, group: GroupResult, how: str) -> None:
        counter, _ = train_counter(group.group)
        assert counter not in self.spent, f"{group.group} was {self.spent[counter]} before"
        self.spent[counter] = how

    def kill(self, generation: Generation) -> None:
        """A generation ends without a word; what it has sent still arrives, then it is missed."""
        self.live.remove(generation)
        self.dead.append(generation)
        while any(report.generation == generation.number for report in self.mail):
            self.receive()
        state = next(g for g in self.state.dispatch.generations if g.number == generation.number)
        self.generations._on_death(state)

    def ship(self, *, empty: bool = False) -> bool:
        """Cuts the next batch if it is due and full; `empty` ones have nothing to train on."""
        state, train = self.state, self.config.train
        steps = state.steps
        step = steps.step + len(steps.shipped) + 1
        due = steps.version >= step - 1 - train.max_lag and step <= self.config.max_steps
        if self.pushing or not due:
            return False
        self.generations.requeue_refused()
        self.generations.requeue_stale(step)
        if not self.sink.full:
            return False
        groups = self.arrivals.cut()
        for group in groups:
            assert step - 1 - group.version_start <= train.max_off_policy_steps, "a stale group"
            assert not set(group.labels) & set(state.servers.rejected_labels), "refused weights"
            self._spend(group, "shipped")
        self.arrivals.on_written()
        if train.token_batch_size:
            assert sum(group.tokens for group in groups) >= train.token_batch_size
        else:
            rollouts = [g.trainable if train.backfill else g.survivors for g in groups]
            assert sum(rollouts) >= cast(int, train.batch_size)
        if empty:
            self.sink.on_empty(FilterTally())
        else:
            self.sink.on_shipped()
            steps.shipped.append(ShippedBatch(step, _ref(f"batch/{step}"), {}, None, 0.0))
        return True

    def push(self) -> None:
        """The next batch was trained: its weights go to the engines."""
        steps = self.state.steps
        assert steps.shipped[0].step == steps.step + 1
        steps.next_version = self.state.servers.target_version = steps.step + 1
        self.pushing, self.pushes, self.sampled_at = True, self.pushes + 1, steps.step + 1

    def refuse(self) -> None:
        """What was pushed is refused, and is pushed again."""
        self.state.servers.rejected_labels.append(self.label)
        self.pushes += 1

    def verify(self) -> None:
        """The engines are verified at the next version."""
        steps = self.state.steps
        steps.shipped.pop(0)
        steps.step = steps.version = steps.step + 1
        self.pushing = False
        for host in self.state.servers.hosts:
            host.verified = steps.version
        self.fire(steps.step)

    # -- what activities do -----------------------------------------------------------------

    def commit(self, running: Running) -> None:
        """Rollouts of the part are in the store; a later attempt at the group adopts them. They
        were sampled from whatever the engines had from their start on.
        """
        name = running.group
        version, labels = self.committed.get(name, (running.version, set()))
        self.committed[name] = min(version, running.version), labels | {running.label, self.label}

    def result(
        self, work: GroupWork, survivors: int, trainable: int, ref: ArtifactRef | None
    ) -> GroupResult:
        """A group's result; each trainable rollout has three tokens."""
        version, labels = self.committed.get(work.group, (0, set()))
        return GroupResult(
            group=work.group,
            kind=work.kind,
            env=work.env,
            ref=ref,
            size=work.size,
            survivors=survivors,
            errored=work.size - survivors,
            reward_mean=survivors / work.size,
            samples=trainable,
            tokens=3 * trainable,
            version_start=version,
            labels=sorted(labels),
            trainable=trainable,
        )

    def finalized(self, work: GroupWork, survivors: int, trainable: int) -> GroupResult:
        """What finalizing the group gives, with at most so many of its rollouts."""
        survivors = min(survivors, work.size)
        ref = _ref(work.group) if survivors else None
        return self.result(work, survivors, min(trainable, survivors), ref)

    # -- what must hold when rollouts start -------------------------------------------------

    @property
    def executing(self) -> int:
        """Rollouts that hold a permit."""
        return sum(f.executing for g in self.live for f in g.scheduler.flights.values())

    def on_begun(self, generation: Generation, work: GroupWork) -> None:
        """A group is begun by one generation, and by another only if the first is dead."""
        before = self.begun_by.get(work.group)
        assert before is None or before in self.dead, f"{work.group} was begun twice"
        assert generation.scheduler.admitting, f"{work.group} was begun by a tail"
        self.begun_by[work.group] = generation
        if work.kind == "train":
            counter, _ = train_counter(work.group)
            served = (work.env, work.example)
            assert counter not in self.spent, f"{work.group} was {self.spent.get(counter)}"
            assert self.example_of.setdefault(counter, served) == served, "another example"

    def on_started(self) -> None:
        """Permits hold over all generations."""
        granted = max(g.granted for g in self.live)
        assert self.executing <= granted, f"{self.executing} execute, {granted} are permitted"


def _ref(key: str) -> ArtifactRef:
    return ArtifactRef(key, key.rjust(64, "0"), 1, key)
