"""Whatever happens to a run, every group counts once, permits hold, and the run can be finished."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ratchet.activities.contracts import names
from ratchet.activities.storage.retention import settled_below
from ratchet.configs.load import validate
from ratchet.configs.run import RunConfig
from ratchet.workflows.rules.restore import kept
from ratchet.workflows.rules.sources import train_counter
from ratchet.workflows.run.generations import MAX_DEATHS
from tests.unit.workflows.dispatching import Generation, Running
from tests.unit.workflows.pipeline import World

EXAMPLES = {"train/a": 7, "train/b": 5, "eval/a": 2, "eval/b": 2}
MAX_STEPS = 8
ROUNDS_PER_STEP = 40
"""Far more than a step takes: what is not done by then is never done."""

T = TypeVar("T")

seeds = st.integers(0, 2**16)

options = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 2),
        "slack": st.integers(0, 1),
        "pooled": st.booleans(),
        "tokens": st.booleans(),
        "backfill": st.booleans(),
        "overlap": st.sampled_from([True, True, False]),
        "permits": st.sampled_from([4, 6, 9, 16]),
        "part": st.sampled_from([None, 1, 1]),
        "rate": st.sampled_from([None, None, 60]),
        "burst": st.sampled_from([None, None, 4, "auto"]),
        "stopped": st.sampled_from([False, False, True]),
        "workers": st.sampled_from([1, 2, 3]),
        "older": st.sampled_from([False, False, True]),
    }
)


def config(of: dict[str, Any]) -> RunConfig:
    """Two envs of unlike ratio and group size, under every kind of batch and dispatch."""
    pool = {"sampler": {"type": "difficulty_pool"}} if of["pooled"] else {}
    return validate(
        {
            "max_steps": MAX_STEPS,
            "inference": {"engines": 2},
            "train": {
                "env": [
                    {"id": "a", "ratio": 2, "group_size": 2, "workers": of["workers"]},
                    {"id": "b", "group_size": 4, "curriculum": pool},
                ],
                "max_lag": of["lag"],
                "max_off_policy_steps": of["lag"] + of["slack"],
                "backfill": of["backfill"],
                **({"token_batch_size": 24} if of["tokens"] else {"batch_size": 8}),
            },
            "eval": {
                "env": [{"id": "a"}, {"id": "b", "group_size": 3}],
                "interval": 2,
                "num_examples": 2,
                "group_size": 2,
                "overlap": of["overlap"],
            },
            "dispatch": {
                "max_inflight_rollouts": of["permits"],
                "rollouts_per_activity": of["part"],
                "tasks_per_minute": of["rate"],
                "burst": of["burst"],
            },
        }
    )


def round_trip(world: World, *, stragglers: int = 0, survivors: int = 4) -> None:
    """Everything that is under way arrives and ends, and whatever may go on does; the oldest
    groups of each generation straggle, and no more than `survivors` of a group survive.
    """
    while world.mail:
        world.receive()
    for _ in range(2):
        for index in list(world.under_way):
            world.gate(index, "passed")
        world.revive()
        world.start_pushes()
    world.settle()
    if world.may_open:
        world.open()
    world.inform()
    for generation in world.live:
        while generation.inbox:
            generation.hear()
        while generation.turn():
            pass
        late = generation.groups[:stragglers]
        for work in generation.works[:]:
            # What lacks its server waits until the run has heard of the loss.
            for _ in range(3):
                if work in generation.works and work.doing != "work" and not work.cancelled:
                    generation.go_on(work)
            if work in generation.works and work.group not in late:
                end_of(world, generation, work, survivors, 4)
    if world.pushing:
        world.rise()
    elif world.state.steps.shipped:
        world.push()
    while world.ship():
        pass
    world.now += 10


def there(world: World) -> list[Generation]:
    """Generations whose workflows run."""
    return [g for g in world.live if not g.over]


def young(begun: list[T], rng: Random) -> T:
    """One of them, a young one rather than an old one, so that some straggle."""
    return begun[int(len(begun) * rng.random() ** 0.25)]


def end_of(
    world: World, generation: Generation, work: Running, survivors: int, trainable: int
) -> None:
    """An activity ends, one that finalizes with no more than so many rollouts."""
    finalizes = work.part is None and not work.cancelled
    result = world.finalized(work.attempt.work, survivors, trainable) if finalizes else None
    generation.end(work, result)


def end(world: World, rng: Random, *, whole: bool, told: bool = True) -> None:
    """A part ends, or one of its rollouts while the others go on."""
    if parts := [(g, part) for g in there(world) for part in g.parts]:
        generation, part = young(parts, rng)
        if whole:
            generation.end(part)
        else:
            generation.release(part, told=told)


def finalize(world: World, rng: Random, *, well: bool) -> None:
    """A group is finalized; `well` if no rollout of it is lost."""
    if works := [(g, work) for g in there(world) for work in g.finalizing]:
        left = (4, 4) if well else (rng.randint(0, 4), rng.randint(0, 4))
        end_of(world, *young(works, rng), *left)


def fail(world: World, rng: Random, kind: str) -> None:
    """An activity fails, or several on the same engine."""
    if works := [(g, work) for g in there(world) for work in g.works]:
        generation, work = young(works, rng)
        engine = work.attempt.engine
        for other in generation.works[:]:
            if other is work or (other.attempt.engine == engine and rng.random() < 0.3):
                generation.fail(other, kind)


def go_on(world: World, rng: Random) -> None:
    """Rests end, and servers that were lost come back."""
    if rng.random() < 0.3:
        world.revive()
    for generation in there(world):
        for work in generation.works[:]:
            if not work.cancelled and rng.random() < 0.5:
                generation.go_on(work)


def hear(world: World, rng: Random) -> None:
    """Controls arrive at a generation."""
    if heard := [g for g in there(world) if g.inbox]:
        generation = rng.choice(heard)
        for _ in range(rng.randint(1, len(generation.inbox))):
            generation.hear()


def hear_again(world: World, rng: Random) -> None:
    """A control of before arrives once more."""
    if live := there(world):
        rng.choice(live).hear_again(rng.randint(0, 9))


def turn(world: World, rng: Random, *, hand_over: bool = False) -> None:
    """A generation acts on what it has heard."""
    if live := there(world):
        rng.choice(live).turn(hand_over=hand_over, sign_of_life=rng.random() < 0.1)


def pause(world: World, rng: Random) -> None:
    """Somebody asks for a pause, or for its end."""
    world.settle()
    if rng.random() < 0.5:
        world.resume()
    else:
        world.pause("drain" if rng.random() < 0.5 else "cancel")


def die(world: World, rng: Random) -> None:
    """A generation ends without a word."""
    if (live := there(world)) and world.state.dispatch.deaths < MAX_DEATHS - 1:
        world.kill(rng.choice(live), late=rng.random() < 0.5)


def deliver(world: World, rng: Random) -> None:
    """Reports arrive at the run."""
    for _ in range(rng.randint(0, len(world.mail))):
        world.receive()


def train(world: World, rng: Random) -> None:
    """The next batch is trained, or its version rises; now and then a trainer that was lost is
    replaced by one that makes other bits of the newest version.
    """
    if rng.random() < 0.25 and world.state.steps.step:
        world.offer(world.state.servers.target_version)
    elif world.pushing:
        world.train_ahead()
        world.rise()
    elif world.state.steps.shipped:
        world.push()


def gate(world: World, rng: Random) -> None:
    """Pushes begin, or one of them ends."""
    world.start_pushes()
    if world.under_way and rng.random() < 0.7:
        verdicts = ["passed"] * 4 + ["second try", "refused", "lost"]
        world.gate(rng.choice(list(world.under_way)), rng.choice(verdicts))


def lose(world: World, rng: Random) -> None:
    """An engine is gone, whatever is on its way to it, or servers come up."""
    if rng.random() < 0.5:
        host = rng.choice(world.fleet.of("engine"))
        world.fleet.mark_down("engine", host.index, host.epoch, "gone")
    else:
        world.revive()


def ship(world: World, rng: Random) -> None:
    """The next batch ships if it may, now and then with nothing to train on, and now and then
    groups of it are damaged.
    """
    damaged = rng.randint(1, 3) if rng.random() < 0.1 else 0
    world.ship(empty=rng.random() < 0.1 and world.state.train.empty_batches < 2, damaged=damaged)


def request_stop(world: World, rng: Random) -> None:
    """Somebody stops a run that may end so."""
    if world.may_stop:
        world.request_stop()


def ask(world: World, rng: Random) -> None:
    """People change limits and ask for evals."""
    tokens = world.config.train.token_batch_size is not None
    permits = rng.choice([5 if tokens else None, 4, 12, 20])
    if rng.random() < 0.5:
        world.trigger()
    else:
        world.change(
            {"max_inflight_rollouts": permits, "tasks_per_minute": rng.choice([None, 60, 600])}
        )


def squeeze(world: World, rng: Random) -> None:
    """The engines bear less, or more."""
    part, least = world.state.permits, world.config.largest_part
    permits, trim = rng.randint(least, 16), rng.random() < 0.5
    part.limits = replace(part.limits, permits=permits, trim=trim)


def wait(world: World, rng: Random) -> None:
    """Time passes (seconds)."""
    world.now += rng.uniform(0, 12)


def reopen(world: World, rng: Random) -> None:
    """The run leases the next generation, if one is due."""
    if world.may_open:
        world.open()


EVENTS: dict[str, tuple[int, Callable[[World, Random], None]]] = {
    "a part ends": (20, partial(end, whole=True)),
    "a rollout ends": (5, partial(end, whole=False)),
    "a rollout ends, untold": (1, partial(end, whole=False, told=False)),
    "a group is finalized": (14, partial(finalize, well=True)),
    "a group is finalized with losses": (4, partial(finalize, well=False)),
    "a turn": (16, turn),
    "a hand-over": (1, partial(turn, hand_over=True)),
    "a death": (1, die),
    "an engine is lost": (2, partial(fail, kind=names.ENGINE_LOST)),
    "an env server is lost": (1, partial(fail, kind=names.ENV_LOST)),
    "a group is damaged": (1, partial(fail, kind=names.CORRUPT)),
    "a group cannot be played": (1, partial(fail, kind="TaskError")),
    "the store is full": (1, partial(fail, kind=names.STORE_FAILED)),
    "rests end": (6, go_on),
    "controls are sent": (8, lambda world, rng: world.inform()),
    "controls arrive": (12, hear),
    "an old control arrives": (1, hear_again),
    "reports arrive": (14, deliver),
    "a generation opens": (5, reopen),
    "a batch ships": (12, ship),
    "training goes on": (8, train),
    "a push begins or ends": (12, gate),
    "an engine goes or comes": (3, lose),
    "a report arrives again": (2, lambda world, rng: world.repeat(rng.randint(0, 20))),
    "a person acts": (1, ask),
    "a stop is requested": (1, request_stop),
    "a pause begins or ends": (2, pause),
    "the engines bear less": (4, squeeze),
    "time passes": (6, wait),
}
"""What may happen, by name, and how often it does."""


class Pipeline(RuleBasedStateMachine):
    """A run to which anything may happen at any time."""

    world: World
    stopped: bool
    settled = 0

    @initialize(of=options)
    def begin(self, of: dict[str, Any]) -> None:
        self.stopped = of["stopped"]
        self.world = World(config(of), dict(EXAMPLES), overlaps=not of["older"])
        self.world.may_stop = self.stopped
        self.world.open()

    @rule(event=st.sampled_from(sorted(EVENTS)), seed=seeds)
    def happens(self, event: str, seed: int) -> None:
        EVENTS[event][1](self.world, Random(seed))

    @rule(seed=seeds, events=st.integers(20, 200))
    def much_happens(self, seed: int, events: int) -> None:
        rng = Random(seed)
        weights = [weight for weight, _ in EVENTS.values()]
        for event in rng.choices(list(EVENTS), weights, k=events):
            EVENTS[event][1](self.world, rng)

    @rule(
        rounds=st.integers(1, 20),
        stragglers=st.sampled_from([0, 0, 1, 2]),
        survivors=st.sampled_from([4, 4, 3, 1]),
    )
    def it_goes_on(self, rounds: int, stragglers: int, survivors: int) -> None:
        for _ in range(rounds):
            round_trip(self.world, stragglers=stragglers, survivors=survivors)

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        """A permit is held by a rollout that runs, and nothing is put back twice."""
        for generation in self.world.live:
            generation.check()
        self.world.check()
        assert max(Counter(self.world.waiting).values(), default=1) == 1

    @invariant()
    def what_is_settled_never_comes_back(self) -> None:
        """Whatever retention takes for settled was shipped or came to nothing, and stays so."""
        world = self.world
        checkpoint = json.loads(kept(world.state, world.config, world.leases.given_up))
        settled = settled_below(checkpoint["state"])
        assert settled >= self.settled, "a settled group is named again"
        assert self.world.spent.keys() >= set(range(settled)), "a group in use counts as settled"
        self.settled = settled

    def teardown(self) -> None:
        if hasattr(self, "world"):
            (stop if self.stopped else finish)(self.world)


def stop(world: World) -> None:
    """The run is stopped, whatever state it is in: everything ends."""
    world.state.lifecycle.status = "stopping"
    for _ in range(15):
        round_trip(world)
    assert not world.live and not world.leases.live, "a generation never closed"


def finish(world: World) -> None:
    """The run goes on to its end, whatever state it is in, and its books balance."""
    state = world.state
    world.resume()
    for _ in range(ROUNDS_PER_STEP * (MAX_STEPS + 1)):
        if state.steps.step == MAX_STEPS and not state.evals.open:
            break
        round_trip(world)
    assert state.steps.step == MAX_STEPS, f"stuck: {[g.scheduler.blocked for g in world.live]}"
    assert not state.evals.open, "an eval never ended"
    for _ in range(10):
        round_trip(world)
    assert world.executing == 0 and not any(g.groups for g in world.live)
    ready = {train_counter(group.group)[0] for group in state.train.ready}
    assert not ready & world.spent.keys()
    admitted = range(world.leases.next_train)
    waiting = {train_counter(g)[0] for g in world.waiting if g.startswith("train/")}
    assert not waiting & (ready | world.spent.keys()), "what was used would be used again"
    assert ready | waiting | world.spent.keys() == set(admitted), "a counter was lost"
    assert state.curriculum.draws.keys() <= {str(n) for n in range(state.dispatch.drawn_below)} - {
        str(n) for n in world.spent
    }
    served_in_turn(world, len(admitted))
    stop(world)


def served_in_turn(world: World, counters: int) -> None:
    """Every epoch of an env without a curriculum serves each of its examples once."""
    for env in world.config.train.env:
        if world.curriculum.samples(env.name):
            continue
        served = [world.example_of[n] for n in range(counters)]
        examples = [example for name, example in served if name == env.name]
        size = EXAMPLES[f"train/{env.name}"]
        for start in range(0, len(examples), size):
            epoch = examples[start : start + size]
            assert len(set(epoch)) == len(epoch), "an example was served twice in an epoch"


Pipeline.TestCase.settings = settings(max_examples=200, stateful_step_count=15, deadline=None)
TestPipeline = Pipeline.TestCase
