"""A whole run in one thread: the workflows' pure parts, wired as the workflows wire them.

`World` stands for TrainingRun and drives what decides for it; dispatching.py has the generations.
Activities, time and signals are whatever the test makes happen. Every broken promise is an
AssertionError.
"""

from dataclasses import replace
from typing import Any, Literal, cast

from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import FilterTally, GroupResult, GroupWork
from ratchet.configs.live import changed
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import DispatchReport, RunInput
from ratchet.workflows.protocol.state import (
    Lifecycle,
    PermitsState,
    RunState,
    ServersState,
    ShippedBatch,
)
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.fleet import Fleet, hosts_of
from ratchet.workflows.rules.leases import Leases
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.rules.pushes import Push, Pushes
from ratchet.workflows.rules.shipping import Shipping
from ratchet.workflows.rules.sinks import Arrivals, TrainSink
from ratchet.workflows.rules.sources import train_counter
from ratchet.workflows.run.context import Context
from ratchet.workflows.run.deliveries import Deliveries
from ratchet.workflows.run.evals import Evals
from ratchet.workflows.run.news import News
from ratchet.workflows.run.outages import Outages
from tests.unit.workflows.dispatching import Generation, Running


class Log:
    """Where a run's notes and side work go: nowhere."""

    def note(self, text: str) -> None:
        """Forgets it."""

    def warn(self, text: str) -> None:
        """Forgets it, too."""

    def in_background(self, work: Any) -> None:
        """Side work is not carried out."""
        work.close()


