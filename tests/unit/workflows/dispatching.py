"""One dispatch generation without Temporal: the scheduler, wired as Dispatch wires it.

Activities, time and signals are whatever the test makes happen; see pipeline.py for the run.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ratchet.activities.contracts.rollouts import GroupResult, GroupWork
from ratchet.workflows.protocol.messages import Control, DispatchReport
from ratchet.workflows.protocol.state import Lease
from ratchet.workflows.rules.scheduler import Part, Scheduler

if TYPE_CHECKING:
    from tests.unit.workflows.pipeline import World

Cause = Literal["stale", "overload", "stop"]


@dataclass
class Running:
    """A part that an activity carries out; `told` of its rollouts were reported as ended."""

    part: Part
    version: int
    label: str
    told: int = 0

    @property
    def size(self) -> int:
        """Rollouts of the part."""
        return self.part.last - self.part.first


@dataclass
class Group:
    """A group in flight, as Dispatch keeps it."""

    work: GroupWork
    version: int
    parts: dict[int, Running] = field(default_factory=dict)
    cancelled: Cause | Literal[""] = ""
    finalizing: bool = False


class Generation:
    """One Dispatch workflow. `inbox` holds controls under way to it, each with the permits of the
    whole run when it was sent; `granted` is the last of them to arrive.
    """

    def __init__(self, world: "World", number: int, lease: Lease, control: Control) -> None:
        self.granted = world.permits
        self.world = world
        self.number = number
        self.scheduler = Scheduler(world.config, world.state.examples, lease)
        self.scheduler.on_control(control)
        self.groups: dict[str, Group] = {}
        self.outbox: list[GroupResult] = []
        self.inbox: list[tuple[Control, int]] = []
        self.over = False
        self._seq = 0

    @property
    def running(self) -> list[Running]:
        """Parts that activities carry out."""
        return [p for g in self.groups.values() if not g.finalizing for p in g.parts.values()]

    @property
    def finalizing(self) -> list[str]:
        """Groups whose rollouts have all ended."""
        return [name for name, group in self.groups.items() if group.finalizing]

    def hear(self) -> None:
        """The next control arrives."""
        control, self.granted = self.inbox.pop(0)
        self.scheduler.on_control(control)

    def turn(self, *, hand_over: bool = False, sign_of_life: bool = False) -> None:
        """One turn of Dispatch's loop."""
        scheduler = self.scheduler
        if scheduler.admitting and (hand_over or scheduler.control.stop):
            scheduler.close()
            self._report("tail")
        if scheduler.control.stop:
            self._give_up(list(self.groups), "stop")
        self._give_up(scheduler.stale(), "stale")
        self._give_up(scheduler.overload(), "overload")
        self._check_ages()
        while True:
            evals_wait = self._evals_wait()
            if not isinstance(part := scheduler.admit(self.world.now), Part):
                break
            assert not (evals_wait and part.work.kind == "train"), "an eval was passed by"
            self._start(part)
        if self.outbox or sign_of_life:
            self._report("open" if scheduler.admitting else "tail")
        if not scheduler.admitting and not self.groups and not self.outbox:
            self._report("closed")
            self.over = True

    def release(self, running: Running, *, told: bool) -> None:
        """A rollout ends while others of its part go on; `told` is whether the signal arrives."""
        self.world.commit(running)
        if told and running.told < running.size:
            running.told += 1
            name = f"{running.part.work.group}/{running.part.first}"
            assert self.scheduler.on_released({name: running.told})
            assert not self.scheduler.on_released({name: running.told})

    def end(self, running: Running) -> None:
        """A part's activity ends, cancelled or not."""
        self.world.commit(running)
        name, first = running.part.work.group, running.part.first
        group = self.groups[name]
        complete = self.scheduler.on_ended(name, first)
        if len(group.parts) > 1 or not (complete or group.cancelled):
            del group.parts[first]
        elif group.cancelled:
            self._deliver(group, self._cancelled(group))
        else:
            group.finalizing = True

    def finalize(self, name: str, survivors: int, trainable: int) -> None:
        """The finalized group is delivered, unless it was given up meanwhile."""
        group = self.groups[name]
        if group.cancelled:
            self._deliver(group, self._cancelled(group))
        else:
            self._deliver(group, self.world.finalized(group.work, survivors, trainable))

    def _evals_wait(self) -> bool:
        """Whether this generation has eval work that it could start."""
        scheduler = self.scheduler
        if scheduler.admitting and (scheduler.next_put_back("eval") or scheduler.next_eval()):
            return True
        begun = (f for f in scheduler.flights.values() if f.work.kind == "eval")
        return any(f.begun < f.work.size and not f.given_up for f in begun)

    def _check_ages(self) -> None:
        """Nothing goes on in flight that is too old for the batch after the next version."""
        train = self.world.config.train
        freshest = self.scheduler.control.next_version - train.max_off_policy_steps
        for group in self.groups.values():
            kept = group.work.kind == "train" and not group.cancelled
            assert not kept or group.version >= freshest, f"{group.work.group} is stale"

    def _start(self, part: Part) -> None:
        name, version = part.work.group, self.scheduler.control.version
        if part.first == 0:
            self.world.on_begun(self, part.work)
            self.groups[name] = Group(part.work, version)
        world, group = self.world, self.groups[name]
        assert not group.cancelled, f"{name} was given up"
        group.parts[part.first] = Running(part, world.sampled_at, world.label)
        world.on_started()

    def _give_up(self, names: list[str], why: Cause) -> None:
        for name in names:
            group = self.groups[name]
            group.cancelled = group.cancelled or why
            self.scheduler.give_up(name)
            if not group.parts:
                self._deliver(group, self._cancelled(group))

    def _deliver(self, group: Group, result: GroupResult) -> None:
        self.scheduler.on_finished(group.work.group)
        del self.groups[group.work.group]
        self.outbox.append(result)

    def _cancelled(self, group: Group) -> GroupResult:
        result = self.world.result(group.work, 0, 0, ref=None)
        return replace(result, version_start=group.version, cancelled=group.cancelled)

    def _report(self, state: Literal["open", "tail", "closed"]) -> None:
        groups, self.outbox = self.outbox[:2], self.outbox[2:]
        scheduler = self.scheduler
        self._seq += 1
        report = DispatchReport(
            generation=self.number,
            seq=self._seq,
            state=state,
            groups=groups,
            inflight_train=scheduler.inflight_train,
            inflight_eval=scheduler.inflight_eval,
            reserved=scheduler.reserved,
            lease=scheduler.cursor(),
            oldest=scheduler.oldest,
            outstanding=list(self.groups) + [group.group for group in self.outbox],
        )
        self.world.mail.append(report)