class Booked(Arrivals):
    """Where train groups arrive; the world keeps score of those that came to nothing."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.config, world.state.arrivals, world.sink, world.curriculum)
        self._world = world

    def on_group(self, group: GroupResult) -> None:
        """A group arrives."""
        before = self._world.state.train.empty_groups
        super().on_group(group)
        if self._world.state.train.empty_groups > before:
            self._world.spend(group, "empty")


class World:
    """TrainingRun, and what it keeps score of. `mail` holds reports under way to it."""

    def __init__(
        self, config: RunConfig, examples: dict[str, int], *, overlaps: bool = True
    ) -> None:
        self.config, self.may_stop = config, False
        hosts = [
            replace(h, up=True, verified=0, epoch=1, address=f"{h.name}@1")
            for h in hosts_of(config)
        ]
        self.state = state = RunState(
            Lifecycle("running", examples=examples),
            permits=PermitsState(limits_of(config)),
            servers=ServersState(hosts, weights=_ref("weights/0.0"), target_version=0),
        )
        state.steps.version = 0
        self.overrides: dict[str, Any] = {}
        self.plain = config.model_dump(mode="json")
        arg = RunInput("run", self.plain, examples=examples)
        log = cast(Any, Log())
        news = News()
        context = Context(arg, config, state, Fleet(hosts), log, news, Outages(state, log, news))
        self.sink = TrainSink(config, state.train)
        self.curriculum = Curriculum(config, examples, state.curriculum)
        self.leases = Leases(config, state, context.fleet, self.sink, self.curriculum, news.wake)
        self.leases.ends_train = True
        self.pushes = Pushes(state.servers, context.fleet, news.wake)
        self.shipping = Shipping(config, state, self.sink, self.leases, self.pushes)
        self.shipping.overlaps = overlaps
        # The batch that trains, or has trained, while the weights of the one before are pushed.
        self.ahead = 0
        self.fleet = context.fleet
        self.arrivals = Booked(self)
        self.evals = Evals(context)
        self.deliveries = Deliveries(
            self.fleet,
            self.leases,
            self.arrivals,
            self.evals,
            lose=self.fleet.mark_down,
            fail=lambda failure: None,
        )
        self.live: list[Generation] = []
        self.dead: list[Generation] = []
        self.missed: set[int] = set()
        self.mail: list[DispatchReport] = []
        self.now = 1000.0
        self.sent: list[DispatchReport] = []
        # The bits that the trainer stands at; of each engine what it holds, what is on its way, and
        # by which version and label it samples; labels that nobody verified.
        self.newest, self.bits = state.servers.weights, 0
        engines = [host.index for host in context.fleet.of("engine")]
        self.holds = dict.fromkeys(engines, self.newest)
        self.under_way: dict[int, Push] = {}
        self.samples = dict.fromkeys(engines, (0, "0.0a"))
        self.refused: set[str] = set()
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
    def pushing(self) -> bool:
        """Whether the policy version is about to rise."""
        return self.state.servers.target_version > self.state.steps.version

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
        return self.leases.may_open

    def open(self) -> None:
        """Leases what was not admitted to the next generation."""
        state = self.leases.open("now")
        control = self.leases.control(state.number)
        self.live.append(Generation(self, state.number, state.lease, control))
        self.leases.on_started(state)

    def inform(self) -> None:
        """Sends the control state to every generation, unless the version is about to rise."""
        if not self.leases.may_inform:
            return
        self.leases.requeue_refused()
        self.leases.renumber()
        for generation in self.live:
            generation.send(self.leases.control(generation.number), self.permits)

    def receive(self) -> None:
        """The next report arrives, or one that arrived before does once more."""
        report = self.mail.pop(0)
        repeated, late = report in self.sent, report.generation in self.missed
        assert self.leases.on_report(report, "now") != (repeated or late), "a report counts once"
        if repeated or late:
            return
        self.sent.append(report)
        for group in report.groups:
            assert group.group not in self.delivered, "a group was delivered twice"
            if group.cancelled == "pause":
                # It is rolled out again after the pause, under the same id.
                del self.begun_by[group.group]
            else:
                self.delivered.add(group.group)
        self.deliveries.take(report)
        if report.state == "closed":
            self.live = [g for g in self.live if g.number != report.generation]

    def repeat(self, back: int) -> None:
        """A report of before is under way once more."""
        if self.sent:
            self.mail.insert(back % (len(self.mail) + 1), self.sent[-1 - back % len(self.sent)])

    def revive(self) -> None:
        """Servers that were lost are up again."""
        for host in self.fleet.hosts:
            if not host.up:
                epoch = host.epoch + 1
                report = HostReport(host.role, host.index, epoch, "up", f"{host.name}@{epoch}")
                assert self.fleet.on_report(report)

    def pause(self, mode: Literal["drain", "cancel"]) -> None:
        """Somebody asks for a pause, which is carried through whatever they ask for next."""
        if self.state.lifecycle.status == "running":
            self.state.requests.pause, self.state.lifecycle.status = mode, "pausing"

    def request_stop(self) -> None:
        """Somebody stops the run: no further batch ships."""
        self.state.requests.stop = "by the test"

    def resume(self) -> None:
        """Somebody asks for the run to go on."""
        self.state.requests.pause = ""

    def settle(self) -> None:
        """The pause was carried through, and may be over."""
        life = self.state.lifecycle
        if life.status in ("pausing", "paused") and not self.live:
            life.status = "paused" if self.state.requests.pause else "running"

    def spend(self, group: GroupResult, how: str) -> None:
        """A train group has met its end."""
        counter, _ = train_counter(group.group)
        assert counter not in self.spent, f"{group.group} was {self.spent[counter]} before"
        self.spent[counter] = how

    def kill(self, generation: Generation, *, late: bool) -> None:
        """A generation ends without a word, which is noticed before what it has sent arrives, if
        that is `late`, and else after it.
        """
        self.live.remove(generation)
        self.dead.append(generation)
        while not late and any(report.generation == generation.number for report in self.mail):
            self.receive()
        self.missed.add(generation.number)
        state = next(g for g in self.state.dispatch.generations if g.number == generation.number)
        self.leases.on_death(state)

    def ship(self, *, empty: bool = False, damaged: int = 0) -> bool:
        """Cuts the next batch if it is due and full; `empty` ones have nothing to train on, and
        those with `damaged` groups cannot be written.
        """
        state, train = self.state, self.config.train
        step = self.shipping.next_batch
        if not self.shipping.may_ship():
            return False
        assert step <= self.config.max_steps and step - 1 - train.max_lag <= state.steps.version
        assert state.lifecycle.status == "running" and not state.requests.pause
        assert not state.requests.stop
        assert self.shipping.overlaps or not self.pushing
        unverified = {label for push in self.under_way.values() for label in push.labels}
        groups = self.arrivals.cut(self.shipping.undecided)
        for group in groups:
            assert step - 1 - group.version_start <= train.max_off_policy_steps, "a stale group"
            assert not set(group.labels) & self.refused, "refused weights"
            assert not set(group.labels) & unverified, "weights that may be refused"
        if damaged:
            self.shipping.on_damaged(groups[:damaged], self.sink.take_filters())
            return False
        for group in groups:
            self.spend(group, "shipped")
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
            state.steps.shipped.append(ShippedBatch(step, _ref(f"batch/{step}"), {}, None, 0.0))
        return True

    def push(self) -> None:
        """The next batch was trained: its weights are offered to the engines."""
        steps = self.state.steps
        assert steps.shipped[0].step == steps.step + 1
        steps.next_version = steps.step + 1
        self.ahead = 0
        self.offer(steps.step + 1)

    def train_ahead(self) -> None:
        """The batch after the one whose weights are being pushed begins to train, if it may."""
        steps, requests = self.state.steps, self.state.requests
        if self.pushing and not self.ahead and self.shipping.may_train_ahead():
            assert self.config.train.max_lag > 0, "it was cut for a version that is not there"
            assert not (requests.pause or requests.stop)
            self.ahead = steps.shipped[1].step
            assert self.ahead == steps.step + 2

    def offer(self, version: int) -> None:
        """The trainer stands at the bits of `version`, which are others each time."""
        self.bits += 1
        self.newest = _ref(f"weights/{version}.{self.bits}")
        self.pushes.offer(version, self.newest)

    def start_pushes(self) -> None:
        """Weights leave for every engine that lacks them."""
        for host in self.fleet.of("engine"):
            if host.index not in self.under_way and self.pushes.is_due(host):
                push = self.under_way[host.index] = self.pushes.start(host)
                self.samples[host.index] = push.version, push.labels[0]

    def gate(self, index: int, verdict: Literal["passed", "second try", "refused", "lost"]) -> None:
        """A push to an engine ends; one to an engine that is gone passes no gate."""
        push, host = self.under_way[index], self.fleet.host("engine", index)
        there = host.up and host.epoch == push.engine.epoch
        if there and verdict in ("passed", "second try"):
            rejected = push.labels[:1] if verdict == "second try" else []
            if rejected:
                self.samples[index] = push.version, push.labels[1]
            self.refused.update(rejected)
            self.pushes.on_verified(host, push, rejected)
            self.holds[index] = push.weights
        else:
            self.refused.update(push.labels)
            self.pushes.on_failed(host, push, "gone", refused=verdict == "refused")
        del self.under_way[index]
        self.pushes.end(push)

    def rise(self) -> None:
        """The version rises, once every engine that is up is verified at it."""
        steps, target = self.state.steps, self.state.servers.target_version
        if self.pushing and self.fleet.synced(target):
            steps.shipped.pop(0)
            steps.step = steps.version = target
            self.pushes.forget_labels(target)
            self.fire(target)

    def check(self) -> None:
        """An engine that is verified holds what the trainer stands at, or an older version."""
        for host in self.fleet.of("engine"):
            if host.up and host.verified == self.state.servers.target_version:
                assert self.holds[host.index] == self.newest, "an engine holds other bits"
        serving = [push for push in self.under_way.values() if push.serving]
        assert self.pushes.in_flight == len(self.under_way)
        assert self.pushes.to_serving == len(serving)

    # -- what activities do -----------------------------------------------------------------

    def commit(self, running: Running) -> None:
        """Rollouts of the part are in the store; a later attempt at the group adopts them. They
        were sampled from whatever the engines had from their start on.
        """
        name, label = running.group, self.samples[running.attempt.engine.index][1]
        version, labels = self.committed.get(name, (running.version, set()))
        self.committed[name] = min(version, running.version), labels | {running.label, label}

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
